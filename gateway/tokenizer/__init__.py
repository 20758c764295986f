"""Text to ids and back, such that content never becomes control tokens."""
