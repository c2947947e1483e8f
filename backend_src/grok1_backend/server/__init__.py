"""Starts a local tritonserver on a model repository, for development and tests.

Production uses NVIDIA's image and the tritonserver in it (see the Dockerfile), and none of this.
"""

from grok1_backend.server.options import LaunchError, ServerOptions
from grok1_backend.server.process import TritonServer

__all__ = ["LaunchError", "ServerOptions", "TritonServer"]
