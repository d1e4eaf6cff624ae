"""A speech source under a test's control, and a pipeline around one service that follows a script."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from pipecat.frames import frames
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.tests.utils import QueuedFrameProcessor
from pipecat.workers.runner import WorkerRunner

from mktts.pipecat import Speech, SpeechFailedFrame, SpeechSource, Style
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

WAIT_S = 60.0
TOO_LATE_S = WAIT_S + 5  # an audio context that only its time-out closes fails the test
PIECE = (8000 * np.sin(np.arange(SAMPLES_PER_FRAME) * (np.pi / 60))).astype("<i2").tobytes()  # 200 Hz, whole periods


async def until(condition: Callable[[], object]) -> None:
    """Waits for it, WAIT_S at most."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


async def taken(speech: Speech) -> bytes:
    """All of it, as 16-bit PCM."""
    async with asyncio.timeout(WAIT_S):
        return b"".join([piece async for piece in speech])


class FakeSpeech:
    """Pieces of `PIECE`, as many as it is allowed; `error` comes after the last one."""

    finish_reason = None

    def __init__(self, pieces: int | None, error: Exception | None = None) -> None:
        self.texts: list[str] = []
        self.finished = asyncio.Event()
        self.cancelled = False
        self.left = asyncio.Queue()  # of bytes, an error, or None
        if pieces is not None:
            self.give(pieces, error)

    def give(self, pieces: int, end: Exception | None = None, open: bool = False) -> None:
        for _ in range(pieces):
            self.left.put_nowait(PIECE)
        if not open:
            self.left.put_nowait(end)

    def feed(self, text: str) -> None:
        self.texts.append(text)

    def finish(self) -> None:
        self.finished.set()

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        piece = await self.left.get()
        if self.cancelled or piece is None:
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            raise piece
        return piece


class FakeSource(SpeechSource):
    """`plan(text)` makes the speech of a text; a fed utterance is planned from ""."""

    name = "fake"
    sample_rate_hz = SAMPLE_RATE_HZ
    default_voice = "vivian"

    def __init__(self, plan: Callable[[str], FakeSpeech]) -> None:
        self.plan = plan
        self.asked: list[tuple[str, Style]] = []
        self.speeches: list[FakeSpeech] = []
        self.connected = 0

    async def connect(self) -> None:
        self.connected += 1

    async def disconnect(self) -> None:
        self.connected -= 1

    async def open(self, style: Style) -> FakeSpeech:
        return await self.speak("", style)

    async def speak(self, text: str, style: Style) -> FakeSpeech:
        self.asked.append((text, style))
        self.speeches.append(self.plan(text))
        return self.speeches[-1]


class Talk:
    """One service in a running pipeline. `down` and `up` are the frames that came out of it, in order."""

    def __init__(self, service: Any, rate_hz: int = SAMPLE_RATE_HZ, after: Sequence[FrameProcessor] = ()) -> None:
        down, up = asyncio.Queue(), asyncio.Queue()
        sink = QueuedFrameProcessor(queue=down, queue_direction=FrameDirection.DOWNSTREAM)
        origin = QueuedFrameProcessor(queue=up, queue_direction=FrameDirection.UPSTREAM)
        self._queues = (down, up)
        self.down: list[frames.Frame] = []
        self.up: list[frames.Frame] = []
        self.worker = PipelineWorker(
            Pipeline([origin, service, *after, sink]),
            cancel_on_idle_timeout=False,
            enable_rtvi=False,
            params=PipelineParams(audio_out_sample_rate=rate_hz, enable_metrics=True, enable_usage_metrics=True),
        )
        self._started = asyncio.Event()
        self.worker.add_event_handler("on_pipeline_started", lambda *_: self._started.set())

    async def __aenter__(self) -> Self:
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        self._run = asyncio.create_task(runner.run())
        await asyncio.wait_for(self._started.wait(), WAIT_S)
        return self

    async def __aexit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            await self.say(frames.EndFrame())
        else:
            await self.worker.cancel()
        await self.ended()

    async def say(self, *said: frames.Frame) -> None:
        for frame in said:
            await self.worker.queue_frame(frame)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Goes on once `condition` holds."""
        await until(lambda: self._collect() or condition())

    async def ended(self) -> None:
        """Waits until the pipeline has ended by itself."""
        done, _ = await asyncio.wait({self._run}, timeout=WAIT_S)  # not wait_for: a runner does not mind its cancel
        assert done, f"the pipeline has not ended within {WAIT_S} s"
        await self._run
        self._collect()

    def _collect(self) -> None:
        for queue, came in zip(self._queues, (self.down, self.up), strict=True):
            while not queue.empty():
                came.append(queue.get_nowait())

    def of(self, *kinds: type) -> list[Any]:
        return [frame for frame in self.down if isinstance(frame, kinds)]

    @property
    def failures(self) -> list[SpeechFailedFrame]:
        return [frame for frame in self.up if isinstance(frame, SpeechFailedFrame)]

    def heard(self) -> str:
        """What the conversation's context would hold: the words that came, in order."""
        return " ".join(frame.text for frame in self.of(frames.TTSTextFrame) if frame.append_to_context)

    def samples(self) -> int:
        return sum(frame.num_frames for frame in self.of(frames.TTSAudioRawFrame))


def turn(*tokens: str) -> list[frames.Frame]:
    return [frames.LLMFullResponseStartFrame(), *map(frames.LLMTextFrame, tokens), frames.LLMFullResponseEndFrame()]


def metrics(talk: Talk, kind: type) -> list:
    """Placeholders of zero, which Pipecat sends at the start, left out."""
    data = [data for frame in talk.of(frames.MetricsFrame) for data in frame.data if isinstance(data, kind)]
    return [each for each in data if getattr(each, "value", None) != 0.0]
