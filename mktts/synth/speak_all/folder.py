"""The folder that speech goes to: one process at a time, the settings that made it, and no half-written file."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mktts.common import read_object, write_json
from mktts.errors import BusyError, SentencesError

MANIFEST, SETTINGS = "manifest.jsonl", "settings.json"
_LOCK = ".lock"
# What `write_whole` calls a file before it is whole.
_HALF = re.compile(r"\..+\.(wav|flac|opus|mp3|jsonl|json)\.[a-z0-9_]{8}", re.DOTALL)


@contextmanager
def held(path: Path) -> Iterator[Path]:
    """Makes the folder, keeps other processes out of it for as long as the block runs, and clears it of what a process
    that was killed had half written. The kernel lets go of it when this process ends, however it does.

    Raises BusyError while another process has it, SentencesError where `path` is a file.
    """
    if path.exists() and not path.is_dir():
        raise SentencesError(f"{path}: expected a folder, found a file")
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(lock, 200).decode(errors="replace").strip() or "another process"
            raise BusyError(
                f"{path}: expected a folder that nobody else writes to, {who} is at work in it: wait for it, or "
                "name another folder"
            ) from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        for entry in os.scandir(path):
            if _HALF.fullmatch(entry.name):
                os.unlink(entry.path)
        yield path
    finally:
        os.close(lock)


def settle_settings(folder: Path, wanted: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the folder is made with: those it has, or `wanted`, which it gets then.

    drawn: takes the place of what is None in `wanted`, in a new folder; in an old one, what is None there is not
    compared. Raises SentencesError where the two differ, naming it, and for a folder of something else.
    """
    path = folder / SETTINGS
    if path.exists():
        kept = read_object(path, SentencesError, f"; delete {folder}, or name another folder")
        for name, value in wanted.items():
            if (value is not None or name not in drawn) and kept.get(name) != value:
                raise SentencesError(
                    f"{folder} was made with {name} {kept.get(name)!r}, now it is {value!r}: give it as it was, or "
                    "name another folder"
                )
        return kept
    others = sorted(entry.name for entry in os.scandir(folder) if entry.name != _LOCK)
    if others:
        raise SentencesError(f"{folder}: expected a new folder, or one made by speak-all; found {others[0]!r} in it")
    settings = {name: drawn[name] if value is None and name in drawn else value for name, value in wanted.items()}
    write_json(path, settings)
    sync(folder)
    return settings


def sync(folder: Path) -> None:
    """What was renamed in `folder` stays so after a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
