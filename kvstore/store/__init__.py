"""The store's process: its members, their puts and loads, an operator's requests."""
