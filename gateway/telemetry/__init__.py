"""What is told of a request: metrics, spans, the access log."""
