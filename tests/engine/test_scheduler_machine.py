"""Random schedules: whatever happens to the others, each request gets what it would get alone."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field

import pytest
from fake_runner import FakeRunner, expected_output, log_prob
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stepped import Answer, SteppedEngine

from grok1_backend.engine.errors import EngineError, ErrorCode
from grok1_backend.engine.requests import FinishReason, SessionTurn
from grok1_backend.engine.settings import EngineSettings

CONTEXT = 40
VOCABULARY = 24
END_ID = 3
QUEUE = 6
PROMPTS = st.builds(
    lambda token, count, last: [token] * count + [last],
    *[st.integers(0, 2), st.integers(0, 20), st.integers(0, 2)],
)
logging.getLogger("grok1_backend.engine").setLevel(logging.CRITICAL)  # failures are made here


@dataclass(eq=False)
class Asked:
    """A request of the test, and what is expected of it."""

    answer: Answer
    prompt: list[int]
    max_tokens: int
    seed: int
    deadline: float | None
    session: Conversation | None = None
    scores: bool = False
    aborted: bool = False
    broken: bool = False
    """The runner failed or its logits were not finite at some time of its life."""
    settled: bool = False


@dataclass(eq=False)
class Conversation:
    """The oracle's view of a session."""

    key: int
    history: list[int] = field(default_factory=list)
    turns: list[Asked] = field(default_factory=list)
    used_at: float = 0.0


