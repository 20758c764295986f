"""The OpenAI API in front of the nodes: text in and out, and which node serves what."""
