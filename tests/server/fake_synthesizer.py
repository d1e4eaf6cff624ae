"""A synthesizer that makes noise at once: what the server asks of it, and what it gives back, without a model."""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from mktts.checkpoint import Checkpoint
from mktts.engine.admission import AdmissionLimits, Capacity
from mktts.engine.options import Chunk, Timings, WordTime
from mktts.engine.runner import EngineStats, TickTimes
from mktts.errors import TextError
from mktts.model.sampling import Sampling
from mktts.spec import SAMPLES_PER_FRAME


class FakeStream:
    """Chunks of `seed`'s noise, made when they are taken. error_at: a chunk, from 1, and what is raised there. A word
    begins with each chunk, and is known with the next, or at the end."""

    finish_reason: str | None = None
    cancelled = False
    _fed = ""
    _made = _chunks = _pieces = 0

    def __init__(self, text: str | None, settings: dict[str, Any], synth: "FakeSynthesizer") -> None:
        self.text, self.settings = text, settings
        self._error_at, self._holds = synth.error_at, synth.holds
        self.seed = 7 if settings["seed"] is None else settings["seed"]
        self.frames = settings["max_frames"]
        self.words: list[WordTime] = []
        self._begun: list[WordTime] = []
        self._finished = text is not None
        self._changed = asyncio.Event()

    @property
    def idle(self) -> bool:
        """A session has a chunk to give for every piece of text, and the rest at its end."""
        return not self._finished and self._chunks >= self._pieces

    async def take(self, within_s: float | None = None) -> Chunk | None:
        await asyncio.sleep(0)
        async with asyncio.timeout(within_s):
            while not self.cancelled and (self.idle or (self._holds and self._made)):
                self._changed.clear()
                await self._changed.wait()
        if self.cancelled:
            return None
        if self._made == self.frames:
            self.finish_reason = "max_frames"
            self.words += self._begun
            return None
        self._chunks += 1
        if self._error_at is not None and self._chunks == self._error_at[0]:
            raise self._error_at[1]
        frames = min(4, self.frames - self._made)
        pcm = noise(self.seed, self.frames)[self._made * SAMPLES_PER_FRAME :][: frames * SAMPLES_PER_FRAME]
        start_s, self._made = self._made * 0.08, self._made + frames
        words: list[WordTime] = []
        if self.settings["options"].word_times:
            words, self._begun = self._begun, [WordTime(f"word {self._chunks}", start_s, start_s + 0.08)]
            self.words += words
        return Chunk(pcm, start_s, frames, Timings(10.0, 1.0, 1.0, 1.0, 1.0), words=tuple(words))

    @property
    def codes(self) -> range:
        """As many as frames."""
        return range(self._made)

    def feed(self, text: str) -> None:
        self._fed += text
        self._pieces += bool(text.strip())
        self._changed.set()

    def finish(self) -> None:
        if not self._fed.strip():
            raise TextError("expected text to speak before finish, got none")
        self._finished = True
        self._changed.set()

    def cancel(self) -> None:
        self.cancelled = True
        self._changed.set()


@lru_cache
def noise(seed: int, frames: int) -> np.ndarray:
    """The sound of a seed, float32; every length is a beginning of the longer ones."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, frames * SAMPLES_PER_FRAME).astype(np.float32)


def word_times(found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Of words as the server tells them, to the ms."""
    return [(word["word"], round(word["start_s"], 3), round(word["end_s"], 3)) for word in found]


def noise_words(frames: int, speed: float = 1.0) -> list[tuple[str, float, float]]:
    """The words of so many frames, in the time of what is played."""
    times_s = [(0.08 * first / speed, 0.08 * (first + 1) / speed) for first in range(0, frames, 4)]
    return [(f"word {n}", round(start_s, 3), round(end_s, 3)) for n, (start_s, end_s) in enumerate(times_s, 1)]


class FakeSynthesizer:
    """streams: what was opened. forgotten: voices that were let go. error_at: of the streams to come. holds: they give
    one chunk and no more until they are cancelled."""

    backend_name, device, dtype = "fake", "cpu", "torch.float32"
    capacity = Capacity(2, "measured")
    stats = {"fake": EngineStats(0, 0, lanes=4, lanes_used=1, pages=0, pages_free=0, ticks=TickTimes())}

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.sampling = Sampling()
        self.streams: list[FakeStream] = []
        self.forgotten: list[Any] = []
        self.error_at: tuple[int, Exception] | None = None
        self.holds = False
        self.engine = SimpleNamespace(gone=False)
        self.set_limits: Callable[[AdmissionLimits], None] = lambda limits: None
        self.forget = self.forgotten.append

    def stream(self, text: str | None, layout: str | None = None, **settings: Any) -> FakeStream:
        if text is not None and not text.strip("\u200b \n\t"):
            raise TextError("expected text to speak, got none")
        self.streams.append(FakeStream(text, {**settings, "layout": layout}, self))
        return self.streams[-1]

    def open(self, **settings: Any) -> FakeStream:
        return self.stream(None, **settings)
