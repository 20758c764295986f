"""Which nodes serve a request, the links to them, and its way from node to node."""
