"""The embedded model's SentencePiece tokenizer: how it is trained, how a corpus is encoded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from training.corpus import Book

VOCAB_SIZE = 2048
PAD, BOS, EOS, UNK = range(4)

Tokens = npt.NDArray[np.int32]


def train_tokenizer(books: Iterable[Book], path: Path) -> None:
    """Train a unigram model on the books and write it to `path`.

    Text survives unchanged: no normalisation, no dummy prefix, byte fallback for unseen characters.
    SentencePiece trains on lines, so line breaks are given to it as symbols of their own. The
    control pieces cannot be written in text.
    """
    lines = (line for book in books for line in book.text.split("\n") if line)
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=file,
            model_type="unigram",
            vocab_size=VOCAB_SIZE,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["\n", "\n\n"],
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            pad_piece="[PAD]",
            bos_piece="[BOS]",
            eos_piece="[EOS]",
            unk_piece="[UNK]",
            max_sentence_length=1 << 20,
            num_threads=1,  # floating-point sums, and so the pieces, would depend on the threads
            minloglevel=1,
        )


def encode_books(tokenizer: sentencepiece.SentencePieceProcessor, books: Iterable[Book]) -> Tokens:
    """All books as one stream, each between `BOS` and `EOS`: [tokens] int32."""
    ids: list[int] = []
    for book in books:
        ids += [BOS, *tokenizer.encode(book.text), EOS]
    return np.asarray(ids, np.int32)
