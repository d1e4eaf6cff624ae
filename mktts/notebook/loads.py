"""A load of listeners, held for seconds: enough for notebook 08 to see how things grow.

What is to be reported is held for a minute by `python -m mktts bench --load`; the figures here have its names.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.errors import CapacityError
from mktts.notebook.speaking import longer
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.metrics import play

if TYPE_CHECKING:
    from mktts.synth import Synthesizer

FRAMES = (12, 50)  # of an utterance: 1 to 4 s, so that seconds see some of them end
TAIL_S = 0.5  # after the held time, for those that have just come


@dataclass
class Visit:
    """One arrival. frames: of its utterance. ready_s, samples: of the chunks that it got. Times of perf_counter."""

    planned_s: float
    frames: int
    ready_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    ended_s: float = math.inf
    refused: bool = False


async def hold(synth: Synthesizer, listeners: int, seconds: float, seed: int, text: str, **settings: Any) -> dict:
    """The figures of a load, with `waits_ms`, to the first PCM of every arrival, and `ticks`, of the held time.

    listeners: arrivals a second times the mean seconds of an utterance. settings: of `Synthesizer.stream`. In a thread
    beside the caller's event loop, which goes on meanwhile.
    """
    return await asyncio.to_thread(asyncio.run, _held(synth, listeners, seconds, seed, text, settings))


async def _held(
    synth: Synthesizer, listeners: int, seconds: float, seed: int, text: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    warm_s = min(max(0.2 * seconds, 0.5), 8.0)
    mean_s = sum(FRAMES) / 2 * 0.08
    arrivals_s = np.cumsum(random.exponential(mean_s / listeners, int(4 + 3 * listeners * (warm_s + seconds) / mean_s)))
    begin_s = time.perf_counter() + warm_s
    end_s = begin_s + seconds
    visits = [Visit(begin_s - warm_s + at_s, int(random.integers(*FRAMES))) for at_s in arrivals_s]
    visits = [visit for visit in visits if visit.planned_s < end_s]
    tasks = [
        asyncio.create_task(_listen(synth, visit, longer(text, visit.frames), {**settings, "seed": seed + number}))
        for number, visit in enumerate(visits)
    ]
    await asyncio.sleep(warm_s)
    cpu_s = time.process_time()
    await asyncio.sleep(end_s - time.perf_counter())
    cpu_s = time.process_time() - cpu_s
    await asyncio.sleep(TAIL_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"listeners": listeners, **figures(visits, synth.ticks, begin_s, end_s, cpu_s)}


async def _listen(synth: Synthesizer, visit: Visit, text: str, settings: Mapping[str, Any]) -> None:
    """Takes every chunk at once, and plays in real time from the first one on."""
    await asyncio.sleep(max(0.0, visit.planned_s - time.perf_counter()))
    try:
        stream = synth.stream(text, **settings, max_frames=visit.frames)
        async with contextlib.aclosing(stream.__aiter__()) as chunks:
            async for chunk in chunks:
                visit.ready_s.append(time.perf_counter())
                visit.samples.append(len(chunk.pcm))
    except CapacityError:
        visit.refused = True
    finally:
        visit.ended_s = time.perf_counter()


def figures(visits: list[Visit], ticks: np.ndarray, begin_s: float, end_s: float, cpu_s: float) -> dict[str, Any]:
    """What the visits between `begin_s` and `end_s` met. cpu_s: of the process meanwhile."""
    held_s = end_s - begin_s
    came = [visit for visit in visits if visit.planned_s >= begin_s]
    waits_ms = [1e3 * (v.ready_s[0] - v.planned_s) if v.ready_s else math.inf for v in came]
    played = [visit for visit in visits if visit.ready_s]
    made_s = sum(n for v in played for at, n in zip(v.ready_s, v.samples, strict=True) if begin_s <= at < end_s)
    frames = made_s / SAMPLE_RATE_HZ / 0.08
    ticks = ticks[(ticks["ended_s"] >= begin_s) & (ticks["ended_s"] < end_s)]

    def inside_s(first_s: float, last_s: float) -> float:
        return max(0.0, min(last_s, end_s) - max(first_s, begin_s))

    def percentile(percent: float) -> float | None:
        value = float(np.percentile(waits_ms, percent, method="higher")) if waits_ms else math.inf
        return value if math.isfinite(value) else None

    return {
        "duration_s": held_s,
        "arrivals": len(came),
        "refused": sum(visit.refused for visit in came),
        "unanswered": sum(not visit.ready_s and not visit.refused for visit in came),
        "open_mean": sum(inside_s(visit.planned_s, visit.ended_s) for visit in visits) / held_s,
        "playing_mean": sum(inside_s(v.ready_s[0], v.ready_s[0] + sum(v.samples) / SAMPLE_RATE_HZ) for v in played)
        / held_s,
        **{f"ttfc_p{percent}_ms": percentile(percent) for percent in (50, 95, 99)},
        "underruns": sum(play([1e3 * at for at in v.ready_s], v.samples).underruns for v in played),
        "frames": frames,
        "host_us_per_frame": 1e6 * cpu_s / frames if frames else math.nan,
        "device_busy_percent": 100 * float(ticks["took_s"].sum()) / held_s,
        "lanes_mean": float(ticks["lanes"].mean()) if len(ticks) else math.nan,
        "waits_ms": [wait for wait in waits_ms if math.isfinite(wait)],
        "ticks": ticks,
    }
