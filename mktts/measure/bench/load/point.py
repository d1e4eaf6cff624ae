"""One load, held for its time: what its listeners met, in the figures of a point."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mktts.errors import MetricsError
from mktts.measure.bench.load.attendance import Attendance
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.settings import HELD_S, Loaded, LoadSettings
from mktts.measure.bench.load.texts import Said
from mktts.spec import FRAME_RATE_HZ

SCHEMA = (
    "offered_rps", "open_mean", "duration_s", "ttfc_p50_ms", "ttfc_p95_ms", "ttfc_p99_ms", "underruns", "refused",
    "codec", "deterministic", "engine", "context_rows",
)  # fmt: skip


def named(settings: LoadSettings, loaded: Loaded, said: Said, listeners: int) -> dict[str, Any]:
    """What a point says about its conditions. listeners: offered."""
    config = loaded.checkpoint.config
    return {
        "listeners": listeners,
        "codec": loaded.codec,
        "deterministic": loaded.deterministic,
        "context_rows": said.rows,
        "context": said.kind,
        "checkpoint": settings.checkpoint,
        "model_size": config.model_size,
        "random_weights": loaded.checkpoint.is_random,
        "backend": loaded.synthesizer.backend_name,
        "dtype": str(loaded.synthesizer.dtype).removeprefix("torch."),
    }


def measured(seen: Attendance, settings: LoadSettings) -> dict[str, Any]:
    """The figures of a run; SCHEMA has those that every point has. Times of a percentile that falls on an arrival
    without any PCM are None: no number is long enough.

    held: the run went on to its end and took long enough to be reported. arrivals, refused, unanswered (neither PCM nor
    refusal when the run ended), errors: of the held time. open_mean, open_max, playing_mean: streams between call and
    end, and listeners between first PCM and the end of playing. ttfc_accepted_*: of those that were not refused.
    ttfb_*: to the head of a server's answer.
    underruns: whose player ran dry in the held time; late_*: how long it then waited. audio_s_per_s: consumed.
    generator: how late the loop of the listeners was, and what it took. host_us_per_frame: CPU time of everything else
    in the process, waiting for the device by spinning included.
    """
    whole = seen.begin is not None and seen.end is not None
    begin_s = seen.begin.at_s if seen.begin else seen.closed_s
    end_s = seen.end.at_s if seen.end else seen.closed_s
    duration_s = end_s - begin_s
    if not duration_s > 0:
        raise MetricsError("the run ended before its warm-up did: nothing was measured")
    came = [one for one in seen.listeners if one.timed and begin_s <= one.planned_s < end_s]
    counted = [one for one in came if one.first_s is not None or not one.left]  # who left first waits for nothing
    ttfc_s = [_since(one.first_s, one) for one in counted]
    accepted_s = [wait_s for wait_s, one in zip(ttfc_s, counted, strict=True) if not one.refused]
    heads = any(one.byte_s is not None for one in counted)  # of answers that come over a connection
    byte_s = [_since(one.byte_s, one) for one in counted] if heads else []
    audible_s = [one.audible_s - one.planned_s for one in counted if one.audible_s is not None]
    gaps = late_gaps(seen.listeners, begin_s, end_s, seen.closed_s)
    errors = Counter(one.error for one in seen.listeners if one.error)
    return {
        "held": whole and duration_s >= max(settings.seconds, HELD_S) and not seen.hung,
        "offered_rps": len(came) / duration_s,
        "duration_s": duration_s,
        "arrivals": len(came),
        "refused": sum(one.refused for one in came),
        "unanswered": sum(one.first_s is None and not one.refused and not one.error for one in counted),
        "errors": sum(errors.values()),
        "error_kinds": dict(errors.most_common(5)),
        "engine": "+".join(sorted({one.engine for one in seen.listeners if one.engine})),
        "open_mean": _mean_open(seen, begin_s, end_s),
        "open_max": _most_open(seen, begin_s, end_s),
        "playing_mean": _mean_playing(seen, begin_s, end_s),
        **_spread("ttfb", byte_s, (50, 95, 99)),
        **_spread("ttfc", ttfc_s, (50, 95, 99, 100)),
        **_spread("ttfc_accepted", accepted_s, (50, 99)),
        **_spread("audible", audible_s, (50, 95, 99)),
        "underruns": sum(map(len, gaps)),
        "listeners_with_underruns": sum(map(bool, gaps)),
        "late_max_ms": 1e3 * max((late for dry in gaps for _, late in dry), default=0.0),
        **_made(seen, duration_s),
        "generator": _generator(seen, came, duration_s),
    }


def held_ticks(seen: Attendance, ticks: np.ndarray) -> np.ndarray:
    """Those of `ticks` (dtype mktts.batch.tick.TICKS) that ended in the held time; none where the run did not hold."""
    if seen.begin is None or seen.end is None:
        return ticks[:0]
    return ticks[(ticks["ended_s"] >= seen.begin.at_s) & (ticks["ended_s"] < seen.end.at_s)]


def ticked(seen: Attendance, ticks: np.ndarray) -> dict[str, Any]:
    """What the batch engine did in the held time, by its `held_ticks`; nothing of another engine.

    device_busy_percent: of the time, in ticks. lanes_mean: filled, of a tick. padding_percent: lanes of the buckets
    that were not. tick_p50_ms, tick_p99_ms: on the device.
    """
    if not len(ticks) or seen.begin is None or seen.end is None:
        return {}
    took_s = ticks["took_s"]
    return {
        "device_busy_percent": 100 * float(took_s.sum()) / (seen.end.at_s - seen.begin.at_s),
        "lanes_mean": float(ticks["lanes"].mean()),
        "padding_percent": 100 * (1 - float(ticks["lanes"].sum() / ticks["bucket_lanes"].sum())),
        "tick_p50_ms": 1e3 * float(np.percentile(took_s, 50)),
        "tick_p99_ms": 1e3 * float(np.percentile(took_s, 99)),
    }


def late_gaps(
    listeners: Sequence[Listener], begin_s: float, end_s: float, closed_s: float
) -> list[list[tuple[float, float]]]:
    """Of each listener that counts, the (dry_s, late_s) of its underruns in [begin_s, end_s); one that still waited
    when the run was closed is among them."""
    found = []
    for one in listeners:
        gaps = [tuple(gap) for gap in one.gaps] if one.timed else []
        if (since_s := one.waits_since(closed_s)) is not None:
            gaps.append((since_s, closed_s - since_s))
        found.append([gap for gap in gaps if begin_s <= gap[0] < end_s])
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """As numpy's, by linear interpolation, with infinite values allowed. Raises MetricsError where there is none."""
    if not len(values):
        raise MetricsError("expected at least one value, found none")
    ordered = np.sort(np.asarray(values, float))
    place = (len(ordered) - 1) * percent / 100
    below, part = int(place), place - int(place)
    if part < 1e-9 or not math.isfinite(ordered[below]):
        return float(ordered[below])
    return float(ordered[below] * (1 - part) + ordered[below + 1] * part)


