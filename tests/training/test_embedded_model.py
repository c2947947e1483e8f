"""The stored model: its size, its tokenizer, its report, and that it knows English."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from training.corpus import HELD_OUT, Book
from training.evaluation import ModelScorer, bits_of_stream
from training.objective import StoredParams
from training.settings import model_config
from training.tokenizer import BOS, EOS, PAD, UNK, encode_books

from grok1_backend.checkpoint.arrays import ArrayRef
from grok1_backend.checkpoint.checkpoint import open_checkpoint
from grok1_backend.model.config import load_config
from grok1_backend.model.quantization import QuantizedWeight8bit

MODEL = Path(__file__).resolve().parents[2] / "embedded_model"
# From Northanger Abbey, which the model has not seen.
PASSAGE = (
    "No one who had ever seen Catherine Morland in her infancy would have supposed her born to be "
    "an heroine. Her situation in life, the character of her father and mother, her own person and "
    "disposition, were all equally against her. Her father was a clergyman, without being "
    "neglected, or poor, and a very respectable man, though his name was Richard--and he had never "
    "been handsome."
)


@pytest.fixture(scope="module")
def tokenizer() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODEL / "training_report.json").read_text())
    return content


def test_the_directory_is_at_most_12_megabytes() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) <= 12e6


def test_its_config_is_the_published_one_with_a_long_context() -> None:
    assert load_config(MODEL) == model_config()
    assert model_config().sequence_len >= 8192


def test_it_is_clearly_better_than_the_trigram_on_every_book(report: dict[str, Any]) -> None:
    rates = report["held_out_bits_per_byte"]
    model, trigram = rates["model_int8"], rates["kneser_ney_trigram"]
    assert set(model) == set(trigram) == HELD_OUT | {"total"}
    assert model["total"] < 0.95 * trigram["total"]
    assert all(model[book] < trigram[book] for book in HELD_OUT)


def test_quantisation_costs_little(report: dict[str, Any]) -> None:
    rates = report["held_out_bits_per_byte"]
    assert rates["model_int8"]["total"] < 1.005 * rates["model_float32"]["total"]


def test_the_stored_weights_predict_an_unseen_passage(
    tokenizer: sentencepiece.SentencePieceProcessor,
) -> None:
    params, scorer = _stored_params(), ModelScorer(model_config())

    def rate(text: str) -> float:
        stream = encode_books(tokenizer, [Book("passage", text)])[:-1]  # it does not end here
        return bits_of_stream(scorer, params, stream) / len(text.encode())

    shuffled = " ".join(reversed(PASSAGE.split(" ")))
    assert rate(PASSAGE) < 1.5
    assert rate(shuffled) > 1.3 * rate(PASSAGE)


def test_control_pieces(tokenizer: sentencepiece.SentencePieceProcessor) -> None:
    pieces = [tokenizer.id_to_piece(i) for i in (PAD, BOS, EOS, UNK)]
    assert pieces == ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    for piece in pieces:  # written in a text, they are only text
        assert not set(tokenizer.encode(f"a{piece}b")) & {PAD, BOS, EOS, UNK}
    assert tokenizer.get_piece_size() == model_config().vocab_size


@settings(derandomize=True, deadline=None)
@given(st.text())
def test_text_survives(text: str) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "tokenizer.model"))
    # SentencePiece writes a space as U+2581, so that character itself comes back as a space.
    assert processor.decode(processor.encode(text)) == text.replace("\u2581", " ")


def _stored_params() -> StoredParams:
    """The checkpoint under Haiku's names."""
    params: StoredParams = {}
    for name, leaf in open_checkpoint(MODEL, model_config()).items():
        module, _, parameter = name.rpartition("/")
        weight = _read(leaf.weight)
        stored = weight if leaf.scales is None else QuantizedWeight8bit(weight, _read(leaf.scales))
        params.setdefault(module, {})[parameter] = stored
    return params


def _read(ref: ArrayRef) -> Any:
    flat = np.fromfile(ref.path, ref.dtype, int(np.prod(ref.shape)), offset=ref.offset)
    return jnp.asarray(flat.reshape(ref.shape, order="F" if ref.fortran else "C"))
