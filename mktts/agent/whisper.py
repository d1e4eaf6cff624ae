"""Ears for any words: Pipecat's Whisper service over one model a process. Needs the package faster-whisper."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from pipecat.services.whisper.stt import WhisperModel, WhisperSTTService
from pipecat.transcriptions.language import Language

from mktts.agent.settings import AgentSettings
from mktts.errors import AgentError
from mktts.spec import LANGUAGE_CODES

_LATEST_S = 1.0  # from the end of speech to a transcript: the silence Silero waits for, and a small model on a GPU
_FILES = ("config.json", "model.bin")  # of a CTranslate2 model's folder

_models: dict[Hashable, WhisperModel] = {}
_loading = threading.Lock()


def shared_model(settings: AgentSettings) -> WhisperModel:
    """The process's model for these settings, loaded at the first call: seconds, so not from an event loop.

    Raises AgentError where it cannot be: a folder that holds no model, a name that is none, a Hub out of reach.
    """
    key = (os.getpid(), settings.ears_model, settings.device)
    with _loading:
        if key not in _models:
            device, _, index = settings.device.partition(":")
            try:
                _models[key] = WhisperModel(_checked(settings.ears_model), device=device, device_index=int(index or 0))
            except AgentError:
                raise
            except Exception as error:  # of the Hub, of CTranslate2, of the file system
                words = " ".join(str(error).split())[:300]
                raise AgentError(
                    f"--ears-model {settings.ears_model}: it cannot be loaded ({type(error).__name__}: {words}); where "
                    "the Hub is out of reach, name a folder with a CTranslate2 model"
                ) from None
        return _models[key]


def make_whisper(settings: AgentSettings) -> WhisperSTTService:
    """The service. Raises as `shared_model`."""
    return _SharedWhisper(settings)


class _SharedWhisper(WhisperSTTService):
    """Pipecat's loads a model for every conversation."""

    def __init__(self, settings: AgentSettings) -> None:
        self._agent = settings
        # Without a language Whisper finds it out, of every stretch of speech.
        super().__init__(
            settings=WhisperSTTService.Settings(model=settings.ears_model, language=_language(settings.language)),
            ttfs_p99_latency=_LATEST_S,
        )

    def _load(self) -> None:
        self._model: Any = shared_model(self._agent)
        unsupported = self._unsupported_language()
        if unsupported:
            raise AgentError(unsupported)


def _checked(name: str) -> str:
    folder = Path(name).expanduser()
    if folder.is_dir():
        missing = [file for file in _FILES if not (folder / file).is_file()]
        if missing:
            raise AgentError(
                f"--ears-model {name}: expected a CTranslate2 model's folder, found no {' and no '.join(missing)} in it"
            )
        return str(folder)
    if folder.is_absolute() or name.startswith("."):
        raise AgentError(f"--ears-model {name}: there is no such folder")
    return name


def _language(name: str) -> Language | None:
    codes = [code for code, known in LANGUAGE_CODES.items() if known == name]
    return Language(codes[0]) if codes else None
