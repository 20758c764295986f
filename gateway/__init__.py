"""kvferry.gateway."""