class Schedules(RuleBasedStateMachine):
    """Submits, cancels, waits, and breaks things, in a pool that is nearly always too small."""

    @initialize(
        num_slots=st.integers(1, 6),
        pool=st.integers(24, 72),
        page_size=st.sampled_from([2, 4, 8]),
        chunk=st.integers(1, 16),
        rows=st.integers(1, 4),
        budget=st.integers(1, 24),
        lifetime=st.sampled_from([20.0, 1e6]),
        idle=st.sampled_from([0.5, 5.0, 1e6]),
    )
    def start(
        self,
        num_slots: int,
        pool: int,
        page_size: int,
        chunk: int,
        rows: int,
        budget: int,
        lifetime: float,
        idle: float,
    ) -> None:
        num_pages = pool // page_size
        self.runner = FakeRunner(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            context_length=CONTEXT,
            vocab_size=VOCABULARY,
            max_prefill_tokens=chunk,
            max_prefill_rows=min(rows, num_slots),
            before_call=self.before_call,
            result_error=self.result_error,
            not_finite=self.not_finite,
        )
        self.limit = min(CONTEXT, num_pages * page_size)
        limits = EngineSettings(
            max_queue=QUEUE,
            prefill_token_budget=budget,
            session_lifetime=lifetime,
            page_idle_time=idle,
            max_generation_time=min(lifetime, 1000.0),
            max_sessions=3,
        )
        self.engine = SteppedEngine(self.runner, limits, end_ids=(END_ID,), words=True)
        self.ids = itertools.count()
        self.asked: list[Asked] = []
        self.conversations: dict[int, Conversation] = {}
        self.fail_next = ""

    # What the runner does when it is to be broken.

    def before_call(self, kind: str, slots: list[int]) -> None:
        if self.fail_next == f"dispatch of {kind}":
            self.fail_next = ""
            self.mark(slots)
            raise RuntimeError("broken by the test")

    def result_error(self, kind: str, slots: list[int]) -> Exception | None:
        if self.fail_next != f"result of {kind}":
            return None
        self.fail_next = ""
        self.mark(slots)
        return RuntimeError("broken by the test")

    def not_finite(self, slot: int) -> bool:
        if not self.fail_next.endswith("logits"):
            return False
        self.fail_next = ""
        self.mark([slot])
        return True

    def mark(self, slots: list[int]) -> None:
        scheduler = self.engine._scheduler
        for generation in [*scheduler._prefilling, *scheduler._decoding]:
            if generation.slot in slots:
                self.asked[int(generation.request.request_id)].broken = True

    # What clients do.

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        priority: int,
        patience: float | None,
        conversation: Conversation | None = None,
        turn: SessionTurn | None = None,
        scores: bool = False,
    ) -> bool:
        deadline = None if patience is None else self.engine.now + patience
        number = len(self.asked)
        try:
            answer = self.engine.ask(
                str(number),
                prompt,
                max_tokens,
                seed=seed,
                priority=priority,
                deadline=deadline,
                session=turn,
                scores=scores,
            )
        except EngineError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None and refusal.code is ErrorCode.UNAVAILABLE:
            assert self.engine.stats().waiting >= QUEUE or len(self.conversations) >= 3
            return False
        if refusal is not None:
            assert refusal.code is ErrorCode.INVALID_ARG
            used = len(conversation.history) if conversation else 0
            assert used + len(prompt) + max_tokens > self.limit
            return False
        asked = Asked(answer, prompt, max_tokens, seed, deadline, conversation, scores)
        self.asked.append(asked)
        if conversation is not None:
            conversation.turns.append(asked)
            conversation.used_at = self.engine.now
        return True

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 38),
        seed=st.integers(0, 2),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(0, 30).map(float),
        scores=st.integers(0, 3).map(lambda n: n == 0),
    )
    def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        priority: int,
        patience: float | None,
        scores: bool,
    ) -> None:
        self.submit(prompt, max_tokens, seed, priority, patience, scores=scores)

    @rule(
        key=st.integers(0, 4),
        start=st.booleans(),
        end=st.integers(0, 4).map(lambda n: n == 0),
        prompt=PROMPTS,
        max_tokens=st.integers(1, 8),
        seed=st.integers(0, 2),
        patience=st.none() | st.integers(0, 30).map(float),
    )
    def take_turn(
        self,
        key: int,
        start: bool,
        end: bool,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        patience: float | None,
    ) -> None:
        self.expire_conversations()
        turn = SessionTurn(correlation_id=key, start=start, end=end)
        known = self.conversations.get(key)
        if start or end:
            self.conversations.pop(key, None)
        if not start and known is None:
            with pytest.raises(EngineError, match=f"session {key} is unknown") as refusal:
                self.engine.ask("unknown", prompt, session=turn)
            assert refusal.value.code is ErrorCode.NOT_FOUND
            return
        conversation = Conversation(key) if start or known is None else known
        if self.submit(prompt, max_tokens, seed, 0, patience, conversation, turn) and not end:
            self.conversations[key] = conversation

    def expire_conversations(self) -> None:
        self.engine.turn()
        self.settle_finished()
        lifetime = self.engine.settings.session_lifetime
        for key, conversation in list(self.conversations.items()):
            if not conversation.turns and conversation.used_at + lifetime <= self.engine.now:
                del self.conversations[key]

    @precondition(lambda self: sum(not asked.answer.ended for asked in self.asked) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        living = [i for i, asked in enumerate(self.asked) if not asked.answer.ended]
        number = data.draw(st.sampled_from(living))
        self.asked[number].aborted = True
        assert self.engine.abort(str(number))
        self.turn(1)
        assert self.asked[number].answer.ended, "not cancelled within a step"

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()
            self.settle_finished()

    @rule(seconds=st.sampled_from([0.25, 1.0, 7.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds
        self.turn(1)

    @precondition(lambda self: len(self.asked) > 4)
    @rule(
        call=st.sampled_from(["start", "prefill", "score", "decode", "logits"]),
        moment=st.sampled_from(["dispatch", "result"]),
    )
    def break_something(self, call: str, moment: str) -> None:
        self.engine._scheduler._failures = 0
        self.fail_next = f"{moment} of {call}"
        self.turn(2)
        self.fail_next = ""

    # What must be so.

    def settle_finished(self) -> None:
        """Judges the requests that have ended since, in the order of their sessions' turns."""
        for asked in self.asked:
            first = asked.session is None or asked.session.turns[:1] == [asked]
            if not asked.settled and asked.answer.ended:
                self.judge(asked)
                asked.settled = True
                if asked.session is not None:
                    if first and (asked.answer.tokens or asked.answer[-1].error is None):
                        asked.session.history += asked.prompt + asked.answer.tokens
                    asked.session.turns.remove(asked)
                    asked.session.used_at = self.engine.now

    def judge(self, asked: Asked) -> None:
        answer, last = asked.answer, asked.answer[-1]
        history = (asked.session.history if asked.session else []) + asked.prompt
        used = len(history) - len(asked.prompt)
        if last.error is not None and last.error.code is ErrorCode.INVALID_ARG:
            assert asked.session is not None
            assert not answer.tokens
            assert len(history) + asked.max_tokens > self.limit
            assert f"{used} tokens used" in last.error.message
            return
        expected = expected_output(history, asked.seed, asked.max_tokens, VOCABULARY, [END_ID])
        assert last.num_output_tokens == len(answer.tokens)
        log_probs = [x for event in answer for x in event.log_probs.tolist()]
        assert log_probs == [log_prob(token) for token in answer.tokens]
        assert last.cum_log_prob == sum(log_probs)
        scored = [event.prompt_log_probs for event in answer if event.prompt_log_probs is not None]
        if last.error is None:
            assert answer.tokens == expected
            assert len(scored) == asked.scores
            for scores in scored:
                assert scores.tolist() == [0.0, *map(log_prob, history[1:])]
            assert last.num_input_tokens == len(history)
            stopped = expected[-1] == END_ID
            assert last.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert last.text_trim == (1 if stopped else 0)
            return
        assert answer.tokens == expected[: len(answer.tokens)]
        assert len(answer.tokens) < len(expected)
        if last.error.code is ErrorCode.CANCELLED:
            assert asked.aborted
            assert last.finish_reason is FinishReason.CANCELLED
        elif last.error.code is ErrorCode.DEADLINE_EXCEEDED:
            assert asked.deadline is not None or self.engine.now >= 20
        else:
            assert last.error.code is ErrorCode.INTERNAL
            assert asked.broken

    @invariant()
    def sessions_are_known(self) -> None:
        if hasattr(self, "engine"):
            assert len(self.engine._sessions) <= 3

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.settle()
        self.settle_finished()
        assert all(asked.settled for asked in self.asked)
        self.engine.assert_nothing_left()
        assert self.engine.healthy


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True
)
