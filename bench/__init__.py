"""kvferry.bench."""
