"""A server in process, and one on a socket, over synthesizers of tiny checkpoints that remember their streams."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from served import Served, Watched, served, until

from mktts.checkpoint import Checkpoint
from mktts.engine.options import Chunk
from mktts.engine.stream import Stream
from mktts.model.voice import Voice
from mktts.server.app import make_app
from mktts.server.service import SpeechService
from mktts.synth import Synthesizer


class Synth(Watched):
    """`streams` have the `settings` they were asked for. forgotten: voices that were to be let go. error_at: of the
    streams to come, a chunk, from 1, and what is raised in its place."""

    error_at: tuple[int, Exception] | None = None

    def __init__(self, synthesizer: Synthesizer) -> None:
        super().__init__(synthesizer)
        self.forgotten: list[Voice] = []
        self.forget = self.forgotten.append

    def _watch(self, make: Callable[..., Stream], settings: dict[str, Any]) -> Stream:
        stream = super()._watch(make, settings)
        take, error_at, taken = stream.take, self.error_at, count(1)

        async def failing(within_s: float | None = None) -> Chunk | None:
            chunk = await take(within_s)
            if error_at is not None and next(taken) == error_at[0]:
                raise error_at[1]
            return chunk

        stream.settings, stream.take = settings, failing
        return stream


class Api(TestClient):
    """A client of an application in this process, of the service's settings or its access's. synth: what speaks."""

    def __init__(self, synth: Synthesizer, **settings: Any) -> None:
        access = {name: settings.pop(name) for name in ("api_key", "origins", "hosts") if name in settings}
        self.synth = Synth(synth)
        self.service = SpeechService(self.synth, **settings)
        self.application = make_app(self.service, **access)
        super().__init__(self.application, base_url="http://localhost", raise_server_exceptions=False)

    def tts(self, **body: Any) -> Any:
        return self.post("/tts/stream", json={"text": "Hello.", "max_frames": 2, **body})

    def speech(self, **body: Any) -> Any:
        usual = {"input": "Hello.", "response_format": "pcm", "max_frames": 2}
        return self.post("/v1/audio/speech", json={**usual, **body})

    def open_socket(self, path: str = "/tts/ws", **settings: Any) -> Any:
        """A WebSocket: `with` connects it."""
        return self.websocket_connect(f"ws://localhost{path}", **settings)

    def said(self, seed: int, frames: int, **how: Any) -> np.ndarray:
        """What the synthesizer itself makes of "Hello.", float32."""
        speaker = self.service.checkpoint.config.default_speaker
        return self.synth.say("Hello.", speaker=speaker, seed=seed, max_frames=frames, **how)


@pytest.fixture(scope="session")
def make_api(tiny: Checkpoint) -> Iterator[Callable[..., Api]]:
    loaded: dict[str, Synthesizer] = {}

    def make(checkpoint: Checkpoint = tiny, **settings: Any) -> Api:
        name = repr(checkpoint)
        if name not in loaded:
            loaded[name] = Synthesizer.load(checkpoint, device="cpu", cpu_threads=1, engine="single")
        return Api(loaded[name], **settings)

    yield make
    for synth in loaded.values():
        synth.close()


@pytest.fixture(scope="module")
def shared_api(make_api: Callable[..., Api]) -> Api:
    return make_api()


@pytest.fixture
def api(shared_api: Api) -> Api:
    """One a module; what a test has set of its synthesizer is undone."""
    shared_api.synth.streams.clear()
    yield shared_api
    shared_api.synth.error_at = None
    assert shared_api.service.streams_open == 0


@pytest.fixture(scope="module")
def running(synth: Synthesizer) -> Iterator[Served]:
    with served(synth) as server:
        yield server


@pytest.fixture
def server(running: Served) -> Served:
    until(lambda: running.service.streams_open == 0, "the streams of the test before to end")
    running.watched.streams.clear()
    return running
