"""Servers on a real socket, in a thread of the test; one over a synthesizer that remembers its streams."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import uvicorn

from mktts.audio import to_pcm16
from mktts.checkpoint import Checkpoint
from mktts.engine.options import Guard, StreamOptions
from mktts.engine.stream import Stream
from mktts.model.voice import Voice
from mktts.server.app import speech_server
from mktts.server.service import SpeechService
from mktts.server.settings import Limits, listen, url_of
from mktts.server.voices import VoiceFolder
from mktts.synth import Synthesizer

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3
WAIT_S = 60.0


class Watched:
    """A synthesizer; `streams` holds what it opened, `made_at_cancel` how many frames each had when it was ended.
    guard: of every stream, whatever is asked for."""

    def __init__(self, synthesizer: Synthesizer, guard: Guard | None = None) -> None:
        self._guard = guard
        self.streams: list[Stream] = []
        self.made_at_cancel: dict[int, int] = {}
        self._synthesizer = synthesizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._synthesizer, name)

    def stream(self, text: str, **settings: Any) -> Stream:
        return self._watch(self._synthesizer.stream, {"text": text, **settings})

    def open(self, **settings: Any) -> Stream:
        return self._watch(self._synthesizer.open, settings)

    def _watch(self, make: Callable[..., Stream], settings: dict[str, Any]) -> Stream:
        if self._guard is not None:
            settings["options"] = replace(settings["options"] or StreamOptions(), guard=self._guard)
        stream = make(**settings)
        cancel = stream.cancel

        def noted() -> None:
            cancel()
            self.made_at_cancel.setdefault(id(stream), len(stream.codes))

        stream.cancel = noted
        self.streams.append(stream)
        return stream

    def frames_at_pause(self, stream: Stream) -> int:
        """How many frames a stream has made once its reader takes none: it rests, also a while later, with as many."""
        made = -1
        while made != len(stream.codes):
            until(lambda: stream.idle, "the stream's buffers to be full")
            made = len(stream.codes)
            time.sleep(0.3)
        return made

    def wasted_frames(self, stream: Stream) -> int:
        """Frames made after the end was asked for; the worker has had turns for more since then."""
        self._synthesizer.say("Hm.", speaker=self._synthesizer.checkpoint.config.default_speaker, max_frames=3)
        return len(stream.codes) - self.made_at_cancel[id(stream)]


@contextlib.contextmanager
def running(server: uvicorn.Server, bound: socket.socket) -> Iterator[str]:
    """Serves on `bound`; yields the base URL. Leaving the block stops the server as a signal would."""
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the server to start")
    assert server.started, "the server did not start: its log says why"
    try:
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def running_agent(settings: Any, **access: Any) -> Iterator[str]:
    """The agent's page and its sockets, for `AgentSettings`; yields the base URL."""
    from mktts.agent.web import create_server

    with listen("127.0.0.1", 0, Limits()) as bound, running(create_server(settings, **access), bound) as url:
        yield url


@dataclass
class Served:
    url: str
    service: SpeechService
    watched: Watched

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1) + "/tts/ws"


@contextlib.contextmanager
def served(
    synthesizer: Synthesizer, limits: Limits | None = None, guard: Guard | None = None,
    uploads: VoiceFolder | None = None, **access: Any,
) -> Iterator[Served]:  # fmt: skip
    watched = Watched(synthesizer, guard)
    service = SpeechService(watched, limits or Limits(wait_s=WAIT_S), uploads=uploads)
    with listen("127.0.0.1", 0, service.limits) as bound, running(speech_server(service, **access), bound) as url:
        yield Served(url, service, watched)


def plain_voice(checkpoint: Checkpoint) -> Voice:
    """A saved voice without a transcript."""
    return Voice(torch.zeros(checkpoint.config.talker.hidden_size), None, None, checkpoint.config.model_size)


def fed(synth: Synthesizer, *pieces: str, **settings: Any) -> bytes:
    """What the synthesizer itself says, as 16-bit PCM, of a text that comes in pieces."""
    with synth.open(**settings) as session:
        for piece in pieces:
            session.feed(piece)
        session.finish()
        return to_pcm16(session.read())


def until(condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    """Waits for another thread."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for: {what}"
        time.sleep(0.01)
