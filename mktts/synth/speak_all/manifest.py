"""What became of each sentence: a file of JSON lines, the last of which about a sentence is true.

A line is written in one piece once the audio that it speaks of is in place; what a process that was killed has left of
its last line is cut off.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mktts.common import write_whole
from mktts.errors import SentencesError
from mktts.synth.speak_all.folder import MANIFEST, sync

Record = dict[str, Any]
KEPT = ("ok", "unfinished")  # what a sentence is not spoken again after; "failed" and "bad" are tried anew
_SYNC_S = 1.0  # a loss of power may cost what was made in so many seconds, and no more
_PART = ".part-{}.jsonl"


class Kept(NamedTuple):
    """Of a sentence that is done. digest: of all that it was made from."""

    status: str
    digest: str
    bytes: int
    file: str


class Manifest:
    """Any thread may `append`. done: the sentences that need not be spoken again, by id.

    Raises SentencesError for a file that was edited into something else.
    """

    def __init__(self, folder: Path, part: str | None = None) -> None:
        """part: names one of its own, of a process that works for the one that has the folder."""
        self.done: dict[str, Kept] = {}
        self._folder, self._path = folder, folder / (MANIFEST if part is None else _PART.format(part))
        self._lock = threading.Lock()
        self._synced_s = time.monotonic()
        self._settle(by_line=False)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, record: Record) -> None:
        """Adds a line. Raises OSError where it cannot be written whole; what is there of it is taken back."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        line = f"{text}\n".encode(errors="backslashreplace")  # half a pair of surrogates, as JSON writes it
        with self._lock:
            end = os.fstat(self._file).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
            except BaseException:
                os.ftruncate(self._file, end)
                raise
            if record["status"] in KEPT:
                self.done[record["id"]] = _kept(record)
            if time.monotonic() - self._synced_s > _SYNC_S:
                self._sync()

    def absorb(self) -> None:
        """Takes over what parts know of sentences that are not done here, and deletes them."""
        for path in sorted(self._folder.glob(_PART.format("*"))):
            for _, record in _read(path):
                if record.get("status") in KEPT and record["id"] not in self.done:
                    self.append(record)
            with self._lock:
                self._sync()
            path.unlink()

    def close(self, *, tidy: bool = False) -> None:
        """tidy: the lines in the order of the table, one a sentence."""
        with self._lock:
            self._sync()
            os.close(self._file)
        if tidy:
            self._settle(by_line=True)

    def _sync(self) -> None:
        sync(self._folder)  # the files first: no line may speak of one that is not there
        os.fsync(self._file)
        self._synced_s = time.monotonic()

    def _settle(self, *, by_line: bool) -> None:
        """Leaves one line a sentence. When it is opened, what is tried anew has none."""
        if not self._path.exists():
            return
        places: dict[Any, tuple[int, int]] = {}  # of the last line about each: line of the table, place in the file
        lines = 0
        for place, record in _read(self._path):
            lines += 1
            about = record.get("id") if record.get("id") is not None else record.get("line")
            places[about] = (record.get("line") or 0, place)
            if not by_line:
                self._note(about, record)
        wanted = [place for about, place in places.items() if by_line or about in self.done]
        if by_line:
            wanted.sort()
        if len(wanted) < lines or by_line:
            with self._path.open("rb") as file:
                write_whole(self._path, b"".join(_line_at(file, place) for _, place in wanted), lasting=True)
            sync(self._folder)

    def _note(self, about: Any, record: Record) -> None:
        if record.get("status") in KEPT:
            self.done[about] = _kept(record)
        else:
            self.done.pop(about, None)


def _kept(record: Record) -> Kept:
    return Kept(record["status"], record["digest"], record["bytes"], record["file"])


def _line_at(file: Any, place: int) -> bytes:
    file.seek(place)
    return file.readline()


def _read(path: Path) -> Iterator[tuple[int, Record]]:
    """Records with their places in bytes; an end that cannot be read is cut off the file."""
    bad: tuple[int, int] | None = None  # number and place of the first line that is none
    with path.open("r+b") as file:
        place = 0
        for number, line in enumerate(file, 1):
            record = _record(line)
            if record is None:
                bad = bad or (number, place)
            elif bad:
                raise SentencesError(
                    f"{path}: line {bad[0]} is no line of a manifest: delete it, and its sentence is spoken again"
                )
            else:
                yield place, record
            place += len(line)
        if bad:
            file.truncate(bad[1])


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "status" not in record:
        return None
    whole = record["status"] not in KEPT or {"id", "digest", "bytes", "file"} <= record.keys()
    return record if whole else None
