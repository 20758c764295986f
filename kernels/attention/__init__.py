"""Attention over the paged pool."""
