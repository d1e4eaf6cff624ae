"""`python -m mktts clients`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mktts.checkpoint import open_checkpoint
from mktts.common import require_writable, write_json
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.clients import documented, packages, sockets
from mktts.measure.clients.trial import Place, Trial, tried
from mktts.measure.environment import head
from mktts.spec import FRAME_RATE_HZ

EXAMPLES = """examples:
  python -m mktts clients
  python -m mktts clients --only openai
  python -m mktts clients --into outputs/reference/clients.json

Starts two servers of its own, of --checkpoint and of --base, whose utterances end after --frames, and tries on them
every client that is installed (openai, pipecat-ai, livekit-plugins-openai) and what other servers document. Exit status
1 where a trial fails."""
_START_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="small", help="with built-in speakers (default: %(default)s)")
    parser.add_argument("--base", default="random:tiny:base", help="that clones voices (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=16, help="of 80 ms, of each utterance (default: %(default)s)")
    parser.add_argument("--only", metavar="WORD", help="trials whose client or feature has this word")
    parser.add_argument("--into", type=Path, metavar="FILE", help="the results as JSON")


def main(arguments: argparse.Namespace) -> int:
    """0 where every trial was passed. Prints a table, and the document as one line."""
    if arguments.frames < 1:
        raise MetricsError(f"--frames must be at least 1, got {arguments.frames}")
    if arguments.into is not None:
        require_writable(arguments.into)
    chosen = [trial for trial in all_trials() if _is_meant(trial, arguments.only)]
    if not chosen:
        raise MetricsError(f"--only {arguments.only}: no trial has this word in its client or feature")
    for package in packages.missing():
        print(f"left out: {package} is not installed", file=sys.stderr)
    results = [*_results(chosen, arguments.checkpoint, arguments.frames, clones=False)]
    results += _results(chosen, arguments.base, arguments.frames, clones=True)
    document = {**head("cpu"), "checkpoint": arguments.checkpoint, "base": arguments.base, "results": results}
    if arguments.into is not None:
        write_json(arguments.into, document)
    print(json.dumps({"results": results}))
    return 0 if all(result["ok"] for result in results) else 1


def all_trials() -> Iterator[Trial]:
    """Of every client that is installed, and of every documented request."""
    yield from packages.trials()
    yield from documented.trials()
    yield from sockets.trials()


@contextlib.contextmanager
def place(checkpoint: str, frames: int) -> Iterator[Place]:
    """A server of ours in a thread, over a socket. Raises BackendUnavailable without the server's packages."""
    try:
        from mktts.server import Limits, listen, url_of
        from mktts.server.graceful import SpeechServer
        from mktts.server.service import SpeechService
        from mktts.server.uploads import VoiceFolder
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"a server needs the package {error.name}: pip install -r requirements.txt") from None
    from mktts.synth import Synthesizer

    limits = Limits(max_duration_s=frames / FRAME_RATE_HZ)
    opened = open_checkpoint(checkpoint)
    clones = opened.config.type.clones
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        synthesizer = stack.enter_context(Synthesizer.load(opened, device="cpu"))
        uploads = VoiceFolder(Path(folder), limits.max_voices) if clones else None
        service = SpeechService(synthesizer, limits, name=checkpoint, uploads=uploads)
        server = SpeechServer(service)
        bound = stack.enter_context(listen("127.0.0.1", 0, limits))
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        end_s = time.monotonic() + _START_S
        while not server.started:
            if time.monotonic() > end_s or not thread.is_alive():
                raise MetricsError("the server did not start: its log says why")
            time.sleep(0.02)
        yield Place(url_of(bound), frames / FRAME_RATE_HZ, clones, opened.config.default_speaker or "default")


def _results(trials: list[Trial], checkpoint: str, frames: int, *, clones: bool) -> Iterator[dict[str, Any]]:
    meant = [trial for trial in trials if trial.clones == clones]
    if not meant:
        return
    with place(checkpoint, frames) as here:
        for trial in meant:
            result = tried(trial, here)
            mark = "ok  " if result["ok"] else "FAIL"
            print(f"{mark} {trial.client} {trial.version}: {trial.feature}: {result['note']}", flush=True)
            yield result


def _is_meant(trial: Trial, word: str | None) -> bool:
    return word is None or word.lower() in f"{trial.client} {trial.feature}".lower()
