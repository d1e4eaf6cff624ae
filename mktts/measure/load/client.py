"""Runs the listeners of a load on one event loop, and computes figures of what they received.

Each listener is a task and costs about 12 us per chunk, so that hundreds take a fraction of one core. The result
includes the lateness of the loop itself, which tells delays of the client from delays of the server."""

import asyncio
import gc
import math
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from mktts.audio import first_audible_sample, from_pcm16
from mktts.engine.engine import ManyStreams
from mktts.engine.metrics import Player
from mktts.errors import BusyError, CapacityError, EngineError, MetricsError
from mktts.measure.load.settings import HELD_S, LoadSettings, LoadTexts
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

PATH = "/v1/audio/speech"
_CONNECT_S = 10.0
_REFUSALS = (429, 503)
_QUOTED_CHARS = 200
_RATE = re.compile(r"rate=(\d+)")
_BEAT_S = 0.01  # interval at which the loop's lateness is measured
_GOODBYE_S = 30.0  # time for cancelled streams to end; after it they count as hung


@dataclass(slots=True)
class Listener:
    """What one listener received and when, in seconds on one clock; infinity marks what did not happen.

    planned_s: planned arrival; opened_s: `stream` was called; byte_s: the response began; first_s: the first PCM
        arrived; audible_s: the first audible 10 ms are played; ended_s: the stream ended, for any reason
    gaps: (time at which the player ran dry, seconds it waited)
    refused: by CapacityError before any PCM; error: any other exception of the stream
    tail: samples after the last whole window that was searched for sound, kept until more arrive"""

    planned_s: float
    opened_s: float = math.inf
    byte_s: float = math.inf
    first_s: float = math.inf
    audible_s: float = math.inf
    ended_s: float = math.inf
    frames: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    refused: bool = False
    error: str | None = None
    engine: str | None = None
    player: Player = field(default_factory=Player)
    tail: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    def receive(self, now_s: float, pcm: np.ndarray, frames: int) -> None:
        """Records a chunk that arrived at `now_s`: `pcm` (S,) float32, perhaps empty, of `frames` frames."""
        self.frames += frames
        self.byte_s = min(self.byte_s, now_s)
        if not len(pcm):
            return
        self.first_s = min(self.first_s, now_s)
        starts_s, late_s = self.player.play(now_s, len(pcm) / SAMPLE_RATE_HZ)
        if late_s > 0:
            self.gaps.append((now_s - late_s, late_s))
        if self.audible_s == math.inf:
            whole = np.concatenate((self.tail, pcm))
            if (sample := first_audible_sample(whole)) is not None:
                self.audible_s = starts_s + (sample - len(self.tail)) / SAMPLE_RATE_HZ
            self.tail = whole[len(whole) // AUDIBLE_WINDOW_SAMPLES * AUDIBLE_WINDOW_SAMPLES :]

    def gaps_within(self, begin_s: float, end_s: float, closed_s: float) -> list[tuple[float, float]]:
        """Gaps that began in [begin_s, end_s), including that of a player still waiting when the run was closed."""
        gaps, dry_s = list(self.gaps), self.player.dry_s
        if dry_s is not None and self.ended_s == math.inf and dry_s < closed_s:
            gaps.append((dry_s, closed_s - dry_s))
        return [gap for gap in gaps if begin_s <= gap[0] < end_s]


class Moment(NamedTuple):
    """Totals at a time. process_s, loop_s: CPU time of the process, and of its thread that runs the listeners."""

    at_s: float
    frames: int
    process_s: float
    loop_s: float


@dataclass
class LoadRun:
    """The raw results of a load; times are of time.perf_counter.

    begin, end: of the measured time; None if the run did not get there
    closed_s: when all open streams were cancelled
    loop_late_s: lateness of the loop at each _BEAT_S of the measured time
    hung: streams that did not end after they were cancelled"""

    listeners: list[Listener] = field(default_factory=list)
    begin: Moment | None = None
    end: Moment | None = None
    closed_s: float = 0.0
    loop_late_s: list[float] = field(default_factory=list)
    hung: int = 0


def hold(
    source: Any, texts: LoadTexts, settings: LoadSettings, listeners: int, stopped: threading.Event | None = None
) -> LoadRun:
    """Offers a load for its duration, on an event loop in the calling thread. Ctrl-C ends the streams and is raised.
    Raises MetricsError if another thread sets `stopped`. source: a Synthesizer, an HttpSource, or any object whose
    `stream(text, **settings)` returns an asynchronous iterator of chunks."""
    seen, many = LoadRun(), ManyStreams()
    gc.collect()
    many.count(listeners)
    try:
        asyncio.run(_held(source, texts, settings, listeners, stopped or threading.Event(), seen))
    finally:
        many.count(0)
    return seen


async def _held(
    source: Any, texts: LoadTexts, settings: LoadSettings, listeners: int, stopped: threading.Event, seen: LoadRun
) -> None:
    arrivals, begun_s = settings.arrivals(listeners), time.perf_counter()
    streams: dict[asyncio.Task[None], Any] = {}  # open streams by their listener's task

    async def listen(index: int, frames: int, one: Listener) -> None:
        text, of_stream = texts.of(index, frames)
        one.opened_s = time.perf_counter()
        try:
            stream = source.stream(text, **of_stream)
            streams[asyncio.current_task()] = stream
            one.engine = getattr(stream, "engine", "server")
            async for chunk in stream:
                one.receive(time.perf_counter(), chunk.pcm, chunk.frames)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            one.refused = isinstance(error, CapacityError) and one.first_s == math.inf
            one.error = None if one.refused else f"{type(error).__name__}: {error}"
        if not seen.closed_s:
            one.ended_s = time.perf_counter()

    async def arrive() -> None:
        for index, (at_s, frames) in enumerate(arrivals):
            # Also yields to the other listeners between arrivals that are due at once.
            await asyncio.sleep(max(0.0, begun_s + at_s - time.perf_counter()))
            seen.listeners.append(Listener(begun_s + at_s))
            task = asyncio.create_task(listen(index, frames, seen.listeners[-1]))
            streams[task] = None
            task.add_done_callback(streams.pop)

    def moment(at_s: float) -> Moment:
        return Moment(at_s, sum(one.frames for one in seen.listeners), time.process_time(), time.thread_time())

    arriving = asyncio.create_task(arrive())
    try:
        while seen.end is None or time.perf_counter() < seen.end.at_s + settings.tail_s:
            wanted_s = time.perf_counter() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            if stopped.is_set():
                raise MetricsError("the load was stopped")
            now_s = time.perf_counter()
            seen.loop_late_s.append(now_s - wanted_s)
            if seen.begin is None and now_s >= begun_s + settings.warm_s:
                seen.begin = moment(now_s)
                seen.loop_late_s.clear()
            elif seen.begin and seen.end is None and now_s >= seen.begin.at_s + settings.seconds:
                seen.end = moment(now_s)  # the full duration, even if it began late
    finally:
        arriving.cancel()
        seen.closed_s = time.perf_counter()
        for task, stream in streams.items():
            getattr(stream, "cancel", task.cancel)()
        if streams:
            _, pending = await asyncio.wait(list(streams), timeout=_GOODBYE_S)
            seen.hung = len(pending)


# ---- figures


def measured(seen: LoadRun, settings: LoadSettings) -> dict[str, Any]:
    """Computes the figures of a run. A percentile that falls on an arrival without PCM is None.

    held: whether the run was complete and long enough to be recorded. arrivals, in_time, refused, unanswered (neither
    PCM nor refusal by the end of the run), stalled (the player ran dry): numbers of listeners in the measured time.
    open_mean, playing_mean: mean number of streams between call and end, and of listeners between first PCM and the end
    of playback. ttfb: time to the first byte of a response. underruns: how often players ran dry; late_max_ms: longest
    wait of one. audio_s_per_s: received audio. generator: lateness and CPU time of the client. host_us_per_frame: CPU
    time of the rest of the process. Raises MetricsError if the run ended before the measured time did."""
    if seen.begin is None or seen.end is None:
        raise MetricsError("the run ended before the load had been held: nothing was measured")
    begin_s, end_s = seen.begin.at_s, seen.end.at_s
    duration_s, frames, process_s, loop_s = (b - a for a, b in zip(seen.begin, seen.end, strict=True))
    came = [one for one in seen.listeners if begin_s <= one.planned_s < end_s]
    gaps = {id(one): one.gaps_within(begin_s, end_s, seen.closed_s) for one in seen.listeners}
    errors = Counter(one.error for one in seen.listeners if one.error)
    late_s = [late for dry in gaps.values() for _, late in dry]
    loop_late_ms = 1e3 * max(seen.loop_late_s, default=0.0)
    heard = [one for one in came if one.first_s < math.inf]
    open_s = [(one.opened_s, one.ended_s) for one in seen.listeners if not one.refused]
    playing_s = [(one.first_s, one.player.dry_s) for one in seen.listeners if one.first_s < math.inf]
    return {
        "held": duration_s >= max(settings.seconds, HELD_S) and not seen.hung,
        "duration_s": duration_s,
        "arrivals": len(came),
        "in_time": sum(not one.error and not gaps[id(one)] for one in heard),
        "stalled": sum(bool(gaps[id(one)]) for one in heard),
        "refused": sum(one.refused for one in came),
        "unanswered": sum(one.first_s == math.inf and not one.refused and not one.error for one in came),
        "errors": sum(errors.values()),
        "error_kinds": dict(errors.most_common(5)),
        "engine": "+".join(sorted({one.engine for one in seen.listeners if one.engine})),
        "open_mean": _mean(open_s, begin_s, end_s),
        "playing_mean": _mean(playing_s, begin_s, end_s),
        **_spread("ttfb", [one.byte_s - one.planned_s for one in came]),
        **_spread("ttfc", [one.first_s - one.planned_s for one in came]),
        **_spread("audible", [one.audible_s - one.planned_s for one in came if one.audible_s < math.inf]),
        "underruns": len(late_s),
        "late_max_ms": 1e3 * max(late_s, default=0.0),
        "frames": frames,
        "audio_s_per_s": frames / FRAME_RATE_HZ / duration_s,
        "host_us_per_frame": 1e6 * (process_s - loop_s) / frames if frames else None,
        "generator": {"loop_late_max_ms": loop_late_ms, "cpu_percent": 100 * loop_s / duration_s},
    }


def clean(point: dict[str, Any]) -> bool:
    """Whether every listener of a point was in time."""
    return not any(point[name] for name in ("underruns", "refused", "unanswered", "errors"))


def held_ticks(seen: LoadRun, ticks: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the `ticks` (dtype mktts.engine.scheduler.TICKS) that ended in the measured time, and their figures; only
    the batch engine has ticks. device_busy_percent: share of time spent in ticks. lanes_mean: mean per tick."""
    if len(ticks):
        ticks = ticks[(ticks["ended_s"] >= seen.begin.at_s) & (ticks["ended_s"] < seen.end.at_s)]
    if not len(ticks):
        return ticks, {}
    busy = float(ticks["took_s"].sum()) / (seen.end.at_s - seen.begin.at_s)
    return ticks, {"device_busy_percent": 100 * busy, "lanes_mean": float(ticks["lanes"].mean())}


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Percentiles without interpolation, since some values may be infinite; an infinite percentile is None."""
    names = [f"{name}_p{percent}_ms" for percent in (50, 95, 99)]
    found_s = np.percentile(values_s, (50, 95, 99), method="higher").tolist() if values_s else [math.inf] * len(names)
    return dict(zip(names, (1e3 * one if math.isfinite(one) else None for one in found_s), strict=True))


def _mean(times_s: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """The mean number of concurrent (from, to) intervals over [begin_s, end_s)."""
    within_s = (min(until_s, end_s) - max(since_s, begin_s) for since_s, until_s in times_s)
    return sum(max(0.0, time_s) for time_s in within_s) / (end_s - begin_s)


# ---- an OpenAI-compatible server as a source of streams: `POST /v1/audio/speech`, raw PCM as it is generated


class Received(NamedTuple):
    """A chunk of a response. pcm: (S,) float32. frames: number of frames that it completes."""

    pcm: np.ndarray
    frames: int


@dataclass(frozen=True)
class HttpSource:
    """Opens streams of a server, each over its own connection.

    url: of the route. headers: of every request
    body: keys of every request
    sends: names of the stream settings that are sent as keys of the request"""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    sends: tuple[str, ...] = ()

    async def stream(self, text: str, **settings: Any) -> AsyncGenerator[Received, None]:
        """Yields the chunks of one response; the first has no samples and marks the start of the response. Raises
        BusyError if the server refuses, EngineError for another status, a body that is not raw PCM or is cut off."""
        import aiohttp  # only needed to measure a server

        body = {**self.body, **{name: settings[name] for name in self.sends}, "input": text}
        patience, samples, rest = aiohttp.ClientTimeout(None, sock_connect=_CONNECT_S), 0, b""
        try:
            async with (
                aiohttp.ClientSession(timeout=patience, headers=self.headers) as session,
                session.post(self.url, json=body, allow_redirects=False) as answer,
            ):
                if answer.status in _REFUSALS:
                    raise BusyError(f"the server answers {answer.status}")
                if answer.status != 200:
                    said = (await answer.text(errors="replace"))[:_QUOTED_CHARS]
                    raise EngineError(f"the server answers {answer.status}: {said}")
                _check_sound(answer.headers)
                yield Received(np.zeros(0, np.float32), 0)
                async for data in answer.content.iter_any():
                    data = rest + data
                    whole = len(data) // 2 * 2
                    pcm, rest = from_pcm16(data[:whole]), data[whole:]
                    yield Received(pcm, (samples + len(pcm)) // SAMPLES_PER_FRAME - samples // SAMPLES_PER_FRAME)
                    samples += len(pcm)
        except aiohttp.ClientPayloadError:
            raise EngineError("the answer broke off") from None
        except (aiohttp.ClientResponseError, aiohttp.ServerDisconnectedError) as error:
            raise EngineError(f"the answer is not valid HTTP: {error}") from None
        except (OSError, aiohttp.ClientError) as error:
            raise EngineError(f"the connection failed: {type(error).__name__}") from None
        if not samples:
            raise EngineError("the answer holds no sound")


def _check_sound(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "")
    named = _RATE.search(kind)
    rate = headers.get("x-sample-rate") or (named and named[1]) or str(SAMPLE_RATE_HZ)
    if rate != str(SAMPLE_RATE_HZ) or "json" in kind or "event-stream" in kind:
        found = f"{kind or 'no content type'} at {rate} Hz"
        raise EngineError(f"expected raw 16-bit PCM at {SAMPLE_RATE_HZ} Hz, got {found}")


def endpoint(url: str) -> str:
    """The URL of the speech route, from that of a server's root, of its /v1, or of the route. Raises MetricsError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MetricsError(f"--url takes the address of a server, like http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/")
    path = path if path.endswith(PATH) else f"{path.removesuffix('/v1')}{PATH}"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
