"""How the sampler draws: the right distribution, from nothing but a request's seed and position."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from sampling_reference import filtered_probs, start, states, step

from grok1_backend.engine.requests import SamplingParams
from grok1_backend.engine.sampler import Variant, _exponentials, draw

_draw = jax.jit(lambda weights, keys: draw(weights, lambda given: given, keys))


def draws(weights: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """[count] independent draws by the same weights ([V])."""
    keys = jax.random.split(jax.random.key(seed), count)
    rows = np.broadcast_to(weights, (count, len(weights)))
    return np.asarray(_draw(rows.astype(np.float32), keys))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells expected under 8 times are pooled."""
    order = np.argsort(expected)
    small = order[np.cumsum(expected[order]) < 8]
    small = order[: len(small) + 1]
    rest = np.setdiff1d(order, small)
    seen = np.append(observed[rest], observed[small].sum())
    awaited = np.append(expected[rest], expected[small].sum())
    return float(((seen - awaited) ** 2 / awaited).sum()), len(seen) - 1


def assert_distributed(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square within 5 standard deviations of its mean, and nothing impossible drawn."""
    observed = np.bincount(tokens, minlength=len(probs))
    assert observed[probs == 0].sum() == 0
    statistic, freedom = chi_square(observed, probs * len(tokens))
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)


# 3 and 64: one heat; 65 and 300: two, the first with padding; 1500: three.
@pytest.mark.parametrize("vocab_size", [3, 64, 65, 300, 1500])
def test_draws_follow_the_weights(vocab_size) -> None:
    generator = np.random.default_rng(vocab_size)
    weights = np.exp(1.5 * generator.normal(size=vocab_size))
    weights[generator.random(vocab_size) < 0.2] = 0
    weights[1] = weights.max() + 1
    assert_distributed(draws(weights, 8000), weights / weights.sum())


def test_the_statistic_notices_a_wrong_distribution() -> None:
    weights = np.exp(np.random.default_rng(1).normal(size=50))
    tokens = draws(weights, 8000)
    with pytest.raises(AssertionError):
        assert_distributed(tokens, weights**1.15 / (weights**1.15).sum())


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """1000 tokens of 1e-6 each beside one of nearly 1, far down the vocabulary."""
    weights = np.full(1500, 1e-6)
    weights[-1] = 1.0
    tokens = np.concatenate([draws(weights, 20_000, seed) for seed in range(4)])
    rare = int((tokens < 1499).sum())
    assert abs(rare - 80_000 * 1.5e-3) < 5 * np.sqrt(80_000 * 1.5e-3)
    assert len(np.unique(tokens)) > 80


def test_the_noise_is_exponential_and_fine_near_zero() -> None:
    """The winners of a race are near 0: on a grid there, the rarest tokens would never win."""
    noise = np.asarray(_exponentials(jax.random.key(0), 1_600_000), np.float64)
    assert abs(noise.mean() - 1) < 0.01
    assert abs((noise > 2).mean() - np.exp(-2)) < 0.003
    uniform = -np.expm1(-noise[noise < 2.0**-14])
    off_grid = np.abs(uniform * 2.0**32 - np.round(uniform * 2.0**32))
    assert len(off_grid) > 50
    assert (off_grid > 0.05).mean() > 0.5  # of 32 bits alone: all nearly 0


@pytest.mark.parametrize(
    ("variant", "how"),
    [
        (Variant.PLAIN, {"temperature": 1.0}),
        (Variant.PLAIN, {"temperature": 0.4}),
        (Variant.FULL, {"temperature": 2.0, "top_k": 7}),
        (Variant.FULL, {"temperature": 1.5, "top_p": 0.8}),
        (Variant.FULL, {"temperature": 1.5, "min_p": 0.2}),
        (Variant.FULL, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05}),
    ],
)
def test_requests_draw_from_the_reference_distribution(variant, how) -> None:
    """Positions of one long request: each is a fresh draw."""
    logits = np.random.default_rng(5).normal(size=(1, 40)).astype(np.float32)
    rows, turns = 50, 60
    state = states(40, *[SamplingParams(seed=seed, **how) for seed in range(rows)])
    tokens = []
    for _ in range(turns):
        state, output = step(state, np.repeat(logits, rows, axis=0), variant=variant)
        tokens.append(np.asarray(output.ids))
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | how
    probs, _ = filtered_probs(logits[0], **settings)
    assert_distributed(np.concatenate(tokens), probs)


def run(
    slot: int, neighbours: list[SamplingParams], variant: Variant, request: SamplingParams
) -> list[int]:
    """Ten tokens of the request in that slot of 4, in a batch of 4 rows with three others."""
    state = states(300, *neighbours[:slot], request, *neighbours[slot:])
    generator = np.random.default_rng(len(neighbours) + slot)
    tokens = []
    for turn in range(10):
        logits = generator.normal(size=(4, 300)).astype(np.float32)
        logits[slot] = np.random.default_rng(turn).normal(size=300)
        order = generator.permutation(4)
        state, output = step(state, logits[order], slots=list(order), variant=variant)
        tokens.append(int(output.ids[list(order).index(slot)]))
    return tokens


def test_tokens_depend_on_the_seed_alone() -> None:
    request = SamplingParams(seed=2**63 + 11, temperature=1.3)
    calm = [SamplingParams(temperature=0.0)] * 3
    wild = [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2, frequency_penalty=1.0, top_k=200),
        SamplingParams(seed=2**63 + 11),
    ]
    expected = run(0, calm, Variant.PLAIN, request)
    for slot in range(4):
        assert run(slot, calm, Variant.PLAIN, request) == expected
        assert run(slot, wild, Variant.FULL, request) == expected
    for other in (11, 2**63 + 12, 2**62 + 11):  # both halves of the seed count
        assert run(0, calm, Variant.PLAIN, SamplingParams(seed=other, temperature=1.3)) != expected


def test_positions_and_seeds_draw_apart() -> None:
    logits = np.zeros((16, 300), np.float32)
    state = states(300, *[SamplingParams(seed=seed) for seed in range(16)])
    tokens = []
    for _ in range(16):
        state, output = step(state, logits, variant=Variant.PLAIN)
        tokens.append(output.ids.tolist())
    grid = np.array(tokens)
    assert len(np.unique(grid)) > 120  # of 256 draws among 300; 172 expected
    assert all(len(np.unique(line)) > 8 for line in [*grid, *grid.T])


def test_a_request_is_the_same_in_every_variant_that_serves_it() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 9000)).astype(np.float32)
    greedy, plain = SamplingParams(temperature=0.0), SamplingParams(seed=6)
    state = states(9000, greedy, plain)
    found = {variant: step(state, logits, variant=variant)[1].ids.tolist() for variant in Variant}
    assert found[Variant.FULL] == found[Variant.PLAIN]
    assert found[Variant.GREEDY][0] == found[Variant.PLAIN][0]


def test_resumption_continues_the_draws() -> None:
    params = SamplingParams(seed=8)
    state = start(states(300), 0, params, [1, 2, 3])
    logits = np.zeros((1, 300), np.float32)
    drawn: list[int] = []
    for _ in range(8):
        state, output = step(state, logits)
        drawn.append(int(output.ids[0]))
    resumed = start(states(300), 0, params, [1, 2, 3], drawn[:5])
    for token in drawn[5:]:
        resumed, output = step(resumed, logits)
        assert int(output.ids[0]) == token


def test_the_least_variant_that_serves() -> None:
    for params, variant in (
        (SamplingParams(temperature=0.0), Variant.GREEDY),
        (SamplingParams(top_k=1, min_p=0.5), Variant.GREEDY),
        (SamplingParams(temperature=0.3), Variant.PLAIN),
        (SamplingParams(top_p=0.9), Variant.FULL),
        (SamplingParams(temperature=0.0, presence_penalty=1.0), Variant.FULL),
    ):
        assert Variant.of(params) is variant
    assert max(Variant.GREEDY, Variant.PLAIN) is Variant.PLAIN
