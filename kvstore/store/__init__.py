"""The store's process: its members, their puts and fetches, an operator's requests."""
