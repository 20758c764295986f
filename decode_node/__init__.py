"""The decode node: admission, shipped blocks, continuous batching, sampling, local prefill."""
