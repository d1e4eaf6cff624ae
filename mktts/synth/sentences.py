"""Tables of sentences: one a line, as JSON lines, as a table with tabs, or as plain text.

    {"id": "greeting", "text": "Good morning.", "speaker": "vivian", "language": "english", "seed": 7}

The columns are those of `COLUMNS`; a table with tabs names its own in the first line, and a tab or a quotation mark
never stands for anything else (IANA's text/tab-separated-values). A line of plain text is a text, whose id is the
line's number in six digits.
"""

from __future__ import annotations

import codecs
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mktts.common import checked_int
from mktts.errors import MkttsError, SentencesError
from mktts.model.sampling import MAX_SEED

NEEDED = ("id", "text")
COLUMNS = (*NEEDED, "voice", "speaker", "language", "instruct", "seed", "max_frames")
KINDS = ("jsonl", "tsv", "txt")
_NUMBERS = {"seed": (0, MAX_SEED), "max_frames": (1, None)}
_MAX_ID_BYTES = 200  # a name has 255 on every file system in use, and gets an ending, and others while it is written


@dataclass(frozen=True)
class Sentence:
    """line: of the table, from 1. voice: a voice file, as the table names it. What is None was not given."""

    line: int
    id: str
    text: str
    voice: str | None = None
    speaker: str | None = None
    language: str | None = None
    instruct: str | None = None
    seed: int | None = None
    max_frames: int | None = None


def read_table(path: Path) -> tuple[list[Sentence], dict[int, str]]:
    """Every line that is not blank: sentences, and why, by its number, of each line that is none. An id that stands
    twice makes the later line a bad one. Raises SentencesError where there is no such file, its name does not end in
    one of KINDS, or no line is a sentence."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise SentencesError(f"{path}: expected a name that ends in .{', .'.join(KINDS)}")
    if not path.is_file():
        raise SentencesError(f"{path}: expected a file of sentences, found no file of that name")
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    sentences, bad, columns, seen = [], {}, [], {}
    for number, data in enumerate(lines, 1):
        try:
            line = data.decode("utf-8").rstrip("\r")
            if kind == "tsv" and number == 1:
                columns = _columns(line)
            elif line.strip():
                sentence = _sentence(number, _cells(kind, number, line, columns))
                key = unicodedata.normalize("NFC", sentence.id).casefold()  # file systems that see no difference
                if (earlier := seen.setdefault(key, number)) != number:
                    raise SentencesError(
                        f"id {sentence.id!r} stands in line {earlier} already, perhaps in other case: give each its own"
                    )
                sentences.append(sentence)
        except UnicodeDecodeError as error:
            bad[number] = f"expected UTF-8, found other bytes at place {error.start}"
        except MkttsError as error:
            bad[number] = str(error)
    if not sentences:
        why = "".join(f"; line {number}: {error}" for number, error in [*bad.items()][:1])
        raise SentencesError(f"{path}: expected sentences with the columns {', '.join(COLUMNS)}, found none{why}")
    return sentences, bad


def _columns(line: str) -> list[str]:
    columns = [name.strip().lower() for name in line.split("\t")]
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise SentencesError(f"column {twice[0]!r} stands twice: name each once")
    return columns


def _cells(kind: str, number: int, line: str, columns: list[str]) -> dict[str, Any]:
    if kind == "txt":
        return {"id": f"{number:06d}", "text": line}
    if kind == "tsv":
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise SentencesError(f"expected {len(columns)} columns, as the first line has, found {len(cells)}")
        return {name: cell for name, cell in zip(columns, cells, strict=True) if cell.strip()}
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SentencesError(f"expected a JSON object, could not read it: {error}") from None
    if not isinstance(found, dict):
        raise SentencesError(f"expected a JSON object, found {type(found).__name__}")
    return {name: value for name, value in found.items() if value is not None}


def _sentence(number: int, cells: dict[str, Any]) -> Sentence:
    """Raises SentencesError and OptionsError for what cannot be one."""
    if missing := [name for name in NEEDED if name not in cells]:
        raise SentencesError(f"{' and '.join(missing)} is missing")
    values: dict[str, Any] = {}
    for name in COLUMNS:
        value = cells.get(name)
        if name in _NUMBERS and value is not None:
            value = int(value) if isinstance(value, str) and value.isdecimal() else value
            checked_int(name, value, *_NUMBERS[name])
        elif name == "id" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        elif not isinstance(value, str | None):
            raise SentencesError(f"{name} must be a string, found {type(value).__name__}")
        values[name] = value
    _require_name(values["id"])
    return Sentence(number, **values)


def _require_name(name: str) -> None:
    """Raises SentencesError unless `name`, with an ending, is the name of a file in a folder and of nothing else."""
    bad_char = any(char in "/\\" or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name)
    if not name or name != name.strip() or name[0] in ".-" or bad_char or len(name.encode()) > _MAX_ID_BYTES:
        raise SentencesError(
            "id must be the name of a file: not empty, no dot or hyphen at its start, no blank at its ends, no slash "
            f"or control character, at most {_MAX_ID_BYTES} bytes; found {name[:80]!r}"
        )
