"""Which token the sampler may choose: filters, edits, edge cases, golden values."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import edited_logits, filtered_probs, start, states, step

from grok1_backend.engine.decode_state import WINDOW, slot_start
from grok1_backend.engine.errors import EngineError
from grok1_backend.engine.filters import filter_by, top
from grok1_backend.engine.requests import TOP_TOKENS, SamplingParams
from grok1_backend.engine.sampler import Variant, draw

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "golden_sampling.npz"

GREEDY = SamplingParams(temperature=0.0)


@jax.jit
def _filtered(logits, *settings):
    _, weigh = filter_by(logits, *settings)
    return weigh(logits)


_top = jax.jit(top, static_argnames="count")


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def probabilities(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """[B, V] of the fast sampler."""
    rows = len(logits)
    weights = _filtered(
        np.asarray(logits, np.float32),
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
    )
    weights = np.asarray(weights, np.float64)
    return weights / weights.sum(axis=1, keepdims=True)


# --- Filters ---------------------------------------------------------------------------------


# 20 tokens: all are candidates; 700: thresholds beyond the candidates; 9000: searched by blocks.
@pytest.mark.parametrize("vocab_size", [20, 700, 9000])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([0, 2, 5, 40, 1000]),
    scale=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 19, 20, 127, 128, 129, 650, 8000, 10**6]),
    top_p=st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_filters_equal_a_sort(
    vocab_size, seed, levels, scale, temperature, top_k, top_p, min_p
) -> None:
    logits = normal(1, vocab_size, seed=seed, scale=scale)
    if levels:  # few values: many ties
        logits = np.round(logits * levels / scale / 4) * np.float32(scale / levels)
    expected, margin = filtered_probs(logits[0], temperature, top_k, top_p, min_p)
    assume(margin > 1e-5)
    got = probabilities(logits, temperature, top_k, top_p, min_p)[0]
    np.testing.assert_array_equal(got > 0, expected > 1e-37)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-9)


def test_ties_stay_together() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 0.0]])
    kept = lambda **how: np.flatnonzero(probabilities(logits, **how)[0]).tolist()  # noqa: E731
    none = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert kept(**none) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert kept(**none | {"top_k": 1}) == [1, 3]
    assert kept(**none | {"top_k": 3}) == [1, 2, 3, 4, 5]
    assert kept(**none | {"top_p": 0.1}) == [1, 3]
    assert kept(**none | {"top_p": 0.7}) == [1, 2, 3, 4, 5]
    assert kept(**none | {"min_p": 0.2}) == [1, 2, 3, 4, 5]


def test_uniform_logits_are_all_kept() -> None:
    for top_k, top_p in ((50, 1.0), (0, 0.5), (50, 0.5)):
        assert (probabilities(np.zeros((1, 9000)), 1.0, top_k, top_p, 0.0) > 0).all()


def test_top_p_is_of_the_mass_that_top_k_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))
    # Of the first two, 0.4 / 0.7 = 0.57 < 0.6; of all, 0.4 + 0.3 > 0.6 as well, but at 0.5 only
    # the whole distribution needs a second token.
    assert (probabilities(logits, 1.0, 2, 0.6, 0.0)[0] > 0).tolist() == [True, True, False, False]
    assert (probabilities(logits, 1.0, 2, 0.5, 0.0)[0] > 0).tolist() == [True, False, False, False]
    assert (probabilities(logits, 1.0, 0, 0.5, 0.0)[0] > 0).tolist() == [True, True, False, False]


def test_rows_differ_in_settings_and_need_not_wait_for_each_other() -> None:
    logits = normal(4, 700, scale=0.1)
    hows = [(1.0, 0, 1.0, 0.0), (0.5, 3, 0.9, 0.0), (2.0, 500, 0.5, 0.0), (1.0, 0, 1.0, 0.9)]
    columns = [np.array(column) for column in zip(*hows, strict=True)]
    weights = _filtered(
        logits,
        columns[0].astype(np.float32),
        columns[1].astype(np.int32),
        columns[2].astype(np.float32),
        columns[3].astype(np.float32),
    )
    for row, how in enumerate(hows):
        alone = _filtered(
            np.stack([logits[row]] * 4),
            *(
                np.full(4, value, np.int32 if index == 1 else np.float32)
                for index, value in enumerate(how)
            ),
        )
        np.testing.assert_array_equal(weights[row], alone[0])


@pytest.mark.parametrize("vocab_size", [8, 100, 9000, 9001])
def test_top_is_in_order_with_the_lowest_ids_first(vocab_size) -> None:
    logits = np.round(normal(3, vocab_size)) + 0.0  # the device ranks 0.0 above -0.0
    values, ids = _top(logits, 8)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=1))


# --- Golden values of xAI's sampler --------------------------------------------------------------


@pytest.fixture(scope="module")
def golden():
    if not GOLDEN.exists():
        pytest.skip("the golden values (../shared/golden) are not on this machine")
    return np.load(GOLDEN)


@pytest.mark.parametrize("mask", ["mask_ones", "mask_half"])
@pytest.mark.parametrize("top_p", ["1.0", "0.9", "0.5", "0.1"])
def test_golden_probabilities(golden, mask, top_p) -> None:
    # The original puts -1e10 where this puts -inf: both are probability 0. Equal up to the
    # rounding of one softmax in float32.
    logits = np.where(golden[mask] > 0, golden["logits"][:, 0], -np.inf)
    for row, temperature in enumerate(golden["temperature"]):
        got = probabilities(logits[row : row + 1], temperature, 0, float(top_p), 0.0)[0]
        expected = golden[f"f32/p{top_p}/{mask}/probs"][row, 0]
        np.testing.assert_array_equal(got > 0, expected > 0)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-9)
        top_ids = golden[f"f32/p{top_p}/{mask}/top8_ids"][row]
        np.testing.assert_allclose(
            got[top_ids], golden[f"f32/p{top_p}/{mask}/top8_probs"][row], rtol=2e-5, atol=1e-9
        )


def test_top_p_0_is_argmax_where_the_original_may_keep_everything(golden) -> None:
    logits = golden["logits"][:, 0]
    state = states(logits.shape[1], *[SamplingParams(top_p=0.0)] * len(logits))
    for variant in Variant:
        _, output = step(state, logits, variant=variant)
        np.testing.assert_array_equal(output.ids, logits.argmax(axis=1))


# --- Edge cases ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 1e-46},
        {"top_p": 0.0},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"allowed_token_ids": (42,), "logit_bias": ((42, -500.0),)},
    ],
)
def test_only_one_token_can_come(how) -> None:
    logits = normal(2, 300)
    params = SamplingParams(**how)
    expected = [42, 42] if "allowed_token_ids" in how else logits.argmax(axis=1)
    for seed in range(5):
        state = states(300, *[SamplingParams(**{**vars(params), "seed": seed})] * 2)
        _, output = step(state, logits)
        np.testing.assert_array_equal(output.ids, expected)


def test_argmax_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.zeros((1, 300), np.float32)
    logits[0, [17, 120, 299]] = 5.0
    for variant in Variant:
        _, output = step(states(300, GREEDY), logits, variant=variant)
        assert output.ids.tolist() == [17]
        assert output.top_ids[0, :3].tolist() == [17, 120, 299]


@pytest.mark.parametrize("top_k", [0, 300, 301, 2**31 - 1])
def test_top_k_of_none_or_all_filters_nothing(top_k) -> None:
    assert (probabilities(normal(1, 300), 1.0, top_k, 1.0, 0.0) > 0).all()


def test_bans_that_leave_nothing_are_not_applied() -> None:
    logits = normal(1, 300)
    bans = SamplingParams(allowed_token_ids=(7, 9), bad_words=((7,), (9,)), temperature=0.0)
    _, output = step(states(300, bans), logits)
    assert output.ids.tolist() == [7 if logits[0, 7] >= logits[0, 9] else 9]
    ends = SamplingParams(allowed_token_ids=(7,), min_tokens=5, end_ids=(7,))
    _, output = step(states(300, ends), logits)
    assert output.ids.tolist() == [7]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", Variant)
def test_a_row_that_is_not_finite_harms_no_other(bad, variant) -> None:
    requests = [
        GREEDY,
        SamplingParams(seed=3),
        SamplingParams(seed=4),
        SamplingParams(seed=5, top_p=0.9) if variant is Variant.FULL else SamplingParams(seed=5),
    ]
    logits = normal(4, 300)
    state = states(300, *requests)
    good_state, good = step(state, logits, variant=variant)
    broken = logits.copy()
    broken[1, 123] = bad
    broken[2, :] = bad
    state, output = step(state, broken, variant=variant)
    assert good.finite.all()
    assert output.finite.tolist() == [True, False, False, True]
    assert ((output.ids >= 0) & (output.ids < 300)).all()
    for row in (0, 3):
        assert output.ids[row] == good.ids[row]
        assert output.log_probs[row] == good.log_probs[row]
        np.testing.assert_array_equal(output.top_log_probs[row], good.top_log_probs[row])
        assert state.last_token[row] == good_state.last_token[row]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_settings_that_are_not_finite_are_refused(field, value) -> None:
    with pytest.raises(EngineError, match=field):
        SamplingParams(**{field: value})


# --- Log-probabilities -----------------------------------------------------------------------


@pytest.mark.parametrize("variant", Variant)
def test_log_probs_are_those_of_the_model(variant) -> None:
    logits = normal(2, 9000)
    how = {"temperature": 0.3, "logit_bias": ((5, 100.0),)} if variant is Variant.FULL else {}
    state = states(9000, GREEDY, SamplingParams(**how))
    _, output = step(state, logits, variant=variant)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    rows = np.arange(2)
    np.testing.assert_allclose(output.log_probs, exact[rows, output.ids], rtol=1e-5)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_TOKENS]
    np.testing.assert_array_equal(output.top_ids, expected)
    np.testing.assert_allclose(
        output.top_log_probs, np.take_along_axis(exact, expected, axis=1), rtol=1e-5
    )


# --- Edits -----------------------------------------------------------------------------------

tokens = st.integers(0, 29)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(tokens, min_size=1, max_size=12),
    output=st.lists(tokens, max_size=12),
    params=st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]),
        presence_penalty=st.sampled_from([-1.0, 0.0, 2.0]),
        frequency_penalty=st.sampled_from([-0.5, 0.0, 1.5]),
        min_tokens=st.integers(0, 12),
        ignore_eos=st.booleans(),
        end_ids=st.lists(tokens, max_size=8).map(tuple),
        bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=30).map(
            tuple
        ),
        logit_bias=st.lists(st.tuples(tokens, st.sampled_from([-20.0, -1.0, 3.0])), max_size=6).map(
            tuple
        ),
        allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=20).map(tuple),
    ),
)
def test_edits_equal_the_reference(seed, prompt, output, params) -> None:
    """Greedy, over several steps, so that counts and window are those the device keeps."""
    state = start(states(30), 0, params, prompt, output)
    output = list(output)
    for turn in range(3):
        logits = normal(1, 30, seed=seed + turn)
        state, got = step(state, logits)
        expected = edited_logits(logits[0], params, prompt, output)
        assert expected[int(got.ids[0])] >= expected.max() - 1e-5
        output.append(int(got.ids[0]))
        assert int(state.last_token[0]) == output[-1]
        assert int(state.length[0]) == len(prompt) + len(output)


def test_a_bad_word_of_several_tokens_is_banned_after_its_beginning_only() -> None:
    logits = np.zeros((1, 30), np.float32)
    logits[0, 9] = 5.0
    longest = tuple(range(11, 19))  # 8 tokens: all but the last fill the window
    params = SamplingParams(temperature=0.0, bad_words=((3, 4, 9), (*longest[:-1], 9)))
    for history, banned in (
        ([3, 4], True),
        ([1, 3, 4], True),
        ([4, 3], False),
        ([3, 4, 1], False),
        ([4], False),
        (list(longest[:-1]), True),
        (list(longest[1:-1]), False),
        ([3, 9], False),
    ):
        _, output = step(start(states(30), 0, params, history), logits)
        assert (int(output.ids[0]) != 9) == banned, history


def test_end_ids_are_banned_until_min_tokens() -> None:
    logits = np.zeros((1, 30), np.float32)
    logits[0, [2, 3]] = 5.0
    how = {"temperature": 0.0, "min_tokens": 3, "end_ids": (2, 3)}
    for ignore_eos, expected in ((False, [0, 0, 0, 2]), (True, [2, 2, 2, 2])):
        params = SamplingParams(**how, ignore_eos=ignore_eos)
        state = start(states(30), 0, params, [5, 6])
        ids = []
        for _ in expected:
            state, output = step(state, logits)
            ids.append(int(output.ids[0]))
        assert ids == expected


def test_a_slot_forgets_the_request_before() -> None:
    logits = normal(1, 30)
    best = int(logits[0].argmax())
    edits = SamplingParams(
        temperature=0.0, bad_words=((best,),), logit_bias=((3, 50.0),), frequency_penalty=2.0
    )
    state = states(30, edits)
    for _ in range(3):
        state, _ = step(state, logits)
    _, output = step(start(state, 0, GREEDY), logits)
    assert int(output.ids[0]) == best
    again = SamplingParams(temperature=0.0, frequency_penalty=0.001)
    _, output = step(start(state, 0, again), logits)
    assert int(output.ids[0]) == best


def test_resumption_rebuilds_what_the_device_kept() -> None:
    params = SamplingParams(
        seed=9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        bad_words=((4, 5),),
        min_tokens=6,
        end_ids=(1,),
    )
    state = start(states(30), 0, params, [3, 4])
    drawn: list[int] = []
    for turn in range(10):
        resumed = start(states(30), 0, params, [3, 4], drawn)
        for name, value in vars(state).items():
            np.testing.assert_array_equal(value[0], getattr(resumed, name)[0], err_msg=name)
        state, output = step(state, normal(1, 30, seed=turn))
        drawn.append(int(output.ids[0]))


def test_rows_that_do_not_advance_leave_their_slot() -> None:
    state = states(30, *[SamplingParams(frequency_penalty=0.5)] * 3)
    moved, _ = step(state, normal(3, 30), slots=[2, 3, 0], advance=[True, False, False])
    for name, value in vars(state).items():
        np.testing.assert_array_equal(value[:2], getattr(moved, name)[:2], err_msg=name)
    assert moved.length.tolist() == [1, 1, 2, 0, 0]
    assert int(moved.output_counts[2].sum()) == 1


def test_what_a_request_lacks_is_said() -> None:
    history = np.array([1], np.int32)
    with pytest.raises(ValueError, match="seed"):
        slot_start(SamplingParams(), history, 1, vocab_size=30, context_length=8)
    with pytest.raises(ValueError, match="end ids"):
        slot_start(
            SamplingParams(seed=1, min_tokens=2), history, 1, vocab_size=30, context_length=8
        )


def test_host_arrays_are_small() -> None:
    """What travels to the device for a request does not grow with the slots."""
    plain = slot_start(
        SamplingParams(seed=1), np.zeros(9, np.int32), 9, vocab_size=131072, context_length=8192
    )
    assert plain.edits is None
    edits = slot_start(
        SamplingParams(seed=1, presence_penalty=1.0),
        np.zeros(9, np.int32),
        9,
        vocab_size=131072,
        context_length=8192,
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(edits)) < 64 * 1024
    assert edits.edits is not None
    assert edits.edits.window.tolist() == [0] * WINDOW


def test_draw_never_takes_a_zero_weight() -> None:
    weights = np.zeros((64, 9001), np.float32)
    weights[np.arange(64), np.arange(64) * 140] = (
        2e-38  # float32: the least normal number is 1.2e-38
    )
    keys = jax.random.split(jax.random.key(0), 64)
    np.testing.assert_array_equal(
        jax.jit(draw, static_argnums=1)(weights, lambda w: w, keys), np.arange(64) * 140
    )
