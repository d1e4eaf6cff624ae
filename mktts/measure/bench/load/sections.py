"""What `python -m mktts bench --load` can measure, each a command of a few minutes whose results are merged by name."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mktts.checkpoint import open_checkpoint
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.bench.load import frames, mixed, others, soak
from mktts.measure.bench.load.attendance import Attendance
from mktts.measure.bench.load.book import figure
from mktts.measure.bench.load.crowd import attend
from mktts.measure.bench.load.point import held_ticks, measured, named, percentile, ticked
from mktts.measure.bench.load.seat import Seat
from mktts.measure.bench.load.settings import Loaded, LoadSettings, load
from mktts.measure.bench.load.texts import Said, said
from mktts.measure.bench.load.visits import Visit, visits
from mktts.model.backend import device_named
from mktts.spec import SAMPLE_RATE_HZ

BURST, BURSTS, BURST_LISTENERS = 128, 5, 64
OVERLOAD = 2  # times the capacity
PEER_PROCESSES = (1, 2, 4)


class Subject:
    """What is measured. The synthesizer is loaded, and the texts are made, when they are first asked for."""

    def __init__(self, settings: LoadSettings) -> None:
        self.settings = settings
        self.checkpoint = open_checkpoint(settings.checkpoint, settings.revision)
        self._loaded: Loaded | None = None

    @property
    def loaded(self) -> Loaded:
        if self._loaded is None:
            self._loaded = load(self.settings, self.checkpoint)
        return self._loaded

    @cached_property
    def said(self) -> Said:
        return said(self.checkpoint, self.settings.context_rows, self.settings.context)

    @cached_property
    def engine(self) -> str:
        """The name of the engine that streams begin on here."""
        text, settings = self.said.of(0, 2)
        with self.loaded.synthesizer.stream(text, **settings) as stream:
            stream.read()
            return getattr(stream, "engine", None) or "single"

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.synthesizer.close()
            self._loaded = None

    def named(self, listeners: int) -> dict[str, Any]:
        return named(self.settings, self.loaded, self.said, listeners)

    def attended(self, plan: list[Visit]) -> Attendance:
        settings = self.settings
        begin_s, end_s = settings.warm_s, settings.warm_s + settings.seconds
        return attend(self.loaded.synthesizer, self.said, plan, begin_s, end_s, end_s + settings.tail_s)

    def met(self, listeners: int) -> tuple[dict[str, Any], Attendance, np.ndarray]:
        """The point of a load, what its listeners met one by one, and the ticks (n,) of the held time."""
        seen = self.attended(visits(self.settings, listeners))
        ticks = held_ticks(seen, self.loaded.synthesizer.ticks)
        return measured(seen, self.settings) | ticked(seen, ticks) | self.named(listeners), seen, ticks

    def held(self, listeners: int) -> dict[str, Any]:
        """The point of a load."""
        return self.met(listeners)[0]


@dataclass
class Result:
    """What a section, or one load of it, gives: points, figures by name, and whatever else it has to say. numbers: of
    the command that gives this one alone. failed: why the section is no success."""

    points: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, object] = field(default_factory=dict)
    failed: str | None = None


@dataclass(frozen=True)
class Numbers:
    """What a section is asked for besides the settings. listeners: offered loads. skip: of a point's conditions,
    whether it is there already. texts: of say_many. soak_s: how long the soak lasts."""

    listeners: tuple[int, ...] = ()
    skip: Callable[[dict[str, Any]], bool] = lambda point: False
    texts: int = 2_048
    soak_s: float = soak.SOAK_S


Section = Callable[[Subject, Numbers], Iterator[Result]]


def listeners(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """One point each load."""
    for count in numbers.listeners:
        if not numbers.skip(subject.named(count) | {"engine": subject.engine}):
            yield Result(points=[subject.held(count)], numbers={"listeners": count})


def burst(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """BURST arrivals at once beside a load, BURSTS times: the worst first PCM of each burst."""
    beside = numbers.listeners[0] if numbers.listeners else BURST_LISTENERS
    seen = subject.attended(visits(subject.settings, beside, burst=BURST, bursts=BURSTS))
    worst_s = burst_waits_s(seen)
    worst_ms = [1e3 * wait_s if math.isfinite(wait_s) else None for wait_s in worst_s]
    report = subject.named(beside) | measured(seen, subject.settings) | {"worst_ms": worst_ms}
    result = Result(reports={"burst": report}, numbers={"listeners": beside})
    if None in worst_ms or not worst_ms:
        result.failed = "arrivals of a burst were refused, or had no PCM when the run ended"
    else:
        spread = {f"p{percent}": percentile(worst_ms, percent) for percent in (95, 99)}
        facts = _facts(report, "underruns", "refused", "open_mean")
        result.figures = {"burst_128_worst_ms": figure(max(worst_ms), "ms", len(worst_ms), **spread, **facts)}
    yield result


def burst_waits_s(seen: Attendance) -> list[float]:
    """The longest time to first PCM of each burst, from the planned arrival; infinite where one got none."""
    worst: dict[float, float] = defaultdict(float)
    for visit, one in zip(seen.visits, seen.listeners, strict=False):
        if visit.burst:
            wait_s = math.inf if one.first_s is None else one.first_s - one.planned_s
            worst[visit.at_s] = max(worst[visit.at_s], wait_s)
    return [worst[at_s] for at_s in sorted(worst)]


def overload(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """OVERLOAD times a load that is carried: what is refused, and whether those that are accepted are served."""
    if not numbers.listeners:
        raise MetricsError("overload is twice a capacity: give that with --listeners")
    capacity = numbers.listeners[0]
    point = subject.held(OVERLOAD * capacity)
    facts = _facts(point, "refused", "arrivals", "unanswered", "errors", "open_mean", "ttfc_accepted_p99_ms")
    value = figure(
        point["underruns"], "count", point["arrivals"] - point["refused"], offered=point["listeners"], **facts
    )
    yield Result([], {"overload_underruns": value}, {"overload": point}, {"listeners": capacity})


def frame_times(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """Ticks by themselves, with all lanes filled: see mktts.measure.bench.load.frames."""
    for name, value in frames.measure(subject.settings, subject.checkpoint):
        yield Result(figures={name: value})


def say_many(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """Seconds of audio a second of a corpus: utterances of the mean length, from the call to the last PCM."""
    loaded, settings = subject.loaded, subject.settings
    if not hasattr(loaded.synthesizer, "say_many"):
        raise BackendUnavailable("this version's synthesizer has no say_many")
    length = sum(settings.frames) // 2
    texts = [subject.said.of(index, length)[0] for index in range(numbers.texts)]
    common = {name: value for name, value in subject.said.of(0, length)[1].items() if name != "seed"}
    list(loaded.synthesizer.say_many(texts[:8], **common))
    begun_s = time.perf_counter()
    pcm = list(loaded.synthesizer.say_many(texts, **common))
    took_s = time.perf_counter() - begun_s
    audio_s = sum(map(len, pcm)) / SAMPLE_RATE_HZ
    facts = {"codec": loaded.codec, "deterministic": loaded.deterministic, "context_rows": subject.said.rows}
    value = figure(audio_s / took_s, "s of audio / s", len(pcm), audio_s=audio_s, took_s=took_s, **facts)
    yield Result(figures={"say_many_rtfx": value}, numbers={"texts": numbers.texts})


def soaked(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """Minutes of everything at once: see mktts.measure.bench.load.soak."""
    count = numbers.listeners[0] if numbers.listeners else soak.LISTENERS
    settings = replace(subject.settings, seconds=numbers.soak_s)
    report = subject.named(count) | soak.run(settings, subject.loaded, subject.said, count)
    wrong = [name for name, passed in report["checks"].items() if not passed]
    yield Result([], {}, {"soak": report}, {"listeners": count}, ", ".join(wrong) or None)


def both_engines(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """What engine="auto" serves with both engines, and their memory: see mktts.measure.bench.load.mixed."""
    subject.close()  # what it has loaded takes memory
    count = numbers.listeners[0] if numbers.listeners else None
    figures, report = mixed.run(subject.settings, subject.checkpoint, subject.said, count)
    missing = [name for name in mixed.FIGURES if name not in figures]
    failed = f"no {', '.join(missing)}: nobody came to that engine, or somebody got no PCM" if missing else None
    yield Result([], figures, {"mixed": report}, {} if count is None else {"listeners": count}, failed)


def peers(subject: Subject, numbers: Numbers) -> Iterator[Result]:
    """Another implementation in as many processes as listeners, see mktts.measure.bench.load.others: faster-qwen3-tts,
    or on a CPU, where that cannot run, qwen-tts, which gives an utterance in one piece."""
    settings = subject.settings
    subject.close()  # what it has loaded takes memory
    device = device_named(settings.device)
    streams = device.type == "cuda"
    peer, package = ("faster", "faster-qwen3-tts") if streams else ("upstream", "qwen-tts")
    seat = Seat(settings.checkpoint, settings.revision, str(device), peer, settings.frames)
    loads = numbers.listeners or PEER_PROCESSES
    figures, report = others.run(seat.words, loads, settings.seconds, settings.seed)
    chunk_frames = seat.chunk_frames if streams else None
    report |= {"peer": package, "checkpoint": settings.checkpoint, "chunk_frames": chunk_frames}
    yield Result([], figures, {"peers": report}, {"listeners": ",".join(map(str, loads))})


SECTIONS: dict[str, Section] = {
    "listeners": listeners,
    "burst": burst,
    "overload": overload,
    "frames": frame_times,
    "say_many": say_many,
    "soak": soaked,
    "mixed": both_engines,
    "peers": peers,
}


def _facts(point: dict[str, Any], *names: str) -> dict[str, Any]:
    """What a figure says besides, of the run that it was read off."""
    always = ("codec", "deterministic", "engine", "context_rows", "duration_s", "held")
    return {name: point[name] for name in (*always, *names)}
