# The production image: NVIDIA's tritonserver, JAX for CUDA from a lock, this package and its models.
#
#   docker build -t grok1 .
#   docker run --gpus all --shm-size=2g --ulimit memlock=-1 -p 8000:8000 -p 8001:8001 -p 8002:8002 \
#     -v /data/grok-1:/models/grok-1:ro -v grok1-cache:/var/cache/grok1 grok1
#
# --shm-size: Triton passes tensors to Python models through /dev/shm, and Docker gives it 64 MB.

# Release 25.06 has Python 3.12 and CUDA 12.9. Needed: 24.12 or later, for the cancellation of gRPC
# streams under load and for NumPy 2.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.06-py3

FROM ${TRITON_IMAGE} AS build
# Unpinned: Ubuntu keeps no older versions to pin to.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/grok1
COPY Makefile pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY backend_src backend_src
RUN --mount=type=cache,target=/root/.cache/pip \
    make install LOCK=cuda PACKAGE=. VENV=/opt/grok1/venv
# One folder of links to all CUDA libraries that JAX's wheels brought.
RUN mkdir cuda && ln -s /opt/grok1/venv/lib/python3.12/site-packages/nvidia/*/lib/*.so* cuda/

FROM ${TRITON_IMAGE}
COPY --from=build /opt/grok1/venv /opt/grok1/venv
COPY --from=build /opt/grok1/cuda /opt/grok1/cuda
COPY model_repository /opt/grok1/model_repository
RUN install --directory --owner=1000 --group=1000 /var/cache/grok1
# Triton's Python stub has the packages of this environment before the image's own, and JAX the
# libraries of its wheels.
ENV PATH=/opt/grok1/venv/bin:$PATH \
    PYTHONPATH=/opt/grok1/venv/lib/python3.12/site-packages \
    LD_LIBRARY_PATH=/opt/grok1/cuda:$LD_LIBRARY_PATH \
    PYTHONUTF8=1 \
    GROK1_MODEL=/models/grok-1 \
    JAX_COMPILATION_CACHE_DIR=/var/cache/grok1
VOLUME /var/cache/grok1
# The image's user triton-server, by number, so that Kubernetes can tell that it is not root.
USER 1000:1000
EXPOSE 8000 8001 8002
# Healthy means that a token comes, after minutes of loading and compiling at the first start.
HEALTHCHECK --interval=30s --timeout=15s --start-period=45m --retries=3 \
    CMD ["grok1-backend", "health", "--timeout=10"]
CMD ["tritonserver", \
     "--model-repository=/opt/grok1/model_repository", \
     "--backend-config=python,thread-pool-size=32", \
     "--exit-timeout-secs=60"]
