"""Benchmarks: one command a file or folder, and what they share: server, machine, document."""
