"""The command `score`: exact, on either format, with and without a tokenizer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_values import GOLDEN, golden_config

from grok1_backend import cli
from grok1_backend.checkpoint.convert import convert

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference values beside the repo")
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = dataclasses.asdict(golden_config()).items()
    path = tmp_path_factory.mktemp("config") / "golden.toml"
    path.write_text("\n".join(["[model]", *(f"{name} = {value}" for name, value in fields)]))
    return path


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return dict(np.load(GOLDEN / "golden_q8_fp32.npz"))


def run(capsys: Out, *arguments: str | Path) -> tuple[int, list[str], str]:
    code = cli.main(["score", *map(str, arguments)])
    out, errors = capsys.readouterr()
    return code, out.splitlines(), errors


def tokens_of(values: dict[str, Any], case: str) -> str:
    tokens = values[f"{case}/prompt"][: int(values[f"{case}/length"])]
    return ",".join(map(str, tokens))


@pytest.mark.parametrize("case", ["len1", "len17", "padded"])
def test_logits_are_those_of_the_reference(
    capsys: Out, tmp_path: Path, config_file: Path, values: dict[str, Any], case: str
) -> None:
    out = tmp_path / "out.npy"
    arguments = ("--checkpoint", GOLDEN / "ckpt-0", "--config", config_file, "--all-logits", out)
    code, _, _ = run(capsys, *arguments, "--tokens", tokens_of(values, case))
    assert code == 0
    logits, expected = np.load(out), values[f"{case}/prefill_logits_last"]
    assert logits.shape == (int(values[f"{case}/length"]), golden_config().vocab_size)
    assert logits.dtype == np.float32
    assert np.linalg.norm(logits[-1] - expected) < 1e-4 * np.linalg.norm(expected)


def test_lines_are_what_the_logits_say(
    capsys: Out, tmp_path: Path, config_file: Path, values: dict[str, Any]
) -> None:
    out = tmp_path / "out.npy"
    arguments = ("--checkpoint", GOLDEN, "--config", config_file, "--all-logits", out)
    _, lines, _ = run(capsys, *arguments, "--tokens", tokens_of(values, "padded"))
    logits = np.float64(np.load(out))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tokens = [int(token) for token in tokens_of(values, "padded").split(",")]
    assert len(lines) == len(tokens) + 1
    assert lines[0] == f"0\t{tokens[0]}\t-"
    for position in range(1, len(tokens)):
        place, token, log_prob, top = lines[position].split("\t")
        before = log_probs[position - 1]
        assert (int(place), int(token)) == (position, tokens[position])
        assert float(log_prob) == pytest.approx(before[tokens[position]], abs=2e-6)
        best = [entry.split(": ") for entry in top.split(", ")]
        assert [int(entry[0]) for entry in best] == np.argsort(-before)[:8].tolist()
        assert [float(entry[1]) for entry in best] == pytest.approx(
            np.sort(before)[::-1][:8], abs=2e-6
        )
    total = sum(log_probs[i, token] for i, token in enumerate(tokens[1:]))
    perplexity = math.exp(-total / (len(tokens) - 1))
    assert float(lines[-1].split()[-1]) == pytest.approx(perplexity, rel=1e-5)


def test_chunks_join_seamlessly(
    capsys: Out,
    tmp_path: Path,
    config_file: Path,
    values: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 chunks of 4 positions on pages of 8 give what one chunk gives, and in the fast format."""
    tokens = tokens_of(values, "padded")
    whole, cut = tmp_path / "whole.npy", tmp_path / "cut.npy"
    arguments = ("--config", config_file, "--tokens", tokens)
    _, expected, _ = run(capsys, "--checkpoint", GOLDEN, *arguments, "--all-logits", whole)
    convert(GOLDEN / "ckpt-0", tmp_path / "fast", golden_config())
    monkeypatch.setattr("grok1_backend.score.CHUNK", 4)
    monkeypatch.setattr("grok1_backend.score.PAGE_SIZE", 8)
    code, lines, _ = run(capsys, "--checkpoint", tmp_path / "fast", *arguments, "--all-logits", cut)
    assert code == 0
    assert len(lines) == len(expected)
    np.testing.assert_allclose(np.load(cut), np.load(whole), rtol=1e-4, atol=1e-4)


def test_text_with_the_embedded_model(capsys: Out, tmp_path: Path) -> None:
    text = "In the beginning God created the heaven and the earth."
    (tmp_path / "text.txt").write_text(text)
    model = ("--checkpoint", ROOT / "embedded_model")
    _, lines, _ = run(capsys, *model, "--text", text)
    _, from_file, _ = run(capsys, *model, "--file", tmp_path / "text.txt")
    assert from_file == lines
    pieces = [line.split("\t")[1].split(" ", 1)[1].strip("'") for line in lines[:-1]]
    assert "".join(pieces).strip() == text
    assert float(lines[-1].split()[-1]) < 512, "no better than a guess among a quarter of them"


def test_in_bfloat16(capsys: Out, config_file: Path, values: dict[str, Any]) -> None:
    arguments = ("--checkpoint", GOLDEN, "--config", config_file)
    tokens = tokens_of(values, "len5")
    _, exact, _ = run(capsys, *arguments, "--tokens", tokens)
    _, rounded, _ = run(capsys, *arguments, "--tokens", tokens, "--dtype", "bfloat16")
    ours, theirs = (float(lines[1].split("\t")[2]) for lines in (rounded, exact))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "1,x"), "--tokens is '1,x': ids such as 1,5,9"),
        (("--tokens", "512"), "a token is 512: 0 to 511"),
        (("--tokens", "-1"), "a token is -1: 0 to 511"),
        (("--tokens", ",".join(["1"] * 65)), "65 tokens are given: 1 to 64, the context's length"),
        (("--text", "hello"), "no tokenizer.model beside the checkpoint or the config"),
    ],
)
def test_wrong_arguments(
    capsys: Out, config_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    flag, value = arguments
    code, out, errors = run(
        capsys, "--checkpoint", GOLDEN, "--config", config_file, f"{flag}={value}"
    )
    assert code == 1
    assert out == []
    assert message in errors


def test_a_checkpoint_that_is_none(capsys: Out, tmp_path: Path, config_file: Path) -> None:
    arguments = ("--checkpoint", tmp_path, "--config", config_file, "--tokens", "1")
    code, _, errors = run(capsys, *arguments)
    assert code == 1
    assert "expected a checkpoint" in errors
    assert str(tmp_path) in errors
