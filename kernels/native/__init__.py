"""The native engine for CPUs: its C sources, how they are built and called, and packed weights."""
