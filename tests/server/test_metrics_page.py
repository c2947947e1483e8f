"""The engine's numbers on Triton's metrics page."""

from __future__ import annotations

import re
import time
from urllib.request import urlopen

from generation import eventually, metric, post, tensor
from tritonclient import grpc

from grok1_backend.engine.requests import FinishReason


def test_every_metric_is_there_with_its_labels(metrics_url: str) -> None:
    with urlopen(metrics_url) as answer:
        page = answer.read().decode()
    names = set(re.findall(r"^# TYPE (grok1_\w+) (?:counter|gauge|histogram)$", page, re.MULTILINE))
    assert {
        "grok1_prompt_tokens_total",
        "grok1_generation_tokens_total",
        "grok1_requests_total",
        "grok1_requests_running",
        "grok1_requests_waiting",
        "grok1_time_to_first_token_seconds",
        "grok1_inter_token_seconds",
        "grok1_request_seconds",
        "grok1_queue_seconds",
        "grok1_kv_pages_used",
        "grok1_kv_pages",
        "grok1_prefix_hit_tokens_total",
        "grok1_preemptions_total",
        "grok1_step_rows",
    } <= names
    lines = [line for line in page.splitlines() if line.startswith("grok1_")]
    assert all('model="grok1"' in line and 'version="1"' in line for line in lines)
    for reason in FinishReason:
        assert f'grok1_requests_total{{finish_reason="{reason.value}"' in page


def test_a_request_is_counted_once_everywhere(http_url: str, metrics_url: str) -> None:
    names = {
        "grok1_requests_total": 1,
        "grok1_generation_tokens_total": 7,
        "grok1_time_to_first_token_seconds_count": 1,
        "grok1_inter_token_seconds_count": 6,
        "grok1_request_seconds_count": 1,
        "grok1_queue_seconds_count": 1,
    }
    time.sleep(1)  # the page is renewed four times a second: earlier requests are on it then
    before = {name: metric(metrics_url, name) for name in names}
    body = {"text_input": "And", "max_tokens": 7, "ignore_eos": True}
    assert post(f"{http_url}/v2/models/grok1_complete/generate", body).status == 200
    assert eventually(
        lambda: all(metric(metrics_url, n) == before[n] + more for n, more in names.items()), 2
    )


def test_infers_of_the_model_with_one_response_overlap(grpc_url: str, metrics_url: str) -> None:
    slots = int(metric(metrics_url, "grok1_slots"))
    inputs = [tensor("text_input", "And"), tensor("max_tokens", 8000), tensor("ignore_eos", True)]
    with grpc.InferenceServerClient(grpc_url) as client:
        calls = [
            client.async_infer("grok1_complete", inputs, callback=lambda **_: None)
            for _ in range(16)
        ]
        try:
            assert eventually(
                lambda: (
                    metric(metrics_url, "grok1_requests_running") == min(slots, 16)
                    and metric(metrics_url, "grok1_requests_waiting") == 16 - min(slots, 16)
                ),
                10,
            )
        finally:
            for call in calls:
                call.cancel()
    assert eventually(lambda: metric(metrics_url, "grok1_requests_running") == 0, 3)
