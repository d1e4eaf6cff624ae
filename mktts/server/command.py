"""`python -m mktts serve`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from functools import partial
from pathlib import Path

from mktts.checkpoint.arguments import add_model_arguments
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import counted
from mktts.errors import BackendUnavailable
from mktts.server.access.address import add_address_arguments, listen, read_keys, refuse_open_address, url_of
from mktts.server.access.hosts import checked_hosts, checked_origins
from mktts.server.limits import Limits
from mktts.server.replicas.arguments import add_replica_arguments, scale_of
from mktts.server.replicas.opening import open_studio, reference_sources

_DEFAULTS = Limits()
_DAY_S = 24 * 3_600

EXAMPLES = """examples:
  python -m mktts serve
  python -m mktts serve --checkpoint path/to/base --voice anna=anna.safetensors --port 9000
  python -m mktts serve --checkpoint path/to/checkpoint --host 0.0.0.0 --api-key-file key.txt
  python -m mktts serve --checkpoint path/to/checkpoint --replicas auto

  curl -N localhost:8000/tts/stream -H 'Content-Type: application/json' -d '{"text": "Good morning."}' > morning.pcm

An address that other machines reach needs a key, from --api-key-file or the variable MKTTS_API_KEY; clients send it
as `Authorization: Bearer KEY`. SIGTERM and Ctrl-C let open streams finish for a while; twice ends at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_address_arguments(parser)
    add_replica_arguments(parser)
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
        "--reference-host",
        action="append",
        default=[],
        metavar="HOST",
        help="requests may name recordings to clone by addresses there (default: none; they bring them)",
    )
    voices.add_argument(
        "--reference-folder", type=Path, metavar="FOLDER", help="and by files in this folder of the server"
    )
    voices.add_argument(
        "--voice-folder", type=Path, metavar="FOLDER", help="keeps voices that callers upload (default: none are kept)"
    )
    voices.add_argument(
        "--voice-days", type=float, default=_DEFAULTS.voice_s / _DAY_S, metavar="N", help="and for how long"
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
        help="where it runs: beside the sockets, or in its own process (default: own for --engine batch on CUDA)",
    )
    parser.add_argument(
        "--codec-precision",
        default="full",
        choices=("full", "fast"),
        help="of many streams together on a CUDA device: fast computes the waveform in fp16 (default: %(default)s)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-streams", type=int, metavar="N", help="listened to at once (default: as many as the machine carries)"
    )
    limits.add_argument(
        "--max-waiting",
        type=int,
        default=_DEFAULTS.max_waiting,
        metavar="N",
        help="streams that wait for a place (default: %(default)s)",
    )
    limits.add_argument(
        "--wait",
        type=float,
        default=_DEFAULTS.wait_s,
        metavar="S",
        help="and for how long; then they are refused with 429 (default: %(default)s)",
    )
    limits.add_argument("--max-chars", type=int, default=_DEFAULTS.max_chars, help="of one text (default: %(default)s)")
    limits.add_argument(
        "--max-duration", type=float, default=_DEFAULTS.max_duration_s, metavar="S", help="of one stream's audio"
    )
    limits.add_argument(
        "--head", type=float, default=_DEFAULTS.head_s, metavar="S", help="for a request's head (default: %(default)s)"
    )
    limits.add_argument(
        "--body",
        type=float,
        default=_DEFAULTS.body_s,
        metavar="S",
        help="for its body, and more for a long one (default: %(default)s)",
    )
    limits.add_argument(
        "--stall",
        type=float,
        default=_DEFAULTS.stall_s,
        metavar="S",
        help="until who reads nothing is dropped",
    )
    limits.add_argument(
        "--idle", type=float, default=_DEFAULTS.idle_s, metavar="S", help="until an utterance without text is ended"
    )
    limits.add_argument(
        "--grace", type=float, default=_DEFAULTS.grace_s, metavar="S", help="for open streams after the signal to stop"
    )


def main(arguments: argparse.Namespace) -> int:
    """Serves until a signal; 0 after SIGTERM, 1 where the engine's own process has died."""
    try:
        from mktts.server.process import Server
        from mktts.server.uploads.folder import VoiceFolder
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"serving needs the package {error.name}: pip install -r requirements.txt") from None
    scale = scale_of(arguments)
    keys = read_keys(arguments.api_key_file)
    refuse_open_address(arguments.host, keys)
    origins, hosts = checked_origins(arguments.allow_origin), checked_hosts(arguments.allow_host)
    limits = Limits(
        max_streams=arguments.max_streams,
        max_waiting=arguments.max_waiting,
        wait_s=arguments.wait,
        head_s=arguments.head,
        body_s=arguments.body,
        max_chars=arguments.max_chars,
        max_duration_s=arguments.max_duration,
        grace_s=arguments.grace,
        stall_s=arguments.stall,
        idle_s=arguments.idle,
        voice_s=arguments.voice_days * _DAY_S,
    )
    sources = reference_sources(arguments.reference_host, arguments.reference_folder)
    if arguments.voice_folder is not None:
        VoiceFolder(arguments.voice_folder, limits.max_voices)  # before the model: a folder that cannot be used shows
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if scale is not None:
        from mktts.server.replicas.cluster import serve_replicas
        from mktts.server.replicas.replica import Plan

        return serve_replicas(Plan(arguments, limits, keys, origins, hosts), scale)
    bound = listen(arguments.host, arguments.port, limits)  # before the model: a taken port shows at once
    with bound:
        from mktts.speech.serving import many_streams

        synthesizer, studio = open_studio(arguments, limits)
        with synthesizer:
            server = Server(studio, keys, origins, sources, hosts)
            synthesizer.on_gone = partial(server.handle_exit, signal.SIGTERM, None)
            bound.listen()  # before the address is printed: who connects now is answered as soon as the server runs
            log = logging.getLogger(__name__)
            if studio.model.random_weights:
                log.info(RANDOM_WEIGHTS)
            log.info(
                "%s with the %s backend on %s, for about %s at once, at %s",
                studio.model.checkpoint, synthesizer.backend_name, synthesizer.device,
                counted(studio.carries, "listener"), url_of(bound),
            )  # fmt: skip
            with many_streams() if synthesizer.serves_many else contextlib.nullcontext():
                server.run([bound])
    if server.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 1 if synthesizer.gone else 0
