"""Sessions: a conversation by turns is what it would be in one piece."""

from __future__ import annotations

import pytest
from fake_runner import FakeRunner, expected_output, log_prob
from stepped import Answer, SteppedEngine

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import FinishReason, SessionTurn
from grok1_backend.engine.settings import EngineSettings

UUID = "7a0e9c6e-3a56-4c1c-9d3c-0d5d8f2f6a11"
START = SessionTurn(correlation_id=UUID, start=True)
GO_ON = SessionTurn(correlation_id=UUID)
END = SessionTurn(correlation_id=UUID, end=True)
ONE_SHOT = SessionTurn(correlation_id=UUID, start=True, end=True)


def output(history: list[int], max_tokens: int) -> list[int]:
    return expected_output(history, 0, max_tokens, 50)


def turn(engine: SteppedEngine, name: str, prompt: list[int], session: SessionTurn) -> Answer:
    answer = engine.ask(name, prompt, 4, session=session)
    engine.settle()
    return answer


def assert_unknown(engine: SteppedEngine) -> None:
    with pytest.raises(EngineError, match=f"session '{UUID}' is unknown") as raised:
        engine.ask("unknown", [1], session=GO_ON)
    assert raised.value.code is ErrorCode.NOT_FOUND


def test_a_later_turn_prefills_only_its_new_tokens() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    history = [1, 2, 3, 4, 5]
    history += turn(engine, "1", history, START).tokens
    for name, new in (("2", [6, 7]), ("3", [8])):
        runner.calls.clear()
        answer = turn(engine, name, new, GO_ON)
        # The last token of the turn before was drawn, but its KV was never needed.
        assert runner.calls[0] == ("prefill", ((0, 1 + len(new)),))
        history += new
        assert answer.tokens == output(history, 4)
        assert answer[-1].num_input_tokens == len(history)
        history += answer.tokens
    assert engine.stats().sessions == 1
    turn(engine, "4", [9], END)
    assert engine.stats().sessions == 0
    assert_unknown(engine)
    engine.assert_nothing_left()


def test_the_overrun_step_has_written_the_end_token() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    end = output([1, 2, 3], 3)[-1]
    first = engine.ask("1", [1, 2, 3], 20, session=START, end_ids=(end,))
    engine.settle()
    assert first.reason is FinishReason.STOP
    runner.calls.clear()
    answer = turn(engine, "2", [4, 5], GO_ON)
    assert runner.calls[0] == ("prefill", ((0, 2),))
    assert answer.tokens == output([1, 2, 3, *first.tokens, 4, 5], 4)


def test_scoring_covers_the_whole_session() -> None:
    engine = SteppedEngine(FakeRunner(page_size=16))
    first = turn(engine, "1", [1, 2, 3], START)
    answer = engine.ask("2", [4], 0, session=GO_ON, scores=True)
    engine.settle()
    scores = answer[0].prompt_log_probs
    assert scores is not None
    assert scores.tolist() == [0.0, *map(log_prob, [2, 3, *first.tokens, 4])]


def test_evicted_pages_are_computed_again_unseen() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner, EngineSettings(page_idle_time=5.0))
    first = turn(engine, "1", [1, 2, 3, 4, 5], START)
    assert engine.stats().pages_cached > 0
    engine.now += 6
    engine.turn()
    assert engine.stats().pages_cached == 0
    runner.calls.clear()
    answer = turn(engine, "2", [6], GO_ON)
    assert sum(n for kind, rows in runner.calls if kind == "prefill" for _, n in rows) == 10
    assert answer.tokens == output([1, 2, 3, 4, 5, *first.tokens, 6], 4)


def test_a_long_stream_is_unharmed_by_page_eviction() -> None:
    engine = SteppedEngine(FakeRunner(), EngineSettings(page_idle_time=0.5))
    answer = engine.ask("1", [1, 2, 3], 30, session=START)
    while not answer.ended:
        engine.now += 1
        engine.turn()
    assert answer.tokens == output([1, 2, 3], 30)


