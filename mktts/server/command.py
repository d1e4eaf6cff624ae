"""`python -m mktts serve`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from functools import partial
from pathlib import Path

from mktts.arguments import add_options, given
from mktts.checkpoint.arguments import add_model_arguments
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import counted
from mktts.errors import BackendUnavailable, ServerError
from mktts.server.address import (
    add_address_arguments,
    checked_hosts,
    checked_origins,
    listen,
    read_keys,
    refuse_open_address,
    url_of,
)
from mktts.server.limits import Limits
from mktts.server.loading import open_service

EXAMPLES = """examples:
  python -m mktts serve
  python -m mktts serve --checkpoint path/to/base --voice anna=anna.safetensors --port 9000
  python -m mktts serve --checkpoint path/to/checkpoint --host 0.0.0.0 --api-key-file key.txt
  python -m mktts serve --checkpoint path/to/checkpoint --replicas 8

  curl -N localhost:8000/tts/stream -H 'Content-Type: application/json' -d '{"text": "Good morning."}' > morning.pcm

An address that other machines reach needs a key, from --api-key-file or the variable MKTTS_API_KEY; clients send it
as `Authorization: Bearer KEY`. SIGTERM and Ctrl-C let open streams finish for a while; twice ends at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_address_arguments(parser)
    several = parser.add_argument_group("several GPUs, by Ray Serve (pip install -e '.[ray]' in the checkout)")
    several.add_argument("--replicas", type=int, metavar="N", help="complete servers at one address, one a GPU")
    several.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a running Ray cluster (default: one is started here)"
    )
    voices = parser.add_argument_group("voices")
    voices.add_argument(
        "--voice", action="append", default=[], metavar="NAME=FILE", help="a saved voice, for a base checkpoint"
    )
    voices.add_argument(
        "--voice-alias",
        action="append",
        default=[],
        metavar="ALIAS=NAME",
        help="another name for a voice or a speaker; OpenAI's names (alloy, nova, ...) have theirs without it",
    )
    voices.add_argument(
        "--voice-folder", type=Path, metavar="FOLDER", help="keeps voices that callers upload (default: none are kept)"
    )
    parser.add_argument(
        "--engine",
        default="auto",
        choices=("auto", "single", "batch"),
        help="one stream a step, many together, or what suits how many are open (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-process",
        default="auto",
        choices=("auto", "same", "own"),
        help="where it runs: in the process of the sockets, or in its own (default: own for --engine batch on CUDA)",
    )
    parser.add_argument(
        "--codec-precision",
        default="full",
        choices=("full", "fast"),
        help="of many streams together on a CUDA device: fast computes the waveform in fp16 (default: %(default)s)",
    )
    add_options(parser.add_argument_group("limits"), Limits)


def main(arguments: argparse.Namespace) -> int:
    """Serves until a signal; 0 after SIGTERM, 1 where the engine's own process has died."""
    try:
        from mktts.server.graceful import SpeechServer
        from mktts.server.voices import VoiceFolder
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"serving needs the package {error.name}: pip install -r requirements.txt") from None
    keys = read_keys(arguments.api_key_file)
    refuse_open_address(arguments.host, keys)
    limits = Limits(**given(Limits, arguments))
    access = {
        "api_key": keys,
        "origins": checked_origins(arguments.allow_origin),
        "hosts": checked_hosts(arguments.allow_host),
    }
    if arguments.voice_folder is not None:
        VoiceFolder(arguments.voice_folder, limits.max_voices)  # before the model: a folder that cannot be used shows
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    bound = listen(arguments.host, arguments.port, limits)  # before the model: a taken port shows at once
    if arguments.replicas is not None:
        from mktts.server.replicas import serve_replicas

        with bound:
            url = url_of(bound)
        return serve_replicas(arguments, limits, access, url)
    if arguments.ray_address is not None:
        raise ServerError("--ray-address belongs to --replicas: give that too, or leave it out")
    with bound:
        synthesizer, service = open_service(arguments, limits)
        with synthesizer:
            server = SpeechServer(service, **access)
            synthesizer.engine.on_gone = partial(server.handle_exit, signal.SIGTERM, None)
            bound.listen()  # before the address is printed: connections wait from then on
            log = logging.getLogger(__name__)
            if service.model.random_weights:
                log.info(RANDOM_WEIGHTS)
            log.info(
                "%s with the %s backend on %s, for %s at once (%s), at %s",
                service.model.checkpoint, synthesizer.backend_name, synthesizer.device,
                counted(service.streams_max, "listener"), service.capacity.basis, url_of(bound),
            )  # fmt: skip
            server.run([bound])
    if server.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 1 if synthesizer.engine.gone else 0
