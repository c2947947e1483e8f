"""`grok1-backend score`: how likely a model finds given tokens, one after another.

Runs the same layers over KV pages as serving does, in chunks, so that any prompt that fits the
context can be scored; the logits of a chunk are all that is held at a time.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from grok1_backend.checkpoint.arrays import CheckpointError
from grok1_backend.checkpoint.loading import load_parameters
from grok1_backend.checkpoint.progress import ProgressLog
from grok1_backend.engine.build import ModelDirectory
from grok1_backend.engine.errors import EngineError
from grok1_backend.engine.requests import TOP_TOKENS
from grok1_backend.errors import UserError
from grok1_backend.model.attention import KVPool
from grok1_backend.model.config import GrokConfig, config_path
from grok1_backend.model.parameters import Parameters
from grok1_backend.model.partition import create_mesh
from grok1_backend.model.sharding import MODEL_AXIS
from grok1_backend.model.steps import (
    POOL_SPECS,
    STEP_INPUT_SPECS,
    StepInput,
    hidden_states,
    logits_of,
    on_mesh,
    pool_creator,
)
from grok1_backend.text.tokenizer import TOKENIZER_FILE, Tokenizer

CHUNK = 128
"""The most tokens computed at a time."""
PAGE_SIZE = 64


@dataclass(frozen=True, eq=False)
class Chunk:
    """What the model says after each of some consecutive tokens."""

    start: int
    """Position of the first of them."""
    logits: NDArray[np.float32]  # [n, vocab_size]
    log_probs: NDArray[np.float32]  # [n]: of the token that follows; the last one's is NaN
    top_ids: NDArray[np.int32]  # [n, TOP_TOKENS]
    top_log_probs: NDArray[np.float32]  # [n, TOP_TOKENS]


def score(
    parameters: Parameters,
    config: GrokConfig,
    mesh: Mesh,
    tokens: Sequence[int],
    dtype: jax.typing.DTypeLike,
) -> Iterator[Chunk]:
    """Scores tokens, each given all those before it.

    Args:
      parameters: on `mesh`.
      tokens: at least one, of the vocabulary, as many as fit the context.
      dtype: of products' inputs and KV: float32 or bfloat16.

    Raises:
      ValueError: no tokens, too many, or one outside the vocabulary.
    """
    _check(config, tokens)
    size = min(CHUNK, 1 << (len(tokens) - 1).bit_length())
    num_pages = -(-len(tokens) // PAGE_SIZE)
    pool = pool_creator(config, mesh, num_pages, PAGE_SIZE, dtype)()
    table = np.arange(num_pages, dtype=np.int32)[None]
    over_mesh = on_mesh(
        _all_logits,
        parameters,
        mesh,
        config,
        dtype,
        (STEP_INPUT_SPECS,),
        (P(None, MODEL_AXIS), POOL_SPECS),
    )
    step = jax.jit(functools.partial(_step, over_mesh), donate_argnums=1)
    for start in range(0, len(tokens), size):
        here = tokens[start : start + size]
        after = tokens[start + 1 : start + 1 + len(here)]
        inputs = StepInput(
            _padded(here, size)[None],  # type: ignore[arg-type]
            np.array([start], np.int32),  # type: ignore[arg-type]
            np.array([len(here)], np.int32),  # type: ignore[arg-type]
            table,  # type: ignore[arg-type]
        )
        results, pool = step(parameters, pool, inputs, _padded(after, size))
        logits, log_probs, top_log_probs, top_ids = (
            np.array(array)[: len(here)] for array in jax.device_get(results)
        )
        log_probs[len(after) :] = np.nan
        yield Chunk(start, logits, log_probs, top_ids, top_log_probs)


def _check(config: GrokConfig, tokens: Sequence[int]) -> None:
    if not 1 <= len(tokens) <= config.sequence_len:
        raise ValueError(
            f"{len(tokens)} tokens are given: 1 to {config.sequence_len}, the context's length"
        )
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"a token is {token}: 0 to {config.vocab_size - 1}")


def _padded(values: Sequence[int], size: int) -> NDArray[np.int32]:
    padded = np.zeros(size, np.int32)
    padded[: len(values)] = values
    return padded


def _all_logits(
    parameters: Parameters, pool: KVPool, step: StepInput, *, dtype: Any, **static: Any
) -> tuple[jax.Array, KVPool]:
    """The logits after each token of the one row: [T, this shard's vocabulary] float32."""
    h, pool = hidden_states(parameters, pool, step, dtype=dtype, **static)
    return logits_of(parameters, h[0], **static), pool


def _step(
    over_mesh: Any, parameters: Parameters, pool: KVPool, step: StepInput, targets: jax.Array
) -> tuple[tuple[jax.Array, ...], KVPool]:
    logits, pool = over_mesh(parameters, pool, step)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
    top = jax.lax.top_k(log_probs, min(TOP_TOKENS, logits.shape[1]))
    return (logits, picked, *top), pool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="its directory, in either format")
    parser.add_argument("--config", help="published, or a file; else the checkpoint's config.toml")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="needs tokenizer.model beside the checkpoint or the config")
    what.add_argument("--tokens", help="token ids with commas between them: 1,5,9")
    what.add_argument("--file", help="a file of UTF-8 text")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="else the config's")
    parser.add_argument(
        "--all-logits", metavar="OUT.npy", help="write [tokens, vocab_size] float32"
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each token, and the perplexity.

    Raises:
      UserError: an argument, the config, the checkpoint or a file is wrong.
    """
    try:
        _run(arguments)
    except (CheckpointError, EngineError, OSError, ValueError) as error:
        raise UserError(str(error)) from error


def _run(arguments: argparse.Namespace) -> None:
    directory = ModelDirectory.read(arguments.config or arguments.checkpoint)
    config = directory.config
    tokenizer = _find_tokenizer(arguments)
    tokens = _read_tokens(arguments, tokenizer)
    _check(config, tokens)
    mesh = create_mesh((1, directory.runner.model_shards or len(jax.devices())))
    log = ProgressLog("loading parameters", lambda line: print(line, file=sys.stderr))
    dtype = arguments.dtype or directory.runner.dtype
    parameters = load_parameters(arguments.checkpoint, config, mesh, log, activations=dtype)
    out = None
    if arguments.all_logits:
        shape = (len(tokens), config.vocab_size)
        out = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            arguments.all_logits, mode="w+", dtype=np.float32, shape=shape
        )
    total = 0.0
    print(_line(0, tokens[0], None, tokenizer))
    for chunk in score(parameters, config, mesh, tokens, dtype):
        if out is not None:
            out[chunk.start : chunk.start + len(chunk.logits)] = chunk.logits
        first = chunk.start + 1
        for i, token in enumerate(tokens[first : first + len(chunk.log_probs)]):
            print(_line(first + i, token, (chunk, i), tokenizer))
            total += float(chunk.log_probs[i])
    if out is not None:
        out.flush()
    if len(tokens) > 1:
        mean = total / (len(tokens) - 1)
        print(
            f"tokens {len(tokens)}  log-probability {total:.6f}  perplexity {math.exp(-mean):.6g}"
        )


def _find_tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    places = [Path(arguments.checkpoint)]
    if arguments.config:
        places.append(config_path(arguments.config).parent)
    for place in places:
        if (place / TOKENIZER_FILE).is_file():
            return Tokenizer(place / TOKENIZER_FILE)
    return None


def _read_tokens(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> list[int]:
    if arguments.tokens is not None:
        try:
            return [int(token) for token in arguments.tokens.split(",")]
        except ValueError:
            raise ValueError(f"--tokens is {arguments.tokens!r}: ids such as 1,5,9") from None
    if tokenizer is None:
        raise ValueError(
            f"no {TOKENIZER_FILE} beside the checkpoint or the config: give --tokens, not text"
        )
    text = arguments.text
    if text is None:
        text = Path(arguments.file).read_bytes().decode()
    return tokenizer.encode(text)


def _line(
    position: int, token: int, scored: tuple[Chunk, int] | None, tokenizer: Tokenizer | None
) -> str:
    """Position, token, its text, its log-probability, and the most likely ones in its place."""

    def shown(token: int) -> str:
        if tokenizer is None or token >= tokenizer.vocab_size:
            return str(token)
        return f"{token} {tokenizer.token_bytes(token).decode(errors='replace')!r}"

    if scored is None:
        return f"{position}\t{shown(token)}\t-"
    chunk, i = scored
    best = zip(chunk.top_ids[i], chunk.top_log_probs[i], strict=True)
    top = ", ".join(f"{shown(int(other))}: {log_prob:.6f}" for other, log_prob in best)
    return f"{position}\t{shown(token)}\t{chunk.log_probs[i]:.6f}\t{top}"
