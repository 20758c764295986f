"""What travels between processes, and how: messages, their encoding, sockets, who is let in."""
