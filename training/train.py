"""Trains the embedded model: `python -m training.train --packages DIR --run DIR --steps N`.

Writes the tokenizer, a resumable state and a log into the run directory; `training.export` makes
the checkpoint from it. The same packages, steps and JAX give the same model on the same machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.corpus import load_corpus
from training.evaluation import ModelScorer, bits_of_stream
from training.objective import Params, init_params, make_loss
from training.optimizer import OptimizerState, init_state, update
from training.settings import (
    ADAM_RATE,
    DEVICES,
    MUON_RATE,
    SEED,
    TOKENS_PER_STEP,
    WEIGHT_DECAY,
    model_config,
    rate_factor,
    sequence_length,
)
from training.tokenizer import BOS, Tokens, encode_books, train_tokenizer

LOG_EVERY = 20
EVALUATE_EVERY = 250  # the state is saved then, too


class Batches:
    """Endless training batches: [batch, length + 1] int32.

    An epoch cuts the stream, from a random start, into windows in random order. Each begins with
    `BOS`, so that the model takes a prompt from anywhere in a text.
    """

    def __init__(self, stream: Tokens, seed: int) -> None:
        self._stream = stream
        self._random = np.random.default_rng(seed)
        self._starts = np.zeros(0, np.int64)
        self._length = 0

    def next(self, length: int) -> Tokens:
        batch = TOKENS_PER_STEP // length
        if length != self._length or len(self._starts) < batch:
            self._length = length
            first = self._random.integers(length)
            self._starts = np.arange(first, len(self._stream) - length, length)
            self._random.shuffle(self._starts)
        chosen, self._starts = self._starts[:batch], self._starts[batch:]
        windows = self._stream[chosen[:, None] + np.arange(length)]
        return np.concatenate([np.full((batch, 1), BOS, np.int32), windows], axis=1)


def make_step(loss: Any, mesh: Mesh) -> Any:
    """One jitted training step over a mesh of the axis `data`; its state is donated.

    Each device takes its share of the batch with its own experts' capacities, and orthogonalises
    its share of the experts.
    """

    def mean_gradient(params: Params, tokens: jax.Array) -> tuple[Params, jax.Array]:
        grads, nats = jax.grad(loss, has_aux=True)(params, tokens)
        return jax.lax.pmean(grads, "data"), jax.lax.pmean(nats, "data")

    everywhere, split = PartitionSpec(), PartitionSpec("data")
    gradient = jax.shard_map(
        mean_gradient,
        mesh=mesh,
        in_specs=(everywhere, split),
        out_specs=everywhere,
        check_vma=False,
    )

    @functools.partial(
        jax.jit, donate_argnums=(0, 1), out_shardings=NamedSharding(mesh, everywhere)
    )
    def step(
        params: Params, state: OptimizerState, tokens: jax.Array, factor: jax.Array
    ) -> tuple[Params, OptimizerState, jax.Array]:
        grads, nats = gradient(params, tokens)
        rates = MUON_RATE * factor, ADAM_RATE * factor
        shares = NamedSharding(mesh, split)
        params, state = update(params, grads, state, *rates, WEIGHT_DECAY, shares)
        return params, state, nats

    return step


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder of package files")
    parser.add_argument("--run", type=Path, required=True, help="folder for state and log")
    parser.add_argument("--steps", type=int, required=True, help="steps in all")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    args.run.mkdir(parents=True, exist_ok=True)
    corpus, config = load_corpus(args.packages), model_config()
    tokenizer_path, state_path = args.run / "tokenizer.model", args.run / "state.pickle"
    if not tokenizer_path.exists():
        train_tokenizer(corpus.training, tokenizer_path)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    batches = Batches(encode_books(tokenizer, corpus.training), SEED)
    development = encode_books(tokenizer, corpus.development)
    development_bytes = sum(len(book.text.encode()) for book in corpus.development)

    params = init_params(config, SEED)
    state, seconds = init_state(params), 0.0
    if state_path.exists():
        params, state, seconds = pickle.loads(state_path.read_bytes())
        for done in range(int(state.step)):  # the batches go on where they were
            batches.next(sequence_length(done, args.steps))
    mesh = jax.make_mesh((DEVICES,), ("data",))
    params, state = jax.device_put((params, state), NamedSharding(mesh, PartitionSpec()))
    step, scorer = make_step(make_loss(config), mesh), ModelScorer(config)

    losses: list[jax.Array] = []
    started = time.monotonic()
    for done in range(int(state.step), args.steps):
        tokens = batches.next(sequence_length(done, args.steps))
        factor = jnp.float32(rate_factor(done, args.steps))
        params, state, nats = step(params, state, jnp.asarray(tokens), factor)
        losses.append(nats)
        entry: dict[str, float] = {}
        if (done + 1) % LOG_EVERY == 0:
            entry["training_nats"] = round(float(jnp.mean(jnp.stack(losses))), 4)
            losses.clear()
        if (done + 1) % EVALUATE_EVERY == 0 or done + 1 == args.steps:
            elapsed = seconds + time.monotonic() - started
            saved = jax.device_get((params, state, elapsed))
            partial = state_path.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(saved))
            partial.replace(state_path)
            bits = bits_of_stream(scorer, params, development)
            entry["development_bits_per_byte"] = round(bits / development_bytes, 4)
        if entry:
            entry |= {"step": done + 1, "seconds": round(seconds + time.monotonic() - started)}
            with (args.run / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
