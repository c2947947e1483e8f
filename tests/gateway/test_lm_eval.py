"""lm-evaluation-harness, the real one, runs local tasks against the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gateways import NAME, Gateway
from generation import Stream, text_of

from grok1_backend.text.tokenizer import Tokenizer

TASKS = Path(__file__).parent / "lm_eval_tasks"


@pytest.fixture(scope="module")
def lm_eval() -> str:
    command = Path(sys.prefix) / "lm_eval" / "bin" / "lm_eval"
    if not command.exists():
        pytest.fail(f"no {command}: `make test` installs it")
    return str(command)


@pytest.fixture(scope="module")
def samples(
    gateway: Gateway, lm_eval: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What the harness asked and got, by task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    model = f"model={NAME},base_url={gateway.url}/v1/completions,custom_prefix_token_id=1"
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "proverbs_choice,proverbs_generate", "--include_path", str(TASKS)]
    command += ["--batch_size", "4", "--log_samples", "--output_path", str(folder)]
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=TASKS,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proverbs_choice" in done.stdout
    found = {}
    for path in folder.glob(f"{NAME}/samples_*.jsonl"):
        task = path.stem.removeprefix("samples_").rsplit("_", 1)[0]
        found[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def test_choices_are_scored_as_the_engine_scores_them(
    samples: dict[str, list[dict[str, Any]]], grpc_url: str, tokenizer: Tokenizer
) -> None:
    rows = samples["proverbs_choice"]
    assert len(rows) == 4
    for row in rows:
        for number, (answer,) in enumerate(row["resps"]):
            argument = row["arguments"][f"gen_args_{number}"]
            context = tokenizer.encode(argument["arg_0"]) or [1]
            whole = tokenizer.encode(argument["arg_0"] + argument["arg_1"])
            if not argument["arg_0"]:
                whole = [1, *whole]
            with Stream(grpc_url) as stream:
                (reply,) = stream.ask(
                    "grok1_generate",
                    input_ids=whole,
                    max_tokens=0,
                    return_prompt_log_probs=True,
                )
            scores = reply.outputs["prompt_log_probs"][0][len(context) :]
            best = reply.outputs["prompt_top_ids"][0][len(context) :, 0]
            assert float(answer[0]) == pytest.approx(float(scores.sum()), abs=1e-3)
            assert answer[1] == str(best.tolist() == whole[len(context) :])
    greedy = {answer[1] for row in rows for (answer,) in row["resps"]}
    assert greedy == {"True", "False"}, "both are to be seen"


def test_what_is_generated_is_the_servers_text(
    samples: dict[str, list[dict[str, Any]]], grpc_url: str
) -> None:
    for row in samples["proverbs_generate"]:
        prompt = row["arguments"]["gen_args_0"]["arg_0"]
        with Stream(grpc_url) as stream:
            expected = text_of(
                stream.ask(
                    "grok1_generate",
                    text_input=prompt,
                    max_tokens=12,
                    temperature=0.0,
                    stop_words=["\n"],
                )
            )
        assert row["resps"] == [[expected]]
