"""`python -m mktts serve`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mktts.arguments import add_options, given, option
from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import counted
from mktts.errors import ServerError
from mktts.server.settings import Address, Limits, access_of, listen, url_of

if TYPE_CHECKING:
    from mktts.synth import Synthesizer

EXAMPLES = """examples:
  python -m mktts serve
  python -m mktts serve --checkpoint path/to/base --voice anna=anna.safetensors --port 9000
  python -m mktts serve --checkpoint path/to/checkpoint --host 0.0.0.0 --api-key-file key.txt

  curl -N localhost:8000/tts/stream -H 'Content-Type: application/json' -d '{"text": "Good morning."}' > morning.pcm

An address that other machines can reach needs a key, from --api-key-file or the variable MKTTS_API_KEY; clients send
it as `Authorization: Bearer KEY`. SIGTERM or Ctrl-C lets open streams finish for a while; a second one ends at once."""

log = logging.getLogger(__name__)


@dataclass
class _Voices:
    voice: tuple[str, ...] = option((), "a saved voice, for a base checkpoint", metavar="NAME=FILE")
    voice_alias: tuple[str, ...] = option((), "a further name, like OpenAI's (alloy, nova, ...)", metavar="ALIAS=NAME")
    voice_folder: Path | None = option(None, "stores voices that callers upload (default: none)", metavar="FOLDER")


@dataclass
class _Serving:
    """Options of this command only."""

    strict: bool = option(False, "refuse keys and instructions that have no effect (default: ignore them)")
    instruct_clones: bool = option(False, "experimental: cloned voices take instructions")
    engine: Literal["auto", "single", "batch"] = option("auto", "one stream per step, many per step, or by load")
    engine_process: Literal["auto", "same", "own"] = option(
        "auto", "the server's process or one of its own (default: own on CUDA, except with --engine single)"
    )
    codec_precision: Literal["full", "fast"] = option("fast", "of many streams on a CUDA device: fp32 or fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, lexicon=True)
    for heading, options in (("address", Address), ("voices", _Voices), ("limits", Limits)):
        add_options(parser.add_argument_group(heading), options)
    add_options(parser, _Serving)


def main(arguments: argparse.Namespace) -> int:
    """Serves until a signal. Returns 0 after SIGTERM, or 1 if the engine's process has died."""
    from mktts.model.voice import Voice
    from mktts.server.app import speech_server
    from mktts.server.service import SpeechService
    from mktts.server.voices import VoiceFolder

    # Check what can fail quickly (a folder, a file, a port in use) before the model is loaded.
    access, limits = access_of(arguments), Limits(**given(Limits, arguments))
    uploads = None if arguments.voice_folder is None else VoiceFolder(arguments.voice_folder, limits.max_voices)
    files = pairs_of(arguments.voice, "--voice", "NAME=FILE")
    voices = {name: Voice.load(Path(file)) for name, file in files.items()}
    aliases = pairs_of(arguments.voice_alias, "--voice-alias", "ALIAS=NAME")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    folder = Path(arguments.checkpoint)  # clients see only its name, not its path on this machine
    name = folder.resolve().name if folder.is_dir() else arguments.checkpoint
    with listen(arguments.host, arguments.port, limits) as bound, _loaded(arguments) as synthesizer:
        service = SpeechService(synthesizer, limits, voices, name, aliases, uploads, arguments.strict)
        synthesizer.warm_up()
        synthesizer.measure_capacity()
        server = speech_server(service, **access)
        synthesizer.engine.on_gone = partial(server.handle_exit, signal.SIGTERM, None)
        bound.listen()  # before the address is printed, so that connections are queued from then on
        if service.model.random_weights:
            log.info(RANDOM_WEIGHTS)
        log.info(
            "%s with the %s backend on %s, for %s at once (%s), at %s",
            service.model.checkpoint, synthesizer.backend_name, synthesizer.device,
            counted(service.streams_max, "listener"), synthesizer.capacity.basis, url_of(bound),
        )  # fmt: skip
        server.run([bound])
    if server.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 1 if synthesizer.engine.gone else 0


def _loaded(arguments: argparse.Namespace) -> Synthesizer:
    """Loads the model that the arguments name. Raises what loading raises."""
    from mktts.checkpoint import open_checkpoint
    from mktts.synth.synthesizer import BatchSettings, Synthesizer

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    if arguments.instruct_clones:
        if arguments.backend == "upstream":
            raise ServerError("--instruct-clones: qwen-tts takes no instructions for clones: name another --backend")
        checkpoint = checkpoint.with_instructions()
    batch = BatchSettings(codec=arguments.codec_precision)
    settings: dict[str, Any] = {**loading(arguments), "engine": arguments.engine, "batch": batch}
    if runs_apart(arguments.engine_process, arguments.engine, settings["device"]):
        return Synthesizer.load_apart(checkpoint, arguments.checkpoint, arguments.revision, settings)
    return Synthesizer.load(checkpoint, **settings)


def runs_apart(process: str, engine: str, device: str) -> bool:
    """Whether the engine runs in its own process, from the values of --engine-process, --engine and --device.

    "auto" does so if a GPU may serve many: one H200 serves 680 listeners from one process, 1,100 from two (LOG.md,
    2026-11-22 and 27). One listener then waits up to 0.7 ms longer. Raises BackendUnavailable for a missing device."""
    from mktts.model.backend import device_named

    if process == "auto":
        return engine != "single" and device_named(device).type == "cuda"
    return process == "own"


def pairs_of(words: list[str], option: str, shape: str) -> dict[str, str]:
    """Parses words like NAME=VALUE into a dict. Raises ServerError for a word of another shape."""
    found = {}
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        if not name or not value:
            raise ServerError(f"{option} must be {shape}, got {word!r}")
        found[name] = value
    return found
