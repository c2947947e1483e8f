"""An engine without a thread: a test takes its turns, and has its clock."""

from __future__ import annotations

from collections.abc import Sequence

from fake_runner import FakeRunner
from page_accounts import assert_accounts

from grok1_backend.engine.engine import Engine
from grok1_backend.engine.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SessionTurn,
    TokenEvent,
)
from grok1_backend.engine.settings import EngineSettings
from grok1_backend.engine.stats import Observer


class Answer(list[TokenEvent]):
    """The events of one request."""

    def __call__(self, event: TokenEvent) -> None:
        assert not self.ended, "an event after the last one"
        self.append(event)

    @property
    def ended(self) -> bool:
        return bool(self) and self[-1].finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return [token for event in self for token in event.token_ids]

    @property
    def reason(self) -> FinishReason | None:
        return self[-1].finish_reason if self else None

    @property
    def error(self) -> str:
        """Code and message of the error it ended with."""
        error = self[-1].error
        assert error is not None
        return f"{error.code.value}: {error.message}"


class SteppedEngine(Engine):
    """Everything of the engine but its thread."""

    def __init__(
        self,
        runner: FakeRunner,
        settings: EngineSettings | None = None,
        *,
        end_ids: Sequence[int] = (),
        observer: Observer | None = None,
        words: bool = False,
    ) -> None:
        self.now = 0.0
        self.fake = runner
        super().__init__(
            runner,
            end_ids=end_ids,
            settings=settings,
            observer=observer,
            token_bytes=(lambda token: bytes([97 + token % 26])) if words else None,
            clock=lambda: self.now,
        )
        runner.may_write = self._may_write

    def _start(self) -> None:
        pass

    def _may_write(self, page: int) -> bool:
        return self._pages._holders[page] == 1 and self._pages._keys[page] is None

    def ask(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 5,
        *,
        seed: int = 0,
        session: SessionTurn | None = None,
        priority: int = 0,
        deadline: float | None = None,
        stream: bool = True,
        scores: bool = False,
        stop_words: tuple[bytes, ...] = (),
        min_tokens: int = 0,
        end_ids: tuple[int, ...] | None = None,
    ) -> Answer:
        """Submits a request; its events come into the list that is returned."""
        answer = Answer()
        sampling = SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_words=stop_words,
            end_ids=end_ids,
        )
        request = GenerationRequest(
            request_id=request_id,
            prompt=tuple(prompt),
            sampling=sampling,
            session=session,
            priority=priority,
            deadline=deadline,
            stream=stream,
            return_prompt_log_probs=scores,
        )
        self.submit(request, answer)
        return answer

    def turn(self, count: int = 1) -> bool:
        """Takes turns; returns whether there was something to do in the last one."""
        busy = False
        for _ in range(count):
            busy = self._turn()
            self.check()
        return busy

    def settle(self, most: int = 2000) -> None:
        """Takes turns until nothing is left to do."""
        for _ in range(most):
            if not self.turn() and not self._arrivals:
                return
        raise AssertionError(f"not finished after {most} turns")

    def check(self) -> None:
        """What must be so between any two turns."""
        scheduler = self._scheduler
        running = [*scheduler._prefilling, *scheduler._decoding]
        slots = [generation.slot for generation in running] + scheduler._free_slots
        assert sorted(slots) == list(range(self.fake.num_slots)), "a slot is lost or used twice"
        assert_accounts(self._pages, [generation.table for generation in running])
        assert all(g.request.request_id in self._live for g in running)

    def assert_nothing_left(self) -> None:
        stats = self.stats()
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert not self._live
        assert not self._deadlines
        assert not self._unfinished
        assert not self._scheduler._unread
