"""What decode and prefill nodes have in common: start, reports, debugging, stall watch."""
