"""`ModelRunner` on the reference's tiny model: its tokens, slots that do not touch each other, and
what xAI's own runner does wrong and this one does not.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
from golden_values import GOLDEN, golden_config, golden_parameters

from grok1_backend.engine.engine import Engine
from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from grok1_backend.engine.runner import ModelRunner
from grok1_backend.engine.runner_api import DecodeRow, PrefillRow
from grok1_backend.engine.runner_settings import RunnerSettings
from grok1_backend.kernels import native
from grok1_backend.model.parameters import place_parameters
from grok1_backend.model.partition import create_mesh

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference values beside the repo")

SETTINGS = RunnerSettings(
    num_slots=3, page_size=8, prefill_tokens=(8, 32), prefill_rows=(1, 3), decode_rows=(1, 3)
)
GREEDY = SamplingParams(temperature=0.0, seed=0, end_ids=())
PAGES = {0: [3, 17, 5, 9, 0, 22, 1, 12], 1: [4, 2, 23, 8, 15, 6, 19, 7], 2: [10, 11, 13, 14, 16]}
"""Of each slot, in no order."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return dict(np.load(GOLDEN / "golden_q8_fp32.npz"))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    config, mesh = golden_config(), create_mesh()
    parameters = place_parameters(golden_parameters("params_q8.npz"), config, mesh)
    lines: list[str] = []
    found = ModelRunner(config, parameters, mesh, SETTINGS, lines.append)
    assert len(lines) == 2 + 4 + 2 + 2 * 3 + 2  # one for each executable
    return found


def prompt_of(golden: dict[str, Any], case: str) -> Any:
    return golden[f"{case}/prompt"][: int(golden[f"{case}/length"])].astype(np.int32)


def generate(
    runner: ModelRunner,
    prompts: dict[int, Any],
    steps: int,
    sampling: SamplingParams = GREEDY,
    chunk: int = 32,
) -> dict[int, list[int]]:
    """Tokens of each slot: prefill in chunks, all slots at once, then decode together."""
    for slot, prompt in prompts.items():
        runner.start_slot(slot, sampling, prompt, len(prompt))
    tokens: dict[int, list[int]] = {slot: [] for slot in prompts}
    for start in range(0, max(map(len, prompts.values())), chunk):
        rows = [
            PrefillRow(
                slot=slot,
                tokens=prompt[start : start + chunk],
                start=start,
                pages=PAGES[slot],
                sample=start + chunk >= len(prompt),
            )
            for slot, prompt in prompts.items()
            if start < len(prompt)
        ]
        result = runner.prefill(rows).result()
        for row, token in zip(rows, result.token_ids, strict=True):
            if row.sample:
                tokens[row.slot].append(int(token))
    slots = sorted(prompts)
    for _ in range(steps - 1):
        rows_ = [DecodeRow(slot=slot, pages=PAGES[slot]) for slot in slots]
        result = runner.decode(rows_).result()
        assert result.finite.all()
        for slot, token in zip(slots, result.token_ids, strict=True):
            tokens[slot].append(int(token))
    return tokens


def test_there_is_a_bucket_for_the_one_row_that_is_scored() -> None:
    with pytest.raises(ValueError, match=r"prefill_rows is \[3\]: the first one must be 1"):
        RunnerSettings(num_slots=3, prefill_rows=(3,), decode_rows=(1, 3))


@pytest.mark.parametrize("chunk", [5, 8, 32])
def test_every_slot_has_its_own_tokens(
    runner: ModelRunner, golden: dict[str, Any], chunk: int
) -> None:
    """Three prompts at once, cut anywhere. xAI's runner keeps one list of tokens for all slots."""
    cases = {0: "len17", 1: "len31", 2: "len5"}
    prompts = {slot: prompt_of(golden, case) for slot, case in cases.items()}
    tokens = generate(runner, prompts, 16, chunk=chunk)
    for slot, case in cases.items():
        assert tokens[slot] == golden[f"{case}/greedy_tokens"].tolist()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}])
