"""What `08_many_voices` shows: loads that are held here, and those of the committed document.

The measurement is that of `python -m mktts bench --load` (`mktts.measure.load`), held for seconds instead of a
minute: enough to see how things grow, too little to be reported.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mktts.errors import OptionsError
from mktts.measure.load.client import clean
from mktts.measure.load.command import Subject
from mktts.measure.load.settings import LoadSettings
from mktts.spec import FRAME_RATE_HZ
from mktts.synth.many import Asked

if TYPE_CHECKING:
    from mktts.synth import Synthesizer

UTTERANCE_S = (1.0, 4.0)  # shorter than those of the bench, so that seconds see some of them


@dataclass(frozen=True)
class Held:
    """A load. point: its figures, as `mktts.measure.load.client.measured` has them. waits_ms: to the first PCM of
    every arrival that was measured here, infinite where there was none. ticks (n,): of the held time, of dtype
    mktts.batch.tick.TICKS; None where none are known."""

    point: Mapping[str, Any]
    waits_ms: tuple[float, ...] = ()
    ticks: np.ndarray | None = field(default=None, repr=False)


# ---- loads of this machine


def loads(name: str, parameter: str) -> tuple[int, ...]:
    """Numbers of listeners: "1,4,8" -> (1, 4, 8). Raises OptionsError, with the parameter's name."""
    try:
        found = tuple(int(word) for word in parameter.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise OptionsError(f'{name} must be numbers of listeners, like "1,4,8", each at least 1, got {parameter!r}')
    return found


def subject(checkpoint: str, seconds: float, seed: int, **settings: Any) -> Subject:
    """What is measured: nothing is loaded yet. settings: of LoadSettings. Raises OptionsError and CheckpointError."""
    low_s, high_s = UTTERANCE_S
    frames = round(low_s * FRAME_RATE_HZ), round(high_s * FRAME_RATE_HZ)
    times = {"seconds": seconds, "warm_s": _warm_s(seconds), "tail_s": 0.5}
    return Subject(LoadSettings(checkpoint, seed=seed, frames=frames, **times, **settings))


def _warm_s(seconds: float) -> float:
    """For a load to build up in: as of the bench where it is held for a minute, a part of it where it is shorter."""
    return min(max(0.2 * seconds, 1.5), 8.0)


def engine(subject: Subject) -> list[dict[str, Any]]:
    """What serves: one row of facts about the engine of many streams, which is loaded where it is not yet."""
    loaded = subject.loaded
    lanes = loaded.synthesizer.lanes
    ticks = lanes.settings
    return [
        {
            "device": str(loaded.synthesizer.device),
            "slots": lanes.slots,
            "positions a stream": lanes.pages.rows_per_slot,
            "pages of 64 positions": lanes.pages.free,
            "lanes a tick, at most": ticks.max_lanes,
            "codec": loaded.codec,
            "deterministic": loaded.deterministic,
        }
    ]


async def held(subject: Subject, listeners: Iterable[int], seconds: float, seed: int) -> list[Held]:
    """Holds one load after the other. In a thread beside the caller's event loop, which goes on meanwhile."""
    subject.settings = replace(subject.settings, seconds=seconds, warm_s=_warm_s(seconds), seed=seed)
    return [await asyncio.to_thread(_held, subject, count) for count in listeners]


def _held(subject: Subject, listeners: int) -> Held:
    point, seen, ticks = subject.met(listeners)
    begin_s, end_s = (seen.begin.at_s, seen.end.at_s) if seen.begin and seen.end else (math.inf, math.inf)
    came = [one for one in seen.listeners if begin_s <= one.planned_s < end_s]
    waits_ms = (math.inf if one.first_s is None else 1e3 * (one.first_s - one.planned_s) for one in came)
    return Held(point, tuple(waits_ms), ticks)


def cost_ms(point: Mapping[str, Any], on_gpu: bool) -> float | None:
    """Milliseconds that were spent on one frame of one stream: on a GPU the ticks' time on the device over the frames,
    on a CPU the process's CPU time. None where the point does not say."""
    if not on_gpu:
        host_us = point.get("host_us_per_frame")
        return None if host_us is None else host_us / 1e3
    if not point.get("device_busy_percent") or not point.get("frames"):
        return None
    return 10 * point["device_busy_percent"] * point["duration_s"] / point["frames"]


def underruns_a_minute(point: Mapping[str, Any]) -> float:
    """Of listening: the underruns of all listeners over the minutes that they played, all together."""
    minutes = point["playing_mean"] * point["duration_s"] / 60
    return point["underruns"] / minutes if minutes else 0.0


def rows(series: Mapping[str, Sequence[Held]], on_gpu: bool) -> list[dict[str, Any]]:
    """A row for each load, of what all of them have."""
    found = []
    for name, runs in series.items():
        for run in runs:
            point, cost = run.point, cost_ms(run.point, on_gpu)
            found.append(
                {
                    "engine": name,
                    "listeners": point["listeners"],
                    "open": round(point["open_mean"], 1),
                    "arrivals": point["arrivals"],
                    **{f"{name} (ms)": _whole(point[f"ttfc_{name}_ms"]) for name in ("p50", "p95", "p99")},
                    "underruns": point["underruns"],
                    "refused": point["refused"],
                    "lanes a tick": "" if "lanes_mean" not in point else round(point["lanes_mean"], 1),
                    "ms a frame": "" if cost is None else f"{cost:.3g}",
                }
            )
    return found


def most_clean(runs: Sequence[Held]) -> int:
    """The largest load without underrun, refusal or failure; 0 where there is none."""
    return max((run.point["listeners"] for run in runs if clean(run.point)), default=0)


# ---- streams at once


async def among(synth: Synthesizer, text: str, others: Sequence[str], **settings: Any) -> Tensor:
    """The codes (T, 16) of `text`, spoken while `others` are, each with a seed of its own.

    As `say_many` speaks them: codes are compared, and so many listeners may be more than the machine carries.
    settings: of `Synthesizer.stream` for all of them; `seed` is that of `text`.
    """
    seeds = range(settings["seed"] + 1, settings["seed"] + 1 + len(others))
    asked = [Asked(other, {**settings, "seed": seed}) for other, seed in zip(others, seeds, strict=True)]
    return await asyncio.to_thread(_codes_of_last, synth, [*asked, Asked(text, settings)])


def _codes_of_last(synth: Synthesizer, asked: Sequence[Asked]) -> Tensor:
    codes: dict[int, Tensor] = {}
    numbered = (Asked(one.text, one.settings, number) for number, one in enumerate(asked))
    for said in synth.say_each(partial(next, numbered, None), at_once=len(asked)):
        if said.error is not None:
            raise said.error
        codes[said.asked.name] = said.stream.codes
    return codes[len(asked) - 1]


# ---- the committed document


def series(document: Mapping[str, Any]) -> dict[str, list[Held]]:
    """The points of a document of `bench --load --into`, by what they have in common."""
    found: dict[str, list[Held]] = {}
    for point in document["points"]:
        found.setdefault(_common(point), []).append(Held(point))
    return {name: sorted(runs, key=lambda run: run.point["listeners"]) for name, runs in sorted(found.items())}


def figures(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each figure of such a document."""
    return [
        {
            "figure": name,
            "value": _short(figure["value"]),
            "p99": _short(figure.get("p99")),
            "unit": figure["unit"],
            "n": figure["n"],
            "codec": figure.get("codec", ""),
            "deterministic": {True: "yes", False: "no"}.get(figure.get("deterministic"), ""),
        }
        for name, figure in document["figures"].items()
    ]


def _common(point: Mapping[str, Any]) -> str:
    ordered = ", deterministic" if point["deterministic"] else ""
    rows = f"{point['context_rows']} rows of prompt"
    return f"{point['checkpoint']}, codec {point['codec']}{ordered}, {rows}, engine {point['engine']}"


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
