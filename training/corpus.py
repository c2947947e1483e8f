"""Public-domain English books from Debian and PyPI packages, as plain text.

Owns reading the package files, cleaning their text and the split into training, development and
held-out books. It downloads nothing: README.md has the package-client commands. The text of a book
is the same, byte for byte, whenever the packages are of the pinned versions.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Whole books that nothing is trained on: not the tokenizer, not the trigram, not the model.
HELD_OUT = frozenset(
    {
        "bible/Ruth",
        "bible/Esther",
        "bible/Acts",
        "austen/Northanger Abbey",
        "shakespeare/julius_caesar",
        "shakespeare/twelfth_night",
    }
)
# Watched during training (settings were chosen on these), so kept apart from both other sets.
DEVELOPMENT = frozenset({"bible/Jonah", "bible/Galatians", "shakespeare/comedy_of_errors"})

_BIBLE_BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy",
    "Josh": "Joshua", "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel",
    "1Ki": "1 Kings", "2Ki": "2 Kings", "1Chr": "1 Chronicles", "2Chr": "2 Chronicles",
    "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job", "Psa": "Psalms",
    "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea",
    "Joel": "Joel", "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah",
    "Nahum": "Nahum", "Hab": "Habakkuk", "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah",
    "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark", "Luke": "Luke", "John": "John",
    "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians",
    "1Th": "1 Thessalonians", "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy",
    "Titus": "Titus", "Phmn": "Philemon", "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter",
    "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John", "3Jn": "3 John", "Jude": "Jude",
    "Rev": "Revelation",
}  # fmt: skip

# The novels in the order of the R data base, which is that of their variable names.
_AUSTEN_BOOKS = (
    "Emma",
    "Mansfield Park",
    "Northanger Abbey",
    "Persuasion",
    "Pride and Prejudice",
    "Sense and Sensibility",
)

# Milton's other files in the package are Latin, in old spelling or a modern editor's notes.
_MILTON = {
    "paradise_lost_(no_introduction)_gut.txt": "milton/Paradise Lost",
    "paradise_regained_gut.txt": "milton/Paradise Regained",
}

_R_STRING = 9  # CHARSXP
_R_STRINGS = 16  # STRSXP
_R_HEADER_BYTES = 14  # "X\n" and three integers; version 3 adds the length-prefixed encoding name


@dataclass(frozen=True)
class Book:
    """One document: `name` is `source/title`, `text` is clean and ends without a newline."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The books of the three sets, each in reading order."""

    training: tuple[Book, ...]
    development: tuple[Book, ...]
    held_out: tuple[Book, ...]


def load_corpus(packages: Path) -> Corpus:
    """Read every book from the package files in `packages`.

    Raises FileNotFoundError naming the package when a file is missing, and ValueError when a book
    of `HELD_OUT` or `DEVELOPMENT` is not among the books read.
    """
    books = [*_bible(packages), *_austen(packages), *_moby_dick(packages), *_poets(packages)]
    missing = (HELD_OUT | DEVELOPMENT) - {book.name for book in books}
    if missing:
        raise ValueError(f"the packages lack the books {sorted(missing)}")
    return Corpus(
        training=tuple(b for b in books if b.name not in HELD_OUT | DEVELOPMENT),
        development=tuple(b for b in books if b.name in DEVELOPMENT),
        held_out=tuple(b for b in books if b.name in HELD_OUT),
    )


