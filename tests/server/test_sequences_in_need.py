"""Where all is scarce: a core, two slots, few pages, KV that is soon given up, short lives."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from generation import Response, Stream, eventually, metric, one_shot, text_of, tokens_of
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from grok1_backend.server import TritonServer
from grok1_backend.text.tokenizer import TOKENIZER_FILE
from servers import EMBEDDED_MODEL, local_options, process_of

CPU = max(os.sched_getaffinity(0))
SLOTS = 2
POSITIONS = 512
PAGE_IDLE_SECONDS = 0.05
LIFETIME = 8
CONFIG = f"""
[runner]
num_slots = {SLOTS}
page_size = 8
num_pages = {POSITIONS // 8}
prefill_tokens = [64]
prefill_rows = [1]
decode_rows = [1, {SLOTS}]

[engine]
page_idle_time = {PAGE_IDLE_SECONDS}
session_lifetime = {LIFETIME}
max_generation_time = {LIFETIME}
"""
TURNS = ("In the beginning God created", "\nAnd the king said unto", "\nBlessed are they")
SETTINGS = {"seed": 7, "max_tokens": 16, "ignore_eos": True, "return_log_probs": True}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The embedded model with the settings above."""
    folder = tmp_path_factory.mktemp("scarce")
    for name in ("ckpt-0", TOKENIZER_FILE):
        (folder / name).symlink_to(EMBEDDED_MODEL / name)
    (folder / "config.toml").write_text((EMBEDDED_MODEL / "config.toml").read_text() + CONFIG)
    options = local_options(folder, model=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROK1_CPUS", str(CPU))
        with TritonServer(options, start_timeout=900) as running:
            yield running


@pytest.fixture
def stream(own_server: TritonServer) -> Iterator[Stream]:
    with Stream(own_server.options.grpc_url) as made:
        yield made


@pytest.fixture
def number(own_server: TritonServer) -> Callable[[str], float]:
    """A metric of this server."""
    return lambda name: metric(own_server.options.metrics_url, f"grok1_{name}")


@pytest.fixture
def nothing_is_left(number: Callable[[str], float]) -> Callable[[], bool]:
    """Whether no request, session or page is held, asked with the time that idle KV has."""
    gauges = ("requests_running", "requests_waiting", "sessions", "kv_pages_used")
    names = (*gauges, "kv_pages_cached")
    return lambda: eventually(lambda: all(number(name) == 0 for name in names), 5)


def options(key: int | str, place: int, of: int) -> dict[str, Any]:
    """Those of turn `place` of a sequence of `of`."""
    flags = {"sequence_start": place == 0, "sequence_end": place == of - 1}
    return {"sequence_id": key, "request_id": f"{key} {place}", **flags}


def turn(stream: Stream, key: int | str, place: int, of: int = 3, **changes: Any) -> list[Response]:
    inputs = {"text_input": TURNS[place], **SETTINGS, **changes}
    return stream.ask("grok1_ensemble", options=options(key, place, of), **inputs)


def at_once(stream: Stream, keys: list[int | str]) -> dict[str, list[Response]]:
    """All turns of all sequences sent before any is answered; the responses by request id."""
    for place, text in enumerate(TURNS):
        for key in keys:
            name = options(key, place, len(TURNS))
            stream.send("grok1_ensemble", options=name, text_input=f"{key}{text}", **SETTINGS)
    return stream.collect(len(keys) * len(TURNS))


def log_probs(responses: list[Response]) -> NDArray[np.float32]:
    return np.concatenate([r.outputs["output_log_probs"].reshape(-1) for r in responses])


def assert_same(some: list[Response], other: list[Response]) -> None:
    assert tokens_of(some) == tokens_of(other)
    assert text_of(some) == text_of(other)
    np.testing.assert_allclose(log_probs(some), log_probs(other), atol=1e-3)


def test_the_engine_alone_keeps_to_its_core(own_server: TritonServer) -> None:
    assert os.sched_getaffinity(process_of(own_server, "grok1")) == {CPU}
    assert os.sched_getaffinity(process_of(own_server, "grok1_generate")) > {CPU}
    assert os.sched_getaffinity(own_server.pid) > {CPU}


def test_kv_that_was_given_up_is_computed_again_unseen(
    stream: Stream, number: Callable[[str], float], nothing_is_left: Callable[[], bool]
) -> None:
    def hits(after: float) -> float:
        """Tokens whose KV was found by so many requests."""
        assert eventually(lambda: number("requests_total") == after, 5)
        time.sleep(0.3)  # gauges are renewed after totals
        return number("prefix_hit_tokens_total")

    assert nothing_is_left()
    ended, before = number("requests_total"), number("prefix_hit_tokens_total")
    kept = at_once(stream, ["a"])  # each turn finds the KV of the one before
    found = hits(ended + 3)
    assert found > before
    for place, text in enumerate(TURNS):
        again = turn(stream, "b", place, text_input=f"a{text}")
        assert_same(again, kept[f"a {place}"])
        assert hits(ended + 4 + place) == found
        assert eventually(lambda: number("kv_pages_cached") == 0, 5)


def test_a_stream_longer_than_the_idle_time_of_pages_is_unharmed(stream: Stream) -> None:
    began = time.monotonic()
    inputs = {"text_input": TURNS[0], **SETTINGS, "max_tokens": POSITIONS - 32}
    long = stream.ask("grok1_ensemble", options=one_shot("long"), **inputs)
    assert time.monotonic() - began > 2 * PAGE_IDLE_SECONDS
    (whole,) = stream.ask(
        "grok1_generate", text_input=TURNS[0] + text_of(long), max_tokens=0,
        return_prompt_log_probs=True, stream=False,
    )  # fmt: skip
    # As if all of it had been a prompt.
    of_prompt = whole.outputs["prompt_log_probs"].reshape(-1)[-len(tokens_of(long)) :]
    np.testing.assert_allclose(log_probs(long), of_prompt, atol=1e-3)


def test_streams_that_do_not_fit_together_are_what_they_are_alone(
    stream: Stream, number: Callable[[str], float]
) -> None:
    lengths = {"max_tokens": POSITIONS - 150}
    preempted = number("preemptions_total")
    alone = [turn(stream, "alone", 0, 1, text_input=text, **lengths) for text in TURNS[:2]]
    assert number("preemptions_total") == preempted
    for place, text in enumerate(TURNS[:2]):
        inputs = {"text_input": text, **SETTINGS, **lengths}
        stream.send("grok1_ensemble", options=options(f"two {place}", 0, 1), **inputs)
    together = stream.collect(2)
    for place in range(2):
        assert_same(together[f"two {place} 0"], alone[place])
    assert eventually(lambda: number("preemptions_total") > preempted, 2)


def test_four_times_as_many_conversations_as_slots_go_on_together(
    stream: Stream, nothing_is_left: Callable[[], bool]
) -> None:
    keys: list[int | str] = [*range(1, 2 * SLOTS + 1), *(f"id-{n}" for n in range(2 * SLOTS))]
    together = at_once(stream, keys)
    for key in keys:
        for place, text in enumerate(TURNS):
            alone = turn(stream, f"{key} alone", place, text_input=f"{key}{text}")
            assert_same(together[f"{key} {place}"], alone)
    assert nothing_is_left()


def test_a_session_that_outlives_its_lifetime_is_closed_and_says_so(
    stream: Stream, number: Callable[[str], float], nothing_is_left: Callable[[], bool]
) -> None:
    first = turn(stream, "forgotten", 0)
    assert eventually(lambda: number("sessions") == 1, 2)
    assert eventually(lambda: number("sessions") == 0, LIFETIME + 5)
    with pytest.raises(InferenceServerException) as refused:
        turn(stream, "forgotten", 1)
    assert f"without a turn for {LIFETIME} s" in refused.value.message()
    assert "needs START" in refused.value.message()
    assert nothing_is_left()
    assert_same(turn(stream, "forgotten", 0, 1), first)


def test_start_on_an_id_whose_turn_is_running(
    stream: Stream, nothing_is_left: Callable[[], bool]
) -> None:
    alone = turn(stream, "other", 0, 1)
    long = {"text_input": TURNS[1], **SETTINGS, "max_tokens": 300}
    stream.send("grok1_ensemble", options=options("live", 0, 3), **long)
    stream.receive()
    begun = options("live", 0, 2) | {"request_id": "anew"}
    stream.send("grok1_ensemble", options=begun, text_input=TURNS[0], **SETTINGS)
    answers = stream.collect(2)
    assert_same(answers["anew"], alone)
    assert answers["live 0"][-1].value("num_output_tokens") == 300
    # What goes on is the new one.
    later = turn(stream, "live", 1, 2)
    assert later[-1].value("num_input_tokens") < 100
    assert nothing_is_left()


def test_a_number_and_its_digits_are_two_ids(
    stream: Stream, nothing_is_left: Callable[[], bool]
) -> None:
    ids: tuple[int | str, int | str] = (31, "31")
    counts = []
    for place in range(2):
        for number, key in enumerate(ids):
            text = TURNS[place] * (number + 1)
            (*_, last) = turn(stream, key, place, 2, text_input=text)
            counts.append(last.value("num_input_tokens"))
    assert len(set(counts)) == 4
    assert nothing_is_left()


def test_thousands_of_short_sequences_leave_nothing_behind(
    stream: Stream, nothing_is_left: Callable[[], bool]
) -> None:
    for _ in range(4):
        names = [uuid.uuid4() for _ in range(500)]
        keys = [name.hex if name.int % 2 else name.int % 2**63 for name in names]
        for place in range(2):
            for prompt, key in enumerate(keys):
                stream.send(
                    "grok1", options=options(key, place, 2), input_ids=[5 + prompt], max_tokens=1
                )
            assert len(stream.collect(len(keys))) == len(keys)
    assert nothing_is_left()
