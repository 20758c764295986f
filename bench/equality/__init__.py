"""`make bench-equality`: whether greedy output is that of `transformers`, token for token."""
