"""HTTP in and out: endpoints, access, server-sent events, and what an operator asks."""
