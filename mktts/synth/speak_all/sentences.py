"""Tables of sentences: one a line, as JSON lines, as a table with tabs, or as plain text.

    {"id": "greeting", "text": "Good morning.", "speaker": "vivian", "language": "english", "seed": 7}

The columns are those of `COLUMNS`; a table with tabs names its own in the first line, and a tab or a quotation mark
never stands for anything else (IANA's text/tab-separated-values). A line of plain text is a text, whose id is the
line's number in six digits.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mktts.common import is_special, whole_number
from mktts.errors import MkttsError, SentencesError
from mktts.model.sampling import MAX_SEED

NEEDED = ("id", "text")
COLUMNS = (*NEEDED, "voice", "speaker", "language", "instruct", "seed", "max_frames")
KINDS = ("jsonl", "tsv", "txt")
_NUMBERS = {"seed": (0, MAX_SEED), "max_frames": (1, None)}
_MAX_LINE_BYTES = 1 << 20  # over the longest text that may be spoken, in any script and escaped
_MAX_ID_BYTES = 200  # a name has 255 on every file system in use, and gets an ending, and others while it is written
_FORBIDDEN = "/\\"


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


@dataclass(frozen=True)
class BadLine:
    """A line that is no sentence. error: why, in one line."""

    line: int
    error: str


class Table:
    """A file of sentences, read line by line as often as it is asked for. columns: of all lines; empty for JSON lines,
    each of which has its own. unused: those that nothing here knows, as far as it was read.

    Raises SentencesError where there is no such file, its name does not end in one of KINDS, or it lacks a column.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.unused: dict[str, None] = {}
        self._kind = self.path.suffix.lower().removeprefix(".")
        if self._kind not in KINDS:
            raise SentencesError(f"{path}: expected a name that ends in .{', .'.join(KINDS)}")
        if not self.path.is_file() or is_special(self.path):
            found = "nothing" if not self.path.exists() else "something else"
            raise SentencesError(f"{path}: expected a file of sentences, which is read twice; found {found}")
        self.columns: list[str] = [*NEEDED] if self._kind == "txt" else []
        self._check_columns()

    def __iter__(self) -> Iterator[Sentence | BadLine]:
        """Every line that is not blank. An id that stands twice makes the later line a bad one."""
        seen: dict[str, int] = {}
        with self.path.open("rb") as file:
            for number, line in _lines(file):
                if isinstance(line, MkttsError):
                    yield BadLine(number, str(line))
                    continue
                if number == 1:
                    line = line.removeprefix("\ufeff")
                    if self._kind == "tsv":
                        continue
                if not line.strip():
                    continue
                yield self._one(number, line, seen)

    def _one(self, number: int, line: str, seen: dict[str, int]) -> Sentence | BadLine:
        try:
            sentence = _sentence(number, self._cells(number, line))
            key = unicodedata.normalize("NFC", sentence.id).casefold()  # file systems that see no difference
            if (earlier := seen.setdefault(key, number)) != number:
                raise SentencesError(
                    f"id {sentence.id!r} stands in line {earlier} already, perhaps in other case: give each its own"
                )
        except MkttsError as error:
            return BadLine(number, str(error))
        return sentence

    def _cells(self, number: int, line: str) -> dict[str, Any]:
        if self._kind == "txt":
            return {"id": f"{number:06d}", "text": line}
        if self._kind == "tsv":
            cells = line.split("\t")
            if len(cells) != len(self.columns):
                raise SentencesError(f"expected {len(self.columns)} columns, found {len(cells)}")
            return {name: cell for name, cell in zip(self.columns, cells, strict=True) if cell.strip()}
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SentencesError(f"expected a JSON object, could not read it: {error}") from None
        if not isinstance(found, dict):
            raise SentencesError(f"expected a JSON object, found {type(found).__name__}")
        self.unused.update(dict.fromkeys(found.keys() - set(COLUMNS)))
        return {name: value for name, value in found.items() if value is not None}

    def _check_columns(self) -> None:
        """Of the first line that tells: a table without a text is refused as a whole."""
        if self._kind == "txt":
            return
        with self.path.open("rb") as file:
            first = next((line for _, line in _lines(file) if isinstance(line, MkttsError) or line.strip()), None)
        if isinstance(first, MkttsError):
            raise SentencesError(f"{self.path}: line 1: {first}")
        if first is None:
            raise SentencesError(f"{self.path}: expected sentences, found an empty file")
        first = first.removeprefix("\ufeff")
        if self._kind == "tsv":
            columns = [name.strip().lower() for name in first.split("\t")]
            if twice := sorted({name for name in columns if columns.count(name) > 1}):
                raise SentencesError(f"{self.path}: column {twice[0]!r} stands twice: name each once")
            self.columns = columns
            self.unused.update(dict.fromkeys(name for name in columns if name not in COLUMNS))
        else:
            try:
                columns = list(json.loads(first))
            except (ValueError, TypeError, RecursionError):
                return  # a bad line, which says nothing about the others
        if missing := [name for name in NEEDED if name not in columns]:
            where = "the first line with tabs names the columns" if self._kind == "tsv" else "each line is an object"
            raise SentencesError(
                f"{self.path}: expected the columns {', '.join(COLUMNS)}, of which id and text must be there; "
                f"{' and '.join(missing)} is missing ({where}), found {', '.join(map(str, columns))[:200]}"
            )


def _lines(file: IO[bytes]) -> Iterator[tuple[int, str | MkttsError]]:
    """Numbered lines without their ends; what cannot be one is an error in its place."""
    number = 0
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(_MAX_LINE_BYTES)
            yield number, SentencesError(f"expected at most {_MAX_LINE_BYTES} bytes, found more")
            continue
        try:
            yield number, line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, SentencesError(f"expected UTF-8, found other bytes at place {error.start}")


def _sentence(number: int, cells: dict[str, Any]) -> Sentence:
    """Raises SentencesError and OptionsError for what cannot be one."""
    for name in NEEDED:
        if name not in cells:
            raise SentencesError(f"{name} is missing")
    values: dict[str, Any] = {}
    for name in COLUMNS:
        value = cells.get(name)
        if name in _NUMBERS and value is not None:
            values[name] = _number(name, value)
            continue
        if name == "id" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str | None):
            raise SentencesError(f"{name} must be a string, found {type(value).__name__}")
        values[name] = value
    require_name(values["id"])
    return Sentence(number, **values)


def _number(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise SentencesError(f"{name} must be a whole number, found {value[:40]!r}") from None
    whole_number(name, value, *_NUMBERS[name])
    return value


def require_name(name: str) -> None:
    """Raises SentencesError unless `name`, with an ending, is the name of a file in a folder and of nothing else."""
    if not name or name != name.strip() or name[0] in ".-":
        raise SentencesError(
            f"id must be the name of a file: not empty, no dot or hyphen at its start, no blank at its ends; "
            f"found {name[:80]!r}"
        )
    for char in name:
        if char in _FORBIDDEN or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp"):
            raise SentencesError(
                f"id must be the name of a file, without slashes and control characters; found {name[:80]!r}"
            )
    if len(name.encode()) > _MAX_ID_BYTES:
        raise SentencesError(f"id may have {_MAX_ID_BYTES} bytes, found {len(name.encode())}: shorten it")
