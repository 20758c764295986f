"""From the bytes of a body to a prompt, in a process of its own where they are many."""
