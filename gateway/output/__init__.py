"""One choice of an answer: its tokens as text, and where a stop string ends it."""
