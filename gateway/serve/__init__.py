"""`kvferry serve`: which roles run where on this host, started, watched, restarted."""
