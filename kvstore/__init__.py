"""Bytes, identities and the wire: what every kvferry process shares. Never imports torch."""
