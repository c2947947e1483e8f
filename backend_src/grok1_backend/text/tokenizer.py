"""Text to token ids and back, byte for byte, with a SentencePiece model.

What the released Grok-1 tokenizer does (read from its model file): BPE of 131072 pieces; the
normaliser is the identity and keeps every space; a character without a piece is written as
its UTF-8 bytes, one byte piece each; a *dummy prefix*, one space, goes before the text, so
that a word at the start gets the same piece as in mid-sentence; no BOS is added. Prompts are
encoded so here too, for the model was trained on that.

Two things are done differently, so that text is data and never changes:

* `[BOS]` and the like are control pieces, which SentencePiece never finds in text. But
  `<|separator|>`, `<|mask|>`, `<|control1|>`... are user-defined pieces, which it would.
  `encode` writes such a name as ordinary text; only a caller of token ids can send them.
* SentencePiece uses U+2581 for the space, and cannot tell one in the text from a space.
  `encode` writes it as its three byte pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from grok1_backend.engine.errors import invalid

_SPACE = "\u2581"
_CONTROL_NAME = re.compile(r"<\|\w+\|>")

# `normalizer_spec { add_dummy_prefix: false }` as a serialised ModelProto. SentencePiece has no
# call for this setting, but protobuf parsers merge a message that follows into the one before.
_WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

TOKENIZER_FILE = "tokenizer.model"
"""Its name in a model directory."""


class Tokenizer:
    """A SentencePiece model with byte fallback.

    `decode(encode(text)) == text.encode()` for all Unicode text if the model's normaliser is
    the identity, as Grok-1's is; otherwise for all text that the normaliser leaves alone.
    Thread-safe: nothing changes after construction.

    Attributes:
      vocab_size: the number of pieces; token ids are 0 to vocab_size - 1.
      pad_id, bos_id, eos_id, unk_id: ids of these pieces, -1 where the model has none.
      adds_dummy_prefix: whether a text is encoded with a space before it.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads a SentencePiece model file.

        Raises:
          OSError: the file cannot be read.
          ValueError: it is not a SentencePiece model, or has no byte fallback.
        """
        proto = Path(path).read_bytes()
        try:
            as_trained = SentencePieceProcessor(model_proto=proto)
            self._processor = SentencePieceProcessor(model_proto=proto + _WITHOUT_DUMMY_PREFIX)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model") from error
        self.adds_dummy_prefix = as_trained.normalize("a") == _SPACE + "a"
        self.vocab_size: int = self._processor.vocab_size()
        self.pad_id: int = self._processor.pad_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        pieces: list[str] = self._processor.id_to_piece(list(range(self.vocab_size)))
        self._bytes = [self._bytes_of(token_id, piece) for token_id, piece in enumerate(pieces)]
        self._space_ids: list[int] = [
            self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()
        ]
        if not all(map(self._processor.is_byte, self._space_ids)):
            raise ValueError(f"{path} has no byte fallback: text would be lost")
        self._seams = _seams(piece for piece in pieces if _CONTROL_NAME.fullmatch(piece))

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        """Token ids of a text; never a control id, whatever the text says; no BOS.

        Args:
          text: any Unicode text.
          continuation: the text goes on after other tokens (a later turn of a sequence), so no
            dummy prefix belongs before it.

        Raises:
          EngineError: INVALID_ARG where the text holds a lone surrogate.
        """
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            limit = f"no surrogate code point, as there is at index {error.start}"
            raise invalid("text", text, limit) from None
        if self.adds_dummy_prefix and not continuation:
            text = " " + text
        ids: list[int] = []
        for part in filter(None, self._seams.split(text)):
            ids += self._space_ids if part == _SPACE else self._processor.encode(part)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text after other tokens.

        A byte piece is one byte and a control piece none. The unknown piece, which `encode`
        never writes, is the model file's sign for it (`[UNK]` in Grok-1). A user-defined piece
        is its text, `<|separator|>` too: it is the one trace in a text that the model wrote it.

        Raises:
          EngineError: INVALID_ARG for an id that is no piece of the tokenizer.
        """
        if not 0 <= token_id < self.vocab_size:
            raise invalid("token id", token_id, f"0 to {self.vocab_size - 1} in this tokenizer")
        return self._bytes[token_id]

    def decode(self, token_ids: Iterable[int], *, continuation: bool = False) -> bytes:
        """The inverse of `encode` with the same `continuation`.

        The tokens' bytes joined; at the start of a text without the space of the dummy prefix.

        Raises:
          EngineError: as `token_bytes`.
        """
        joined = b"".join(map(self.token_bytes, token_ids))
        if self.adds_dummy_prefix and not continuation:
            return joined.removeprefix(b" ")
        return joined

    def _bytes_of(self, token_id: int, piece: str) -> bytes:
        if self._processor.is_control(token_id):
            return b""
        if self._processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])  # <0x0A>
        if self._processor.is_unknown(token_id):
            surface: str = self._processor.decode([token_id])
            return surface.encode()
        return piece.replace(_SPACE, " ").encode()


def _seams(control_names: Iterable[str]) -> re.Pattern[str]:
    """Where `encode` cuts a text: around each U+2581, and after the `<` of each control name."""
    seams = [f"({_SPACE})"]
    tails = "|".join(re.escape(name[1:]) for name in control_names)
    if tails:
        seams.append(f"(?<=<)(?={tails})")
    return re.compile("|".join(seams))