def test_turns_sent_without_waiting_are_served_in_order() -> None:
    engine = SteppedEngine(FakeRunner())
    answers = [
        engine.ask("1", [1, 2], 4, session=START),
        engine.ask("2", [3], 4, session=GO_ON),
        engine.ask("3", [4], 4, session=END),
    ]
    assert engine.stats().waiting == 3
    engine.settle()
    history: list[int] = []
    for prompt, answer in zip(([1, 2], [3], [4]), answers, strict=True):
        history += prompt
        assert answer.tokens == output(history, 4)
        history += answer.tokens
    engine.assert_nothing_left()


def test_start_on_a_live_session_restarts_it_and_its_turns_go_on() -> None:
    engine = SteppedEngine(FakeRunner())
    old = engine.ask("1", [1, 2], 8, session=START)
    old_second = engine.ask("2", [3], 4, session=GO_ON)
    engine.turn(2)
    new = engine.ask("3", [7], 4, session=START)
    new_second = engine.ask("4", [8], 4, session=GO_ON)
    engine.settle()
    assert old.tokens == output([1, 2], 8)
    assert old_second.tokens == output([1, 2, *old.tokens, 3], 4)
    assert new.tokens == output([7], 4)
    assert new_second.tokens == output([7, *new.tokens, 8], 4)
    assert engine.stats().sessions == 1


def test_a_one_shot_leaves_no_session() -> None:
    engine = SteppedEngine(FakeRunner())
    for number in range(50):
        turn(engine, str(number), [1, 2], ONE_SHOT)
    assert engine.stats().sessions == 0
    engine.assert_nothing_left()


def test_a_turn_that_does_not_fit_is_refused_and_the_session_survives() -> None:
    engine = SteppedEngine(FakeRunner(context_length=20))
    first = turn(engine, "1", [1, 2, 3, 4], START)
    with pytest.raises(EngineError) as raised:
        engine.ask("2", [5] * 9, 4, session=GO_ON)
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert raised.value.message == (
        "prompt and max_tokens do not fit the context: 8 tokens used by the session's earlier "
        "turns, 9 + 4 (prompt + max_tokens) asked, 20 is the limit"
    )
    answer = turn(engine, "2", [5] * 8, GO_ON)
    assert answer.tokens == output([1, 2, 3, 4, *first.tokens, *[5] * 8], 4)


def test_a_turn_behind_another_is_refused_by_an_event() -> None:
    engine = SteppedEngine(FakeRunner(context_length=20))
    engine.ask("1", [1, 2, 3, 4], 4, session=START)
    large = engine.ask("2", [5] * 9, 4, session=GO_ON)
    after = engine.ask("3", [6], 4, session=GO_ON)
    engine.settle()
    assert large.error.startswith("INVALID_ARG: prompt and max_tokens do not fit the context: 8 ")
    assert after.reason is FinishReason.LENGTH


def test_a_cancelled_turn_leaves_what_was_streamed() -> None:
    engine = SteppedEngine(FakeRunner())
    first = engine.ask("1", [1, 2, 3], 20, session=START)
    while len(first.tokens) < 4:
        engine.turn()
    engine.abort("1")
    engine.settle()
    assert first.reason is FinishReason.CANCELLED
    second = turn(engine, "2", [4], GO_ON)
    assert second.tokens == output([1, 2, 3, *first.tokens, 4], 4)


def test_a_turn_cancelled_before_its_first_token_was_never_sent() -> None:
    engine = SteppedEngine(FakeRunner(max_prefill_tokens=4), EngineSettings(prefill_token_budget=4))
    first = turn(engine, "1", [1, 2, 3], START)
    second = engine.ask("2", [5] * 20, 4, session=GO_ON)
    engine.turn(2)  # in the middle of its prefill
    waiting = engine.ask("3", [6], 4, session=GO_ON)
    third = engine.ask("4", [7], 4, session=GO_ON)
    engine.abort("3")
    engine.abort("2")
    engine.settle()
    assert (second.tokens, waiting.tokens) == ([], [])
    assert third.tokens == output([1, 2, 3, *first.tokens, 7], 4)
    engine.assert_nothing_left()


