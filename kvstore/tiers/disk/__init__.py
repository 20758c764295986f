"""Blocks in files: which record lies where, when it is written, the thread that does it."""
