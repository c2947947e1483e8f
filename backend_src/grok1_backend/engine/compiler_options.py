"""What XLA is told when it compiles a model's programs for GPUs, pinned for versions of jaxlib.

Given with each compilation and not by `XLA_FLAGS`: an option that a version does not know is then
an error that names it instead of the end of the process, and other programs of the process, and
other platforms, are left alone.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Final

import jaxlib.version

from grok1_backend.kernels import choice

log = logging.getLogger(__name__)

Options = dict[str, str | bool]

# Command buffers are CUDA graphs: a layer, some 30 small kernels and 2 all-reduces, becomes one
# launch. XLA leaves NCCL's collectives out by default.
_GRAPHS: Final = (
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION,COLLECTIVES"
)

PINNED: Final[dict[str, Options]] = {
    "0.7.1": {
        "xla_gpu_enable_command_buffer": _GRAPHS,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True,
    },
    "0.12.0.1": {
        "xla_gpu_enable_command_buffer": f"{_GRAPHS},COLLECTIVES_KERNEL",
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE",
    },
}
"""Version of jaxlib to options. The sum of a decode step's rows is a few hundred KB: a kernel that
reads all neighbours at once (one-shot) takes a fraction of the time of NCCL's ring."""


def compiler_options() -> Options | None:
    """The options for the platform and the jaxlib that are used; None for XLA's own.

    What `XLA_FLAGS` sets is left as it sets it.
    """
    if not choice.on_gpu():
        return None
    version = jaxlib.version.__version__
    pinned = PINNED.get(version)
    if pinned is None:
        log.warning("no compiler options are known for jaxlib %s", version)
        return None
    already_set = re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))
    options = {name: value for name, value in pinned.items() if name not in already_set}
    log.info("compiler options: %s", options)
    return options
