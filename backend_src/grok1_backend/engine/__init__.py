"""Continuous batching over a paged KV cache. Knows nothing of Triton."""
