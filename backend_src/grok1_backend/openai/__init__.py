"""The OpenAI-compatible gateway: HTTP in, gRPC streams of `grok1_generate` out; an extra."""