def test_each_way_to_say_greedy(
    runner: ModelRunner, golden: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """xAI's sampler divides by temperature 0, and at top-p 0 may keep every token."""
    params = SamplingParams(seed=123, end_ids=(), **sampling)
    tokens = generate(runner, {1: prompt_of(golden, "padded")}, 16, params)
    assert tokens[1] == golden["padded/greedy_tokens"].tolist()


def test_neighbours_change_no_bit(runner: ModelRunner, golden: dict[str, Any]) -> None:
    """The same executables, with other neighbours, before and behind, that draw and filter."""

    def log_probs(neighbours: dict[int, tuple[Any, SamplingParams]], mine: int) -> list[Any]:
        own = prompt_of(golden, "len17")
        prompts = {mine: (own, GREEDY)} | neighbours
        for slot, (prompt, sampling) in prompts.items():
            runner.start_slot(slot, sampling, prompt, len(prompt))
        rows = [
            PrefillRow(slot=slot, tokens=prompt, start=0, pages=PAGES[slot], sample=True)
            for slot, (prompt, _) in sorted(prompts.items())
        ]
        place = sorted(prompts).index(mine)
        steps = [runner.prefill(rows).result()]
        decode = [DecodeRow(slot=slot, pages=PAGES[slot]) for slot in sorted(prompts)]
        steps += [runner.decode(decode).result() for _ in range(6)]
        return [
            (step.token_ids[place], step.top_ids[place], step.top_log_probs[place])
            for step in steps
        ]

    drawing = SamplingParams(seed=9, temperature=1.3, top_p=0.8)
    long, short = prompt_of(golden, "len31"), prompt_of(golden, "len1")
    alone = log_probs({1: (short, GREEDY), 2: (short, GREEDY)}, 0)
    others = [
        log_probs({1: (long, drawing), 2: (short, GREEDY)}, 0),
        log_probs({0: (long, GREEDY), 2: (short, drawing)}, 1),
    ]
    for other in others:
        for found, expected in zip(other, alone, strict=True):
            for part, same in zip(found, expected, strict=True):
                np.testing.assert_array_equal(part, same)


def test_scores_are_those_of_the_logits(runner: ModelRunner, golden: dict[str, Any]) -> None:
    values = np.load(GOLDEN / "golden_q8.npz")  # has the prompt; its logits are bfloat16's
    prompt = prompt_of(golden, "len17")
    assert (values["len17/prompt"][:17] == prompt).all()
    runner.start_slot(0, GREEDY, prompt, len(prompt))
    row = PrefillRow(slot=0, tokens=prompt, start=0, pages=PAGES[0], sample=True)
    scored = runner.prefill_scored(row, int(golden["len17/greedy_tokens"][0]))
    logits = np.float64(golden["len17/prefill_logits_last"])
    log_probs = logits - np.log(np.exp(logits).sum())
    scores = scored.scores()
    assert scores.log_probs.shape == (17,)
    assert scores.log_probs[-1] == pytest.approx(log_probs.max(), abs=1e-4)
    assert scores.top_ids[-1].tolist() == np.argsort(-logits)[:8].tolist()
    assert scores.top_log_probs[-1] == pytest.approx(-np.sort(-log_probs)[:8], abs=5e-4)
    assert scores.top_log_probs[-1, 0] == scores.log_probs[-1]  # the same token: the same number
    assert scored.result().token_ids[0] == logits.argmax()
    # The other positions: what a prefill that ends there would say.
    for end in (1, 9):
        runner.start_slot(1, GREEDY, prompt[:end], end)
        part = PrefillRow(slot=1, tokens=prompt[:end], start=0, pages=PAGES[1], sample=True)
        there = runner.prefill_scored(part, int(prompt[end])).scores()
        assert there.log_probs[-1] == pytest.approx(scores.log_probs[end - 1], abs=1e-4)


def test_resumption_goes_on_where_it_stopped(runner: ModelRunner, golden: dict[str, Any]) -> None:
    """A slot that is started with a history of prompt and output, in another slot and pages."""
    sampling = SamplingParams(
        seed=5, temperature=0.9, top_p=0.9, repetition_penalty=1.2, end_ids=()
    )
    prompt = prompt_of(golden, "len17")
    whole = generate(runner, {0: prompt}, 12, sampling)[0]
    history = np.concatenate([prompt, np.int32(whole[:5])])
    runner.start_slot(1, sampling, history, len(prompt))
    row = PrefillRow(slot=1, tokens=history, start=0, pages=PAGES[1], sample=True)
    tokens = [int(runner.prefill([row]).result().token_ids[0])]
    decode = [DecodeRow(slot=1, pages=PAGES[1])]
    tokens += [int(runner.decode(decode).result().token_ids[0]) for _ in range(6)]
    assert tokens == whole[5:]


def test_steps_compute_two_experts_a_token(runner: ModelRunner, golden: dict[str, Any]) -> None:
    """Counted in the kernels, in padded buckets: neither all experts, nor any for padding."""
    if not native.available("float32"):
        pytest.skip("the native kernels cannot be built here")
    config, prompt = runner.config, prompt_of(golden, "len17")
    token_pairs = config.num_layers * config.num_selected_experts
    expert_bytes = 3 * config.emb_size * config.ffn_size
    runner.start_slot(0, GREEDY, prompt, len(prompt))
    row = PrefillRow(slot=0, tokens=prompt, start=0, pages=PAGES[0], sample=True)
    counts = [native.counters()]
    for step in (lambda: runner.prefill([row]), lambda: runner.decode([DECODE])):
        step().result()
        counts.append(native.counters())
    (prefill_pairs, _), (decode_pairs, decode_bytes) = np.diff(counts, axis=0)
    assert prefill_pairs == len(prompt) * token_pairs
    assert decode_pairs == token_pairs
    assert decode_bytes == token_pairs * expert_bytes


DECODE = DecodeRow(slot=0, pages=PAGES[0])


def test_a_step_keeps_what_it_took_over_until_it_is_read(
    runner: ModelRunner, golden: dict[str, Any]
) -> None:
    """Else the host waits for the step, instead of working while the device does."""
    prompt = prompt_of(golden, "len5")
    generate(runner, {0: prompt}, 1)
    before = runner._pool, runner._state
    step = runner.decode([DecodeRow(slot=0, pages=PAGES[0])])
    assert [id(array) for array in step.donated] == [id(array) for array in before]
    assert all(array.is_deleted() for array in jax.tree.leaves(step.donated))


def test_recovery_begins_anew(runner: ModelRunner, golden: dict[str, Any]) -> None:
    prompt = prompt_of(golden, "len5")
    generate(runner, {0: prompt}, 3)
    jax.tree.map(lambda array: array.delete(), runner._pool)  # as a step that raised leaves it
    compiled = runner.num_compilations
    runner.recover()
    assert generate(runner, {0: prompt}, 16)[0] == golden["len5/greedy_tokens"].tolist()
    assert runner.num_compilations == compiled


def test_what_is_compiled_later_is_counted(runner: ModelRunner) -> None:
    compiled = runner.num_compilations
    jax.jit(lambda x: 5 * x)(np.ones(7, np.float32))
    assert runner.num_compilations == compiled + 1


class TestInTheEngine:
    """The same model behind the scheduler."""

    @pytest.fixture
    def engine(self, runner: ModelRunner) -> Iterator[Engine]:
        runner.recover()
        engine = Engine(runner, end_ids=(golden_config().eos_token,))
        yield engine
        engine.close()

    def tokens(self, engine: Engine, prompt: Any, **sampling: Any) -> tuple[list[int], Any]:
        events: queue.Queue[TokenEvent] = queue.Queue()
        params = SamplingParams(temperature=0.0, max_tokens=16, **sampling)
        prompt_ids = tuple(int(token) for token in prompt)
        request = GenerationRequest(request_id="a", prompt=prompt_ids, sampling=params)
        engine.submit(request, events.put)
        found: list[int] = []
        while True:
            event = events.get(timeout=120)
            found += event.token_ids
            if event.finish_reason:
                return found, event

    def test_an_end_id_ends_the_output(self, engine: Engine, golden: dict[str, Any]) -> None:
        """xAI's runner never tests for the end: it always gives as many tokens as asked for."""
        prompt, expected = prompt_of(golden, "len17"), golden["len17/greedy_tokens"].tolist()
        end = next(token for token in expected[3:] if expected.index(token) >= 3)
        found, last = self.tokens(engine, prompt, end_ids=(end,))
        assert found[: expected.index(end)] == expected[: expected.index(end)]
        assert last.finish_reason is FinishReason.STOP
        assert len(found) <= expected.index(end) + 1
        found, last = self.tokens(engine, prompt, end_ids=(end,), ignore_eos=True)
        assert found == expected
        assert last.finish_reason is FinishReason.LENGTH

    def test_a_prompt_is_never_cut(self, engine: Engine) -> None:
        """xAI's runner cuts a long prompt on the left and goes on with the length it had before.
        Here it is refused, and one that just fits is computed whole."""
        limit = golden_config().sequence_len
        with pytest.raises(EngineError, match=f"{limit} is the limit") as refused:
            self.tokens(engine, np.arange(1, limit - 14))
        assert refused.value.code is ErrorCode.INVALID_ARG
        prompt = np.arange(1, limit - 15)
        found, last = self.tokens(engine, prompt)
        assert last.num_input_tokens == len(prompt) == limit - 16
        assert len(found) == 16
