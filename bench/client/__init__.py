"""A client that loads any OpenAI-compatible server, and what its answers amount to."""
