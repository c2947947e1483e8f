"""Tokenizers for the tests of text: Grok-1's own, and small ones trained here."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from grok1_backend.text.tokenizer import Tokenizer

GROK_MODEL = Path(__file__).resolve().parents[3] / "shared" / "grok-1" / "tokenizer.model"
SENTENCES = (
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; and darkness was upon the face of the deep.",
    "And God said, Let there be light: and there was light.",
)


@pytest.fixture(scope="session")
def grok_model() -> Path:
    """The model file of the released Grok-1 tokenizer."""
    if not GROK_MODEL.parent.is_dir():
        pytest.skip(f"the shared material with Grok-1's tokenizer is not at {GROK_MODEL.parent}")
    return GROK_MODEL


@pytest.fixture(scope="session")
def grok(grok_model: Path) -> Tokenizer:
    return Tokenizer(grok_model)


@pytest.fixture(scope="session")
def original(grok_model: Path) -> SentencePieceProcessor:
    """Grok-1's tokenizer as SentencePiece itself runs it."""
    return SentencePieceProcessor(model_file=str(grok_model))


def train(directory: Path, *, dummy_prefix: bool, byte_fallback: bool = True) -> Path:
    """A model file of a few hundred pieces with the conventions of Grok-1's."""
    prefix = directory / f"prefix_{dummy_prefix}_bytes_{byte_fallback}"
    SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=340 if byte_fallback else 60,
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n", "<|separator|>"],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[BOS]",
        eos_piece="[EOS]",
        unk_piece="[UNK]",
        unk_surface="[UNK]",
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="session", params=[True, False], ids=["dummy_prefix", "no_dummy_prefix"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(train(tmp_path_factory.mktemp("tiny"), dummy_prefix=request.param))


@pytest.fixture(scope="session")
def model_without_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("no_bytes")
    return train(directory, dummy_prefix=True, byte_fallback=False)
