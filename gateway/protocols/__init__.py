"""The form of each API: what a request may say, and what an answer looks like."""