def test_turns_that_end_together_before_they_start_do_not_come_back() -> None:
    engine = SteppedEngine(FakeRunner())
    answers = [
        engine.ask("1", [1], 4, session=START, deadline=5.0),
        engine.ask("2", [2], 4, session=GO_ON, deadline=5.0),
    ]
    engine.now = 5.0
    engine.settle()
    assert [answer.tokens for answer in answers] == [[], []]
    engine.assert_nothing_left()


def test_a_turn_whose_logits_are_not_finite_leaves_no_kv_behind() -> None:
    runner = FakeRunner()
    engine = SteppedEngine(runner)
    engine.ask("other", [1, 2, 3, 4, 9], 9)  # its first page is the one that is found
    bad = engine.ask("1", [1, 2, 3, 4, 5], 9, session=START)
    while not bad.tokens:
        engine.turn()
    runner.not_finite = lambda slot: slot == 1
    engine.settle()
    assert bad.error == "INTERNAL: the model's logits are not finite"
    runner.not_finite = lambda _slot: False
    runner.calls.clear()
    history = [1, 2, 3, 4, 5, *bad.tokens, 6]
    assert turn(engine, "2", [6], GO_ON).tokens == output(history, 4)
    assert runner.calls[0] == ("prefill", ((0, len(history) - 4),))


def test_a_session_outlives_its_lifetime_not() -> None:
    engine = SteppedEngine(
        FakeRunner(), EngineSettings(session_lifetime=50.0, max_generation_time=40.0)
    )
    turn(engine, "1", [1], START)
    engine.now = 49.0
    turn(engine, "2", [2], GO_ON)
    engine.now = 98.0
    engine.turn()
    assert engine.stats().sessions == 1
    engine.now = 99.0
    engine.turn()
    assert engine.stats().sessions == 0
    assert_unknown(engine)


def test_a_session_at_work_does_not_expire() -> None:
    engine = SteppedEngine(
        FakeRunner(num_slots=1), EngineSettings(session_lifetime=50.0, max_generation_time=50.0)
    )
    engine.ask("other", [1], 30)
    engine.ask("1", [1], 4, session=START)
    engine.turn()
    engine.now = 49.0
    engine.settle()
    engine.now = 98.0
    engine.turn()
    assert engine.stats().sessions == 1


def test_closing_a_session() -> None:
    engine = SteppedEngine(FakeRunner())
    answer = engine.ask("1", [1], 4, session=START)
    assert engine.close_session(UUID)
    assert not engine.close_session(UUID)
    engine.settle()
    assert answer.tokens == output([1], 4)
    assert_unknown(engine)


def test_sessions_are_limited() -> None:
    engine = SteppedEngine(FakeRunner(), EngineSettings(max_sessions=2))
    for key in (1, 2):
        engine.ask(str(key), [1], session=SessionTurn(correlation_id=key, start=True))
    with pytest.raises(EngineError, match="session 3 is not opened: 2 are open") as raised:
        engine.ask("3", [1], session=SessionTurn(correlation_id=3, start=True))
    assert raised.value.code is ErrorCode.UNAVAILABLE
    engine.ask("4", [1], session=SessionTurn(correlation_id=2, start=True))
    engine.ask("5", [1], session=SessionTurn(correlation_id=3, start=True, end=True))


@pytest.mark.parametrize("flags", [START, END])
def test_a_refused_turn_with_start_or_end_closes_the_session(flags: SessionTurn) -> None:
    engine = SteppedEngine(FakeRunner())
    turn(engine, "1", [1], START)
    with pytest.raises(EngineError, match="do not fit"):
        engine.ask("2", [1] * 48, session=flags)
    assert_unknown(engine)


def test_more_conversations_than_slots_all_make_progress() -> None:
    engine = SteppedEngine(FakeRunner(num_slots=2, num_pages=12))
    histories: list[list[int]] = [[] for _ in range(8)]
    for round_ in range(3):
        answers = []
        for key, history in enumerate(histories):
            history += [key, round_]
            session = SessionTurn(correlation_id=key, start=round_ == 0)
            answers.append(engine.ask(f"{key}.{round_}", [key, round_], 4, session=session))
        engine.settle()
        for history, answer in zip(histories, answers, strict=True):
            assert answer.tokens == output(history, 4)
            history += answer.tokens
    engine.assert_nothing_left()
