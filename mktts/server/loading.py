"""The model and the voices of a server, from the arguments of `serve`: for one server alone and for every replica."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mktts.checkpoint.arguments import loading
from mktts.errors import ServerError
from mktts.model.backend import device_named
from mktts.server.limits import Limits

if TYPE_CHECKING:
    from mktts.server.service import SpeechService
    from mktts.synth import Synthesizer


def open_service(arguments: argparse.Namespace, limits: Limits) -> tuple[Synthesizer, SpeechService]:
    """The model that the arguments name, warm, and the service in which all connections share it. The caller closes the
    synthesizer. Raises what loading raises."""
    from mktts.checkpoint import open_checkpoint
    from mktts.model.voice import Voice
    from mktts.server.service import SpeechService
    from mktts.server.voices import VoiceFolder
    from mktts.synth.synthesizer import BatchSettings, Synthesizer

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    files = pairs_of(arguments.voice, "--voice", "NAME=FILE")
    voices = {name.lower(): Voice.load(Path(file)) for name, file in files.items()}
    aliases = pairs_of(arguments.voice_alias, "--voice-alias", "ALIAS=NAME")
    uploads = None if arguments.voice_folder is None else VoiceFolder(arguments.voice_folder, limits.max_voices)
    # Its public name: clients need not know where a folder lies on this machine.
    folder = Path(arguments.checkpoint)
    name = folder.resolve().name if folder.is_dir() else arguments.checkpoint
    batch = BatchSettings(codec=arguments.codec_precision)
    settings: dict[str, Any] = {**loading(arguments), "engine": arguments.engine, "batch": batch}
    if runs_apart(arguments.engine_process, arguments.engine, settings["device"]):
        synthesizer = Synthesizer.load_apart(checkpoint, arguments.checkpoint, arguments.revision, settings)
    else:
        synthesizer = Synthesizer.load(checkpoint, **settings)
    try:
        service = SpeechService(synthesizer, limits, voices, name, aliases, uploads)
        synthesizer.warm_up()
        synthesizer.measure_capacity()
    except BaseException:
        synthesizer.close()
        raise
    return synthesizer, service


def runs_apart(process: str, engine: str, device: str) -> bool:
    """Whether the engine gets a process of its own, of the words of --engine-process, --engine and --device.

    With "auto", where a GPU serves many: one H200 serves 680 listeners from one process and 1 100 from two (LOG.md,
    2026-11-22). One listener gets the first byte up to 0.7 ms later from two (CPU), so others stay as they are.
    Raises BackendUnavailable for no device.
    """
    if process == "auto":
        return engine == "batch" and device_named(device).type == "cuda"
    return process == "own"


def pairs_of(words: list[str], option: str, shape: str) -> dict[str, str]:
    """What stands behind the equals sign, by what stands before it. Raises ServerError."""
    found = {}
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        if not name or not value:
            raise ServerError(f"{option} must be {shape}, got {word!r}")
        found[name] = value
    return found
