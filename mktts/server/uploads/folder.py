"""The folder where uploaded voices lie: `OWNER/NAME.safetensors`, a file of `Voice.save` each.

Several servers may share it: every use of a voice looks whether its file is still there and still the same, and
`sweep`, which a server calls every few seconds, does so for voices that nobody asks for. What is gone is forgotten by
whoever is told (`on_gone`): the caches of the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mktts.common import counted
from mktts.errors import BusyError, ServerError, VoiceError
from mktts.model.voice import Voice
from mktts.server.uploads.record import UploadRecord, name_of

_SUFFIX = ".safetensors"
_LOADED = 256  # voices in memory
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600

log = logging.getLogger(__name__)
Stamp = tuple[int, int, int]


class _Loaded(NamedTuple):
    stamp: Stamp
    voice: Voice
    record: UploadRecord


class VoiceFolder:
    """Any thread.

    max_voices: of one owner. on_gone: called with a voice that was deleted, replaced or has expired, if it was in use
    here; may be set later.
    """

    def __init__(self, folder: Path, max_voices: int) -> None:
        """Makes the folder, where there is none, for this user alone. Raises ServerError where it cannot be used."""
        self.folder = folder
        self.max_voices = max_voices
        self.on_gone: Callable[[Voice], None] = lambda voice: None
        self._lock = threading.Lock()
        self._loaded: OrderedDict[Path, _Loaded] = OrderedDict()
        try:
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            next(folder.iterdir(), None)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ServerError(f"--voice-folder {folder}: expected a folder to read and write: {reason}") from None

    def keep(self, owner: str, voice: Voice, record: UploadRecord) -> None:
        """Keeps a voice under its record's name, in place of the owner's former one of that name.

        Raises BusyError where the owner has as many as may be.
        """
        path = self._path(owner, record.name)
        with self._lock:
            others = [name for name, _ in self._files(owner) if name != record.name]
            if len(others) >= self.max_voices:
                raise BusyError(f"a key may keep {counted(self.max_voices, 'voice')}: delete one")
            path.parent.mkdir(mode=_FOLDER_MODE, exist_ok=True)
            voice.save(path, record.written(), _FILE_MODE)
        self._check(path)
        log.info("a voice was uploaded, kept until %s", time.strftime("%F %T", time.localtime(record.expires_at)))

    def find(self, owner: str, name: str) -> Voice | None:
        """The owner's voice of that name, in any case; None where there is none. The same object every time."""
        plain = name_of(name)
        loaded = None if plain is None else self._load(self._path(owner, plain))
        return None if loaded is None else loaded.voice

    def list(self, owner: str) -> list[UploadRecord]:
        """What the owner has uploaded, by name."""
        found = (self._record(path) for _, path in self._files(owner))
        return sorted((record for record in found if record is not None), key=lambda record: record.name)

    def delete(self, owner: str, name: str) -> bool:
        """Deletes the owner's voice of that name; False where there is none."""
        plain = name_of(name)
        path = None if plain is None else self._path(owner, plain)
        if path is None or self._record(path) is None:
            return False
        _remove(path)
        self._check(path)
        log.info("an uploaded voice was deleted")
        return True

    def sweep(self) -> None:
        """Deletes what has expired, and forgets what is gone."""
        with contextlib.suppress(OSError):
            for owner in [entry.name for entry in self.folder.iterdir() if entry.is_dir()]:
                for _, path in self._files(owner):
                    self._record(path)
        with self._lock:
            paths = list(self._loaded)
        for path in paths:
            self._check(path)

    def _path(self, owner: str, name: str) -> Path:
        return self.folder / owner / f"{name}{_SUFFIX}"

    def _files(self, owner: str) -> Iterator[tuple[str, Path]]:
        with contextlib.suppress(OSError):
            for path in (self.folder / owner).iterdir():
                name = path.name.removesuffix(_SUFFIX)
                if path.name.endswith(_SUFFIX) and name_of(name) == name:
                    yield name, path

    def _record(self, path: Path) -> UploadRecord | None:
        """What is noted in the file; None where it is gone, no upload, or has expired, and is deleted then."""
        with self._lock:
            loaded = self._loaded.get(path)
        try:
            known = loaded is not None and loaded.stamp == _stamp(path)
            record = loaded.record if known else UploadRecord.read(Voice.notes(path))
        except VoiceError:
            return None
        if record.expires_at > time.time():
            return record
        _remove(path)
        self._check(path)
        return None

    def _load(self, path: Path) -> _Loaded | None:
        stamp = self._check(path)
        record = None if stamp is None else self._record(path)
        if stamp is None or record is None:
            return None
        with self._lock:
            if path not in self._loaded:
                try:
                    self._loaded[path] = _Loaded(stamp, Voice.load(path), record)
                except VoiceError:  # deleted in between
                    return None
            self._loaded.move_to_end(path)
            found = self._loaded[path]
            dropped = [self._loaded.popitem(last=False)[1] for _ in range(len(self._loaded) - _LOADED)]
        for old in dropped:
            self.on_gone(old.voice)
        return found

    def _check(self, path: Path) -> Stamp | None:
        """The file's stamp, None where it is gone; a voice loaded of another stamp is forgotten."""
        stamp = _stamp(path)
        with self._lock:
            loaded = self._loaded.get(path)
            if loaded is None or loaded.stamp == stamp:
                return stamp
            del self._loaded[path]
        self.on_gone(loaded.voice)
        return stamp


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another server was quicker
        path.unlink()