def clean(point: dict[str, Any]) -> bool:
    """Whether everybody who came was served without a stutter."""
    return not any(point[name] for name in ("underruns", "refused", "unanswered", "errors"))


def _since(at_s: float | None, one: Listener) -> float:
    return math.inf if at_s is None else at_s - one.planned_s


def _spread(name: str, values_s: Sequence[float], percents: tuple[int, ...]) -> dict[str, float | None]:
    found = {f"{name}_p{percent}_ms".replace("p100", "max"): percent for percent in percents}
    if not values_s:
        return dict.fromkeys(found)
    values = {key: 1e3 * percentile(values_s, percent) for key, percent in found.items()}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _open_times(seen: Attendance, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    found = []
    for one in seen.listeners:
        if one.opened_s is not None and not one.refused:
            since_s, until_s = max(one.opened_s, begin_s), min(one.ended_s or math.inf, end_s)
            if since_s < until_s:
                found.append((since_s, until_s))
    return found


def _mean_open(seen: Attendance, begin_s: float, end_s: float) -> float:
    return sum(until_s - since_s for since_s, until_s in _open_times(seen, begin_s, end_s)) / (end_s - begin_s)


def _most_open(seen: Attendance, begin_s: float, end_s: float) -> int:
    steps = sorted(
        step for since_s, until_s in _open_times(seen, begin_s, end_s) for step in ((since_s, 1), (until_s, -1))
    )
    return int(np.cumsum([step for _, step in steps]).max(initial=0)) if steps else 0


def _mean_playing(seen: Attendance, begin_s: float, end_s: float) -> float:
    times = [(max(one.first_s, begin_s), min(one.dry_s, end_s)) for one in seen.listeners if one.first_s is not None]
    return sum(max(0.0, until_s - since_s) for since_s, until_s in times) / (end_s - begin_s)


def _made(seen: Attendance, duration_s: float) -> dict[str, Any]:
    if seen.begin is None or seen.end is None:
        return {"frames": None, "chunks": None, "audio_s_per_s": None, "host_us_per_frame": None}
    frames = seen.end.frames - seen.begin.frames
    other_s = (seen.end.process_s - seen.begin.process_s) - (seen.end.loop_s - seen.begin.loop_s)
    return {
        "frames": frames,
        "chunks": seen.end.chunks - seen.begin.chunks,
        "audio_s_per_s": frames / FRAME_RATE_HZ / duration_s,
        "host_us_per_frame": 1e6 * other_s / frames if frames else None,
    }


def _generator(seen: Attendance, came: Sequence[Listener], duration_s: float) -> dict[str, float | None]:
    lags = np.repeat(np.arange(len(seen.lag_ms)), seen.lag_ms)  # ms, rounded down
    loop_s = seen.end.loop_s - seen.begin.loop_s if seen.begin and seen.end else math.nan
    return {
        "opened_late_max_ms": 1e3 * max((one.opened_s - one.planned_s for one in came), default=0.0),
        "loop_late_p99_ms": 1e3 * percentile(seen.beat_late_s, 99) if seen.beat_late_s else None,
        "loop_late_max_ms": 1e3 * max(seen.beat_late_s, default=0.0),
        "delivery_p99_ms": float(np.percentile(lags, 99)) if len(lags) else None,
        "delivery_max_ms": float(lags.max()) if len(lags) else None,
        "cpu_percent": None if math.isnan(loop_s) else 100 * loop_s / duration_s,
        "gc_max_ms": 1e3 * max(seen.gc_s, default=0.0),
    }
