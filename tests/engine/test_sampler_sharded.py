"""The vocabulary over 8 devices: the tokens, the state and the top 8 of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import functools
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from sampling_reference import states
from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.sampler import Variant, sample

ROWS, VOCABULARY = 4, 1600
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()), ("model",))
requests = {
    Variant.GREEDY: [SamplingParams(temperature=0.0)] * ROWS,
    Variant.PLAIN: [SamplingParams(seed=seed, temperature=0.8) for seed in range(ROWS)],
    Variant.FULL: [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2, top_k=40, repetition_penalty=1.3, bad_words=((5,),)),
        SamplingParams(temperature=0.0, logit_bias=((1599, 4.0),), frequency_penalty=3.0),
        SamplingParams(seed=3, min_p=0.1, allowed_token_ids=tuple(range(100, 1600, 3))),
    ],
}
slots, advance = np.arange(ROWS, dtype=np.int32), np.array([True, True, True, False])
for variant, params in requests.items():
    one = functools.partial(sample, variant=variant)
    many = jax.shard_map(
        functools.partial(sample, variant=variant, axis_name="model"),
        mesh=mesh, in_specs=(P(), P(None, "model"), P(), P()), out_specs=P(), check_vma=False,
    )
    one, many = jax.jit(one), jax.jit(many)
    state_one = state_many = states(VOCABULARY, *params)
    for turn in range(6):
        logits = np.random.default_rng(turn).normal(size=(ROWS, VOCABULARY)).astype(np.float32)
        if turn == 1:
            logits = np.round(logits) + np.float32(0)  # ties within and across devices
        if turn == 2:
            logits[2, 1599] = np.nan
        state_one, a = one(state_one, logits, slots, advance)
        state_many, b = many(state_many, logits, slots, advance)
        good = np.asarray(a.finite)
        assert good.tolist() == [True, True, turn != 2, True]
        np.testing.assert_array_equal(b.finite, a.finite)
        np.testing.assert_array_equal(b.ids[good], a.ids[good])
        np.testing.assert_array_equal(b.top_ids[good], a.top_ids[good])
        np.testing.assert_allclose(b.log_probs[good], a.log_probs[good], rtol=1e-5)
        np.testing.assert_allclose(b.top_log_probs[good], a.top_log_probs[good], rtol=1e-5)
        state_many = jax.device_get(state_many)
        for name, value in vars(state_one).items():
            np.testing.assert_array_equal(value[:2], getattr(state_many, name)[:2], err_msg=name)
    text = many.lower(state_one, logits, slots, advance).compile().as_text()
    gathers = text.count(" all-gather(") + text.count(" all-gather-start(")
    others = text.count(" all-reduce(") + text.count(" collective-permute(")
    assert (gathers, others) == (1 if variant is Variant.GREEDY else 2, 0), (gathers, others)
print("equal")
"""


def test_eight_devices_choose_as_one() -> None:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "backend_src"), str(Path(__file__).parent)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "equal", done.stderr[-4000:]
