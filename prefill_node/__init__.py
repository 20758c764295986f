"""The prefill node: computes prompts in chunks and ships their KV blocks. It never samples."""
