"""Grok-1-architecture language models served by NVIDIA Triton, in JAX and Haiku."""

__version__ = "0.1.0"
