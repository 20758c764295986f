"""A node's side of the store: blocks put, fetched and shipped, and who waits for them."""
