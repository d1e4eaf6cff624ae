"""Where the time to the first byte goes, from what `bench` measures of the engine to what a pipeline's service reports.

The same synthesizer speaks under one more condition at a time (`CONDITIONS`); in the last two, the way of each sentence
through Pipecat's service is dated at its corners (`STAGES`). `table` shows both.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from mktts.model.prompt import Layout
from mktts.pipecat import LocalSource, Style
from mktts.pipecat.source import LocalSpeech
from mktts.speech.options import Chunk, StreamOptions
from mktts.speech.stream import Stream
from mktts.synth import Synthesizer

FRAMES = 25  # of an utterance, two seconds: only its beginning is measured
PAUSE_S = 0.05  # between utterances, so that none waits for the one before
SHORT = "The quick brown"  # what bench measures its first PCM of

CONDITIONS = {
    "words_ms": "three words, streaming layout, again and again (bench's first PCM)",
    "sentence_ms": "one sentence, the checkpoint's layout, again and again",
    "sentences_ms": "another sentence every time",
    "paused_ms": f"and {PAUSE_S * 1e3:.0f} ms of rest before each",
    "awaited_ms": "and taken in an event loop",
    "whole_ms": "and spoken by the service in a pipeline, as that reports it",
    "pipecat_ms": "and in the streaming layout, as the agent speaks",
}
STAGES = {
    "service_ms": "from the start of Pipecat's clock to the call of the source: Pipecat's bookkeeping, and ours",
    "worker_ms": "in the engine, beside what follows: text front end, handing over to the worker, prompt rows",
    "prefill_ms": "prompt (on a GPU: its launches; the rest of it shows in the frame)",
    "frame_ms": "the first frame's codes",
    "codec_ms": "the first frame's PCM",
    "waking_ms": "from the PCM to the event loop",
    "leaving_ms": "from there to the stop of the clock: PCM of 16 bits, resampling",
}


@dataclass
class Dates:
    """Of one utterance inside the service, perf_counter seconds; chunk: the first one."""

    clock_s: float
    asked_s: float = 0.0
    taken_s: float = 0.0
    stopped_s: float = 0.0
    chunk: Chunk | None = None

    def stages(self) -> dict[str, float]:
        """Milliseconds, as STAGES; they add up to the time to the first byte."""
        timings = self.chunk.timings
        frame_ms = timings.talker_ms + timings.predictor_ms
        return {
            "service_ms": 1e3 * (self.asked_s - self.clock_s),
            "worker_ms": timings.ready_ms - timings.compute_ms,
            "prefill_ms": timings.prefill_ms,
            "frame_ms": frame_ms,
            "codec_ms": timings.codec_ms,
            "waking_ms": 1e3 * (self.taken_s - self.asked_s) - timings.ready_ms,
            "leaving_ms": 1e3 * (self.stopped_s - self.taken_s),
        }


@dataclass
class Watchmaker:
    """Dates the utterances of one service, which speak one after another."""

    dates: list[Dates] = field(default_factory=list)

    def watch(self, service: Any) -> None:
        """Puts itself before the service's own clock."""
        start, stop = service.start_ttfb_metrics, service.stop_ttfb_metrics

        async def started(**given: Any) -> None:
            self.dates.append(Dates(time.perf_counter()))
            await start(**given)

        async def stopped(**given: Any) -> None:
            if self.dates and self.dates[-1].chunk is not None and not self.dates[-1].stopped_s:
                self.dates[-1].stopped_s = time.perf_counter()
            await stop(**given)

        service.start_ttfb_metrics, service.stop_ttfb_metrics = started, stopped

    def stages(self) -> list[dict[str, float]]:
        """Of each utterance that was heard."""
        return [dates.stages() for dates in self.dates if dates.stopped_s]


class DatedSource(LocalSource):
    """Tells a watchmaker when it was asked, and when the first chunk was taken."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        name: str | None,
        options: StreamOptions | None,
        layout: Layout | None,
        watchmaker: Watchmaker,
    ) -> None:
        super().__init__(synthesizer, name, options, layout)
        self._watchmaker = watchmaker

    async def speak(self, text: str, style: Style) -> LocalSpeech:
        dates = self._watchmaker.dates[-1]
        dates.asked_s = time.perf_counter()
        return LocalSpeech(_DatedStream(self._stream(text, style), dates))


class _DatedStream:
    """A `Stream`, as far as `LocalSpeech` knows it."""

    def __init__(self, stream: Stream, dates: Dates) -> None:
        self._stream, self._dates = stream, dates

    @property
    def finish_reason(self) -> Any:
        return self._stream.finish_reason

    def cancel(self) -> None:
        self._stream.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await anext(self._stream)
        if self._dates.chunk is None:
            self._dates.taken_s, self._dates.chunk = time.perf_counter(), chunk
        return chunk


def alone(synthesizer: Synthesizer, sentences: Sequence[str], options: StreamOptions) -> dict[str, list[float]]:
    """The engine's time to the first chunk under every condition without Pipecat, ms; the first of each warms up."""
    speaker = synthesizer.checkpoint.config.default_speaker

    def stream(text: str, seed: int, layout: str | None = None) -> Stream:
        given = {} if layout is None else {"layout": layout}
        return synthesizer.stream(text, speaker=speaker, seed=seed, max_frames=FRAMES, options=options, **given)

    def first_ms(text: str, seed: int, layout: str | None = None, pause_s: float = 0.0) -> float:
        time.sleep(pause_s)
        begun_s, found_ms = time.perf_counter(), None
        for _ in stream(text, seed, layout):
            found_ms = found_ms or 1e3 * (time.perf_counter() - begun_s)
        return found_ms

    async def awaited() -> list[float]:
        found_ms = []
        for seed, text in enumerate(sentences):
            await asyncio.sleep(PAUSE_S)
            begun_s, first = time.perf_counter(), None
            async for _ in stream(text, seed):
                first = first or 1e3 * (time.perf_counter() - begun_s)
            found_ms.append(first)
        return found_ms

    found = {
        "words_ms": [first_ms(SHORT, seed, "streaming") for seed in range(len(sentences))],
        "sentence_ms": [first_ms(sentences[0], seed) for seed in range(len(sentences))],
        "sentences_ms": [first_ms(text, seed) for seed, text in enumerate(sentences)],
        "paused_ms": [first_ms(text, seed, pause_s=PAUSE_S) for seed, text in enumerate(sentences)],
        "awaited_ms": asyncio.run(awaited()),
    }
    return {name: values[1:] for name, values in found.items()}


def table(figures: dict[str, Any], stages: dict[str, dict[str, float]]) -> str:
    """Medians in ms as text: the conditions, each with what it adds to the one before, and the stages of the last."""
    lines, before = ["time to the first byte, medians in ms"], None
    for name, words in CONDITIONS.items():
        median = figures[name]["median"]
        added = "" if before is None else f"{median - before:+.2f}"
        lines.append(f"{median:8.2f} {added:>7}  {words}")
        before = median
    lines.append(" ".join(f"{name:>8}" for name in stages) + "  by stage, of these conditions")
    for name, words in STAGES.items():
        lines.append(" ".join(f"{of[name]:8.2f}" for of in stages.values()) + f"  {words}")
    return "\n".join(lines)


def medians(stages: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every stage."""
    return {name: round(statistics.median(each[name] for each in stages), 3) for name in STAGES}
