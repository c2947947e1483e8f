"""Huge pages for what every step reads, on Linux with the model on the CPU.

A step reads all its weights once: in pages of 4 KB much of that time goes to the addresses of the
pages, not to their contents. JAX takes its memory from malloc, which asks for no huge pages.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import jax

_MADV_COLLAPSE = 25
_HUGE_PAGE = 2**21


def collapse(arrays: Any) -> None:
    """Moves the pages of large arrays together into huge ones; the arrays themselves stay.

    Kernels before Linux 6.1 do not know how, and one short of memory does what it can: then the
    pages stay as they are.

    Args:
      arrays: a tree of `jax.Array`.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            address = shard.data.unsafe_buffer_pointer()
            first = -(-address // _HUGE_PAGE) * _HUGE_PAGE
            size = (address + shard.data.nbytes - first) // _HUGE_PAGE * _HUGE_PAGE
            if size > 0:
                madvise(first, size, _MADV_COLLAPSE)
