"""Kernels for GPUs, in Pallas, by way of Triton's compiler: experts, projections, attention, and
loops over rows of the sampler.

The model's have the signatures of the native CPU kernels and are called like them: inside
`shard_map`, on a shard's own arrays. Weights are read as int8 where they lie in the stacks, and
converted in registers. No kernel waits for the host, and none has a derivative.
"""

from __future__ import annotations

from grok1_backend.kernels.gpu.attention import attends, attention
from grok1_backend.kernels.gpu.experts import experts
from grok1_backend.kernels.gpu.products import products
from grok1_backend.kernels.gpu.rows import each_row
from grok1_backend.kernels.gpu.tiles import takes

__all__ = ["attends", "attention", "each_row", "experts", "products", "takes"]
