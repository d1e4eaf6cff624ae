"""Aliases of voices, and the folder of voices that callers upload."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mktts.common import counted
from mktts.errors import ServerError, VoiceError
from mktts.model.voice import Voice
from mktts.server.access import ApiError
from mktts.server.schemas import DEFAULT, UploadedVoice

# OpenAI's voices. Clients and user interfaces made for OpenAI's API send no other names.
_OPENAI = {
    "female": ("alloy", "coral", "fable", "marin", "nova", "sage", "shimmer"),
    "male": ("ash", "ballad", "cedar", "echo", "onyx", "verse"),
}
OPENAI_VOICES = (*_OPENAI["female"], *_OPENAI["male"])
# From the model card of Qwen3-TTS-12Hz-CustomVoice; heart and michael are voices of the bundled small checkpoint.
_SPEAKERS = {
    "female": ("vivian", "serena", "ono_anna", "sohee", "heart"),
    "male": ("uncle_fu", "dylan", "eric", "ryan", "aiden", "michael"),
}
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_SUFFIX = ".safetensors"
_LOADED = 256  # maximum number of voices in memory
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600

log = logging.getLogger(__name__)


def voice_aliases(
    names: Iterable[str], dialects: Iterable[str] = (), given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Maps each alias to one of `names`: all of OpenAI's voices, and `given`, which takes precedence.

    OpenAI's voices are assigned round-robin to speakers of the same sex, or to all speakers if no sex is known; to
    those in `dialects`, who speak a dialect, only if there are no others; to DEFAULT if there are no names. Raises
    ServerError for an alias of an unknown voice, or one that is itself the name of a voice."""
    names = [name.lower() for name in names]
    plain = [name for name in names if name not in set(dialects)] or names or [DEFAULT]
    aliases = {}
    for sex, voices in _OPENAI.items():
        turns = cycle([name for name in plain if name in _SPEAKERS[sex]] or plain)
        aliases |= {alias: next(turns) for alias in voices if alias not in names}
    for alias, name in (given or {}).items():
        if name.lower() not in (*names, DEFAULT):
            known = ", ".join([*names, DEFAULT])
            raise ServerError(f"--voice-alias {alias}={name}: expected one of {known}, got {name!r}")
        if alias.lower() in names:
            raise ServerError(f"--voice-alias {alias}={name}: there is a voice {alias!r}; choose another alias")
        aliases[alias.lower()] = name.lower()
    return aliases


class VoiceFolder:
    """Stores the voices that callers upload as OWNER/NAME.safetensors, files of `Voice.save`. Methods may be called
    from any thread. Several servers may share the folder: each use of a voice checks that its file still exists
    unchanged, and `sweep` checks voices that are not in use.

    max_voices: limit per owner. on_gone: called, with the lock held at times, with a loaded voice that was deleted,
    replaced, evicted or has expired; it must not block."""

    def __init__(self, folder: Path, max_voices: int) -> None:
        """Creates the folder, accessible to this user only, if it is missing. Raises ServerError if it is unusable."""
        self.folder, self.max_voices = folder, max_voices
        self.on_gone: Callable[[Voice], None] = lambda voice: None
        self._lock = threading.Lock()
        self._loaded: OrderedDict[Path, tuple[Any, Voice]] = OrderedDict()  # with the file's stamp when it was loaded
        try:
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            next(folder.iterdir(), None)
        except OSError as error:
            what = f"--voice-folder {folder}: expected a folder to read and write"
            raise ServerError(f"{what}: {error.strerror or error}") from None

    def keep(self, owner: str, voice: Voice, record: UploadedVoice) -> None:
        """Stores a voice, replacing the owner's previous one of that name. Raises ApiError if that is impossible."""
        path = self._path(owner, record.name)
        with self._lock:
            if sum(other != path for other in self._paths(owner)) >= self.max_voices:
                message = f"a key may have at most {counted(self.max_voices, 'voice')}: delete one"
                raise ApiError(400, "too_many_voices", message)
            try:
                path.parent.mkdir(mode=_FOLDER_MODE, exist_ok=True)
                voice.save(path, record.model_dump_json(), _FILE_MODE)
            except OSError as error:  # only its strerror is shown: the full text contains the voice's path
                message = f"the voice could not be kept, its folder cannot be written to: {error.strerror}"
                log.error(message)
                raise ApiError(500, "voice_not_kept", message) from None
        self._record(path)
        log.info("a voice was uploaded, kept until %s", time.strftime("%F %T", time.localtime(record.expires_at)))

    def find(self, owner: str, name: str) -> Voice | None:
        """The owner's voice of that name, ignoring case, or None. Returns the same object while it stays loaded."""
        if not _NAME.fullmatch(name.lower()) or self._record(path := self._path(owner, name)) is None:
            return None
        with self._lock:
            if path not in self._loaded:
                try:
                    self._loaded[path] = _stamp(path), Voice.load(path)
                except (OSError, VoiceError):  # deleted meanwhile
                    return None
            self._loaded.move_to_end(path)
            while len(self._loaded) > _LOADED:
                self.on_gone(self._loaded.popitem(last=False)[1][1])
            return self._loaded[path][1]

    def list(self, owner: str) -> list[UploadedVoice]:
        """The records of the owner's uploads, sorted by name."""
        return [record for path in self._paths(owner) if (record := self._record(path)) is not None]

    def delete(self, owner: str, name: str) -> bool:
        """Deletes the owner's voice of that name. Returns False if there is none."""
        if not _NAME.fullmatch(name.lower()) or self._record(path := self._path(owner, name)) is None:
            return False
        path.unlink(missing_ok=True)
        self._record(path)
        log.info("an uploaded voice was deleted")
        return True

    def sweep(self) -> None:
        """Deletes expired voices, and unloads those whose file is gone or was replaced."""
        for path in {*list(self._loaded), *self._paths("*")}:
            self._record(path)

    def _path(self, owner: str, name: str) -> Path:
        return self.folder / owner / f"{name.lower()}{_SUFFIX}"

    def _paths(self, owner: str) -> list[Path]:
        found = self.folder.glob(f"{owner}/*{_SUFFIX}")
        return sorted(path for path in found if _NAME.fullmatch(path.name.removesuffix(_SUFFIX)))

    def _record(self, path: Path) -> UploadedVoice | None:
        """Reads the upload's record from its file; None if the file is gone, is not an upload, or has expired, in which
        case it is deleted. A voice that was loaded before the file changed is unloaded."""
        stamp = _stamp(path)
        with self._lock:
            old_stamp, voice = self._loaded.get(path, (stamp, None))
            if old_stamp != stamp:
                del self._loaded[path]
                self.on_gone(voice)
        try:
            record = None if stamp is None else UploadedVoice.model_validate_json(Voice.notes(path))
        except (VoiceError, ValidationError):
            return None
        if record is None or record.expires_at > time.time():
            return record
        path.unlink(missing_ok=True)
        return self._record(path)


def _stamp(path: Path) -> Any:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
