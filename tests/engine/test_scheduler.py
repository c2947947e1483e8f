"""What the scheduler does in which step, with a runner that has no model."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, expected_output, log_prob
from stepped import SteppedEngine

from grok1_backend.engine.errors import EngineError, ErrorCode, invalid
from grok1_backend.engine.requests import FinishReason
from grok1_backend.engine.settings import EngineSettings


def output(prompt: range | list[int], max_tokens: int, seed: int = 0) -> list[int]:
    return expected_output(prompt, seed, max_tokens, 50)


def test_a_request_gets_its_tokens_one_by_one() -> None:
    engine = SteppedEngine(FakeRunner())
    answer = engine.ask("a", range(5), 7)
    engine.settle()
    assert answer.tokens == output(range(5), 7)
    assert [len(event.token_ids) for event in answer] == [1] * 7
    assert [event.num_output_tokens for event in answer] == list(range(1, 8))
    assert answer[0].log_probs.tolist() == [log_prob(answer.tokens[0])]
    assert answer[0].top_ids.tolist() == [[answer.tokens[0]] * 8]
    assert answer.reason is FinishReason.LENGTH
    assert answer[-1].num_input_tokens == 5
    engine.assert_nothing_left()


def test_without_streaming_there_is_one_event() -> None:
    engine = SteppedEngine(FakeRunner())
    answer = engine.ask("a", range(5), 7, stream=False)
    engine.settle()
    assert len(answer) == 1
    assert answer.tokens == output(range(5), 7)
    assert answer[0].log_probs.shape == (7,)
    assert answer[0].top_log_probs.shape == (7, 8)


def test_the_device_is_one_step_ahead_and_the_overrun_token_is_dropped() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    last = output(range(5), 3)[-1]
    answer = engine.ask("a", range(5), 20, end_ids=(last,))
    engine.settle()
    assert answer.tokens == output(range(5), 3)
    assert answer.reason is FinishReason.STOP
    # Two of the three tokens come from decode steps; the third decode step was one too many.
    assert [kind for kind, _ in runner.calls] == ["prefill", "decode", "decode", "decode"]
    assert engine.stats().generation_tokens == 3


def test_nothing_is_computed_beyond_max_tokens() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    engine.ask("a", range(5), 3)
    engine.settle()
    assert [kind for kind, _ in runner.calls] == ["prefill", "decode", "decode"]


def test_the_end_token_is_counted_and_has_no_text() -> None:
    engine = SteppedEngine(FakeRunner(), words=True)
    tokens = output(range(5), 3)
    answer = engine.ask("a", range(5), 20, end_ids=(tokens[-1],))
    engine.settle()
    assert answer.tokens == tokens
    assert answer[-1].text_trim == 1
    assert answer[-1].num_output_tokens == 3


def test_a_stop_word_is_held_back_and_trimmed() -> None:
    engine = SteppedEngine(FakeRunner(), words=True)
    tokens = output(range(5), 6)
    text = bytes(97 + token % 26 for token in tokens)
    answer = engine.ask("a", range(5), 20, stop_words=(text[3:6],))
    engine.settle()
    assert answer.tokens == tokens
    assert [len(event.token_ids) for event in answer] == [1, 1, 1, 3]
    assert answer[-1].text_trim == 3
    assert answer.reason is FinishReason.STOP


def test_stop_words_do_not_stop_before_min_tokens() -> None:
    engine = SteppedEngine(FakeRunner(), words=True)
    tokens = output(range(5), 9)
    text = bytes(97 + token % 26 for token in tokens)
    answer = engine.ask("a", range(5), 9, stop_words=(text[2:3],), min_tokens=9)
    engine.settle()
    assert answer.tokens == tokens


def test_held_back_tokens_come_with_the_last_event() -> None:
    engine = SteppedEngine(FakeRunner(), words=True)
    tokens = output(range(5), 4)
    text = bytes(97 + token % 26 for token in tokens)
    answer = engine.ask("a", range(5), 4, stop_words=(text[2:] + b"!",))
    engine.settle()
    assert answer.tokens == tokens
    assert [len(event.token_ids) for event in answer] == [1, 1, 2]
    assert answer[-1].text_trim == 0


def test_short_prompts_are_prefilled_together() -> None:
    runner = FakeRunner(max_prefill_tokens=8, max_prefill_rows=4)
    engine = SteppedEngine(runner, EngineSettings(prefill_token_budget=8))
    for name in "abc":
        engine.ask(name, [ord(name) % 50, 1, 2], 1)
    engine.turn()
    # Three rows of three tokens cost nine: one too many.
    assert runner.calls == [("prefill", ((0, 3), (1, 3)))]


def test_a_long_prompt_comes_in_chunks_between_decode_steps() -> None:
    runner = FakeRunner(max_prefill_tokens=8)
    engine = SteppedEngine(runner, EngineSettings(prefill_token_budget=6))
    stream = engine.ask("stream", range(3), 20)
    engine.turn(2)
    runner.calls.clear()
    long = engine.ask("long", range(40), 2)
    engine.settle()
    chunks = [("prefill", ((1, 6),)), ("decode", ((0, 1),))] * 6
    assert runner.calls[: len(chunks)] == chunks
    assert long.tokens == output(range(40), 2)
    assert stream.tokens == output(range(3), 20)


def test_a_common_prefix_is_computed_once() -> None:
    runner = FakeRunner(max_prefill_tokens=32)
    engine = SteppedEngine(runner)
    first = engine.ask("a", range(20), 3)
    engine.turn()
    second = engine.ask("b", [*range(20), 7], 3)
    engine.settle()
    assert [rows for kind, rows in runner.calls if kind == "prefill"] == [((0, 20),), ((1, 1),)]
    assert engine.stats().prefix_hit_tokens == 20
    assert first.tokens == output(range(20), 3)
    assert second.tokens == output([*range(20), 7], 3)


def test_memory_grows_with_tokens() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=12, page_size=4, max_prefill_tokens=48))
    engine.ask("a", range(10), 20)
    held = []
    while engine.turn():
        held.append(engine.stats().pages_used)
    assert held[0] == 3
    assert max(held) == -(-29 // 4)  # the last token needs no KV
    assert held == [*sorted(held[:-1]), 0]


def test_the_youngest_is_preempted_and_gets_the_same_tokens() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=8, page_size=4, context_length=32))
    old = engine.ask("old", range(4), 25)
    young = engine.ask("young", range(10, 14), 25)
    while not engine.stats().preemptions:
        assert engine.turn()
    assert [g.request.request_id for g in engine._scheduler._decoding] == ["old"]
    before = len(young.tokens)
    assert 0 < before < 25
    engine.settle()
    assert old.tokens == output(range(4), 25)
    assert young.tokens == output(range(10, 14), 25)
    assert [len(event.token_ids) for event in young] == [1] * 25
    engine.assert_nothing_left()


def test_a_waiting_request_is_not_overtaken_in_its_priority() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=10, page_size=4, num_slots=4))
    running = engine.ask("running", range(4), 30)
    engine.turn(2)
    large = engine.ask("large", range(10, 40), 2)
    small = engine.ask("small", range(5), 2)
    while not large.ended:
        engine.turn()
        assert not small.tokens or large.tokens
    engine.settle()
    assert running.tokens == output(range(4), 30)
    assert small.tokens == output(range(5), 2)


def test_cancelling_frees_slot_and_pages_within_a_step() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=1))
    first = engine.ask("first", range(6), 20)
    second = engine.ask("second", range(4), 2)
    engine.turn(4)
    assert engine.abort("first")
    engine.turn()
    assert first.reason is FinishReason.CANCELLED
    assert first.error == "CANCELLED: request 'first' was cancelled"
    assert first.tokens == output(range(6), 20)[: len(first.tokens)]
    assert engine.stats().running == 1
    engine.settle()
    assert second.tokens == output(range(4), 2)
    assert engine.stats().cancellations == 1
    assert not engine.abort("first")
    engine.assert_nothing_left()


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=1))
    running = engine.ask("running", range(6), 20, deadline=10.0)
    waiting = engine.ask("waiting", range(6), 20, deadline=5.0)
    engine.turn(3)
    engine.now = 5.0
    engine.turn()
    assert waiting.error == "DEADLINE_EXCEEDED: the request's deadline has passed"
    assert waiting.reason is FinishReason.ERROR
    assert not running.ended
    engine.now = 10.0
    engine.turn()
    assert running.error == "DEADLINE_EXCEEDED: the request's deadline has passed"
    assert running.tokens
    engine.settle()
    engine.assert_nothing_left()


def test_a_generation_has_a_maximum_time() -> None:
    limits = EngineSettings(max_generation_time=8.0)
    engine = SteppedEngine(FakeRunner(num_slots=1), limits)
    first = engine.ask("first", range(6), 20)
    engine.turn()
    second = engine.ask("second", range(6), 20)
    engine.now = 8.0
    engine.turn()
    assert first.error == "DEADLINE_EXCEEDED: the request ran longer than the limit of 8 s"
    engine.now = 15.0  # the second was admitted at 8
    engine.turn()
    assert not second.ended
    engine.now = 16.0
    engine.turn()
    assert second.ended


def test_prompt_scores_come_with_the_first_event() -> None:
    runner = FakeRunner(max_prefill_tokens=4)
    engine = SteppedEngine(runner)
    prompt = list(range(10, 20))
    engine.ask("before", prompt, 1)
    engine.settle()
    runner.calls.clear()
    answer = engine.ask("a", prompt, 2, scores=True)
    engine.settle()
    assert [rows for kind, rows in runner.calls if kind == "score"] == [
        ((0, 4),),
        ((0, 4),),
        ((0, 2),),
    ], "the prefix cache is not used"
    scores = answer[0].prompt_log_probs
    assert scores is not None
    assert scores.tolist() == [0.0, *(log_prob(token) for token in prompt[1:])]
    top_ids = answer[0].prompt_top_ids
    assert top_ids is not None
    assert top_ids[:, 0].tolist() == [-1, *prompt[1:]]
    top_log_probs = answer[0].prompt_top_log_probs
    assert top_log_probs is not None
    assert top_log_probs[:, 0].tolist() == [0, *(-token for token in prompt[1:])]
    assert answer[1].prompt_log_probs is None
    assert answer.tokens == output(prompt, 2)


def test_a_prompt_that_is_scored_is_alone_in_its_call() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    answers = [
        engine.ask("a", [1, 2, 3], 2),
        engine.ask("b", [4, 5], 2, scores=True),
        engine.ask("c", [6], 2),
        engine.ask("d", [7], 2),
    ]
    engine.settle()
    assert [answer.tokens for answer in answers] == [
        output(prompt, 2) for prompt in ([1, 2, 3], [4, 5], [6], [7])
    ]
    prefills = [call for call in runner.calls if call[0] != "decode"]
    assert prefills == [
        ("prefill", ((0, 3), (2, 1))),
        ("score", ((1, 2),)),
        ("prefill", ((3, 1),)),
    ]


def test_a_prompt_can_be_scored_without_output() -> None:
    engine = SteppedEngine(FakeRunner(max_prefill_tokens=4))
    answer = engine.ask("a", range(10, 20), 0, scores=True)
    engine.settle()
    assert len(answer) == 1
    assert answer.reason is FinishReason.LENGTH
    scores = answer[0].prompt_log_probs
    assert scores is not None
    assert scores.tolist() == [0.0, *(log_prob(token) for token in range(11, 20))]
    engine.assert_nothing_left()


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    good, bad = engine.ask("good", range(5), 8), engine.ask("bad", range(10, 16), 8)
    engine.turn(3)
    runner.not_finite = lambda slot: slot == 1
    engine.settle()
    assert good.tokens == output(range(5), 8)
    assert bad.error == "INTERNAL: the model's logits are not finite"
    runner.not_finite = lambda _slot: False
    runner.calls.clear()
    again = engine.ask("again", range(10, 16), 8)
    engine.settle()
    assert again.tokens == output(range(10, 16), 8)
    assert runner.calls[0] == ("prefill", ((0, 6),)), "its pages are not trusted any more"


def test_a_token_that_the_tokenizer_does_not_know_fails_its_request_alone() -> None:
    engine = SteppedEngine(FakeRunner(), words=True)
    good, bad = engine.ask("good", range(5), 8), engine.ask("bad", range(6), 8)
    unknown = output(range(6), 8)[3]

    def token_bytes(token: int) -> bytes:
        if token == unknown:
            raise invalid("token id", token, "0 to 9 in this tokenizer")
        return b"x"

    engine._live["bad"]._text._token_bytes = token_bytes
    engine.settle()
    assert good.tokens == output(range(5), 8)
    assert bad.tokens == output(range(6), 8)[:4]
    assert bad.error == f"INVALID_ARG: token id is {unknown}: 0 to 9 in this tokenizer"


def fail_at(kind: str) -> object:
    raise RuntimeError(f"no {kind}")


@pytest.mark.parametrize("kind", ["start", "prefill", "decode"])
def test_a_call_that_raises_fails_its_requests_and_the_others_go_on(kind: str) -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    other = engine.ask("other", range(5), 8)
    engine.turn(3)
    victim = engine.ask("victim", range(10, 15), 8)

    def break_once(called: str, slots: list[int]) -> None:
        if called == kind and 1 in slots:
            runner.before_call = lambda _kind, _slots: None
            raise RuntimeError("the device said no")

    runner.before_call = break_once
    engine.settle()
    assert victim.error == "INTERNAL: the step failed: the device said no"
    concerned = kind == "decode"
    assert other.ended
    assert (other.reason is FinishReason.ERROR) == concerned
    if not concerned:
        assert other.tokens == output(range(5), 8)
    assert runner.recoveries == 1
    assert engine.healthy
    engine.assert_nothing_left()


def test_results_of_an_older_step_survive_no_failure() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    answers = [engine.ask(name, [ord(name) % 50], 8) for name in "abc"]
    engine.turn(3)

    def break_once(kind: str, _slots: list[int]) -> Exception:
        runner.result_error = lambda _kind, _slots: None
        return RuntimeError(f"{kind} went wrong")

    runner.result_error = break_once
    late = engine.ask("late", range(7), 4)
    engine.settle()
    assert late.tokens == output(range(7), 4) or late.reason is FinishReason.ERROR
    assert all(answer.ended for answer in [*answers, late])
    engine.assert_nothing_left()


def test_a_runner_that_always_fails_ends_the_engine() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    answers = [engine.ask(str(i), [i], 3) for i in range(6)]
    runner.before_call = lambda kind, _slots: fail_at(kind) if kind == "start" else None
    with pytest.raises(RuntimeError, match="no start"):
        engine.settle()
    assert [answer.ended for answer in answers] == [True] * 3 + [False] * 3


def test_requests_beyond_the_model_are_refused() -> None:
    engine = SteppedEngine(FakeRunner(context_length=20, num_pages=50))

    def refusal(prompt: list[int], max_tokens: int = 1, **other: object) -> str:
        with pytest.raises(EngineError) as raised:
            engine.ask("bad", prompt, max_tokens, **other)  # type: ignore[arg-type]
        assert raised.value.code is ErrorCode.INVALID_ARG
        return raised.value.message

    assert refusal([1, 50]) == "a token of prompt is 50: 0 to 49"
    assert refusal([-1]) == "a token of prompt is -1: 0 to 49"
    assert refusal([1], end_ids=(77,)) == "a token of end_ids is 77: 0 to 49"
    assert refusal([1] * 15, 6) == (
        "prompt and max_tokens do not fit the context: 15 + 6 (prompt + max_tokens) asked, "
        "20 is the limit"
    )
    assert "stop_words" in refusal([1], stop_words=(b"x",))
    exact = engine.ask("exact", [1] * 15, 5)
    engine.settle()
    assert exact.tokens == output([1] * 15, 5)


def test_a_pool_smaller_than_the_context_is_the_limit() -> None:
    engine = SteppedEngine(FakeRunner(num_pages=4, page_size=4))
    with pytest.raises(EngineError, match="16 is the limit"):
        engine.ask("a", range(10), 7)
    answer = engine.ask("a", range(10), 6)
    engine.settle()
    assert answer.tokens == output(range(10), 6)


def test_max_tokens_has_a_limit_of_its_own() -> None:
    engine = SteppedEngine(FakeRunner(), EngineSettings(max_tokens_limit=10, default_max_tokens=10))
    with pytest.raises(EngineError, match="max_tokens is 11: at most 10"):
        engine.ask("a", [1], 11)


def test_a_full_queue_refuses_at_once() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=1), EngineSettings(max_queue=2))
    engine.ask("running", [1], 20)
    engine.turn()
    engine.ask("a", [1])
    engine.ask("b", [1])
    with pytest.raises(EngineError, match="the queue is full: 2 requests wait") as raised:
        engine.ask("c", [1])
    assert raised.value.code is ErrorCode.UNAVAILABLE
    engine.settle()
    engine.ask("c", [1])


def test_a_living_request_id_is_not_used_again() -> None:
    engine = SteppedEngine(FakeRunner())
    engine.ask("a", [1])
    with pytest.raises(EngineError, match="request_id is 'a': not that of a living request"):
        engine.ask("a", [1])
    engine.settle()
    engine.ask("a", [1])


def test_a_sink_that_raises_harms_nobody() -> None:
    engine = SteppedEngine(FakeRunner())
    good = engine.ask("good", range(5), 8)
    bad = engine.ask("bad", range(6), 8)
    bad.append(bad_event := None)  # type: ignore[arg-type]  # its `ended` raises from now on
    engine.settle()
    assert bad == [bad_event]
    assert good.tokens == output(range(5), 8)
    engine.assert_nothing_left()