def _package(packages: Path, pattern: str) -> Path:
    found = sorted(packages.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {packages}: see training/README.md")
    return found[0]


def _unpack_deb(packages: Path, pattern: str, target: Path) -> Path:
    subprocess.run(["dpkg-deb", "-x", _package(packages, pattern), target], check=True)
    return target


def _bible(packages: Path) -> Iterator[Book]:
    """The King James Version: a chapter heading, then a verse a line without its number."""
    with tempfile.TemporaryDirectory() as folder:
        root = _unpack_deb(packages, "bible-kjv-text_*.deb", Path(folder))
        _unpack_deb(packages, "bible-kjv_*.deb", root)
        verses = subprocess.run(
            [root / "usr/bin/bible", "-p", root / "usr/lib", "-f", "gen1:1-rev22:21"],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        ).stdout
    chapters: dict[str, dict[str, list[str]]] = {}
    for book, chapter, verse in re.findall(r"^(\w+?)(\d+):\d+ (.+)$", verses, re.MULTILINE):
        chapters.setdefault(_BIBLE_BOOKS[book], {}).setdefault(chapter, []).append(verse.strip())
    for title, content in chapters.items():
        parts = [title]
        for chapter, lines in content.items():
            parts += [f"Chapter {chapter}", "\n".join(lines)]
        yield Book(f"bible/{title}", "\n\n".join(parts))


def _austen(packages: Path) -> Iterator[Book]:
    novels = _r_vectors(
        packages, "r-cran-janeaustenr_*.deb", "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    )
    for title, lines in zip(_AUSTEN_BOOKS, novels, strict=True):
        text, _, _ = "\n".join(lines).partition("A NOTE ON THE TEXT\n")  # a modern editor's
        yield Book(f"austen/{title}", _prose(text))


def _moby_dick(packages: Path) -> Iterator[Book]:
    ((text,),) = _r_vectors(
        packages, "r-cran-tokenizers_*.deb", "usr/lib/R/site-library/tokenizers/data/Rdata.rdb"
    )
    # The transcribers' header, contents and licence are not Melville's.
    start, end = text.index("CHAPTER 1. Loomings."), text.index("End of Project Gutenberg's")
    yield Book("melville/Moby Dick", _prose(text[start:end]))


def _poets(packages: Path) -> Iterator[Book]:
    """Shakespeare in modern spelling (`*_gut_f.txt` is the First Folio) and Milton's epics."""
    with tarfile.open(_package(packages, "shakespeare-*.tar.gz")) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            file = archive.extractfile(member)
            _, _, name = member.name.partition("data/texts/")
            title = _MILTON.get(name) or f"shakespeare/{name.removesuffix('_gut.txt')}"
            wanted = "shksprdata" in member.name and name.endswith("_gut.txt")
            if file and (wanted or name in _MILTON):
                yield Book(title, _clean(file.read().decode("utf-8-sig")))


def _r_vectors(packages: Path, package: str, member: str) -> list[list[str]]:
    """All character vectors of a package's R data base.

    The file is a run of records: a 4-byte big-endian size, then a zlib stream of that many bytes
    in R's XDR serialization, version 3 (R Internals, section 1.8).
    """
    with tempfile.TemporaryDirectory() as folder:
        data = (_unpack_deb(packages, package, Path(folder)) / member).read_bytes()
    vectors = []
    while data:
        stream = zlib.decompressobj()
        record = stream.decompress(data[4:])
        if len(record) != struct.unpack(">I", data[:4])[0]:
            raise ValueError(f"{member}: a record does not have its recorded size")
        vectors.append(_r_strings(record))
        data = stream.unused_data
    return vectors


def _r_strings(record: bytes) -> list[str]:
    def integer(offset: int) -> int:
        return int(struct.unpack_from(">i", record, offset)[0])

    offset = _R_HEADER_BYTES + 4 + integer(_R_HEADER_BYTES)
    if integer(offset) & 0xFF != _R_STRINGS:
        raise ValueError("not an R character vector")
    count = integer(offset + 4)
    offset += 8
    strings = []
    for _ in range(count):
        if integer(offset) & 0xFF != _R_STRING:
            raise ValueError("not an R character string")
        size = integer(offset + 4)
        strings.append(record[offset + 8 : offset + 8 + size].decode())
        offset += 8 + size
    return strings


def _prose(text: str) -> str:
    """Join the wrapped lines of each paragraph; `_emphasis_` loses its marks."""
    paragraphs = re.split(r"\n{2,}", _clean(text).replace("_", ""))
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def _clean(text: str) -> str:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\t", " ")
    text = text.replace("\x1a", "")  # DOS end-of-file marks
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
