"""The figures of many streams at once. Each function saves `folder`/<name>.png and returns the Figure; `source` says
where the numbers come from and stands under the title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.notebook.figure import COLOURS, SERIES, legend_below, new, save, styled, titled
from mktts.notebook.many import Held, cost_ms, underruns_a_minute
from mktts.spec import FRAME_MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["cost", "growth", "ticks"]

TICKS_SHOWN = 150  # so that single ticks can be told apart
DASHES = ("-", "--", ":", "-.")
APART = 1.02  # dots of one series beside those of the next
ROOM = 1.3  # between two numbers of listeners that are both written down
LANES = {"new": COLOURS["predictor"], "going on": COLOURS["mktts"], "empty": "#dddddd"}


@styled
def growth(
    series: Mapping[str, Sequence[Held]],
    on_gpu: bool,
    folder: Path,
    source: str,
    name: str = "listeners",
    goal_ms: float | None = None,
) -> Figure:
    """First PCM, underruns and the time spent on a frame over the listeners: one line for each of `series`.

    First PCM: a dot for each arrival that was measured here, lines at their median and 99th percentile. goal_ms: of the
    latter. on_gpu: whose time the cost is, see `many.cost_ms`.
    """
    figure, panels = new(7.6, rows=3, sharex=True, height_ratios=(2.2, 1, 1.4))
    first, late, spent = panels
    counts = sorted({run.point["listeners"] for runs in series.values() for run in runs})
    for index, (label, runs) in enumerate(series.items()):
        dash = DASHES[index // len(SERIES) % len(DASHES)]
        line = {"color": SERIES[index % len(SERIES)], "linestyle": dash, "marker": "o", "markersize": 5}
        beside = APART ** (2 * index - len(series) + 1) if any(run.waits_ms for run in runs) else 1.0
        x = beside * np.array([run.point["listeners"] for run in runs], float)
        _first_pcm(first, x, runs, line, label)
        late.plot(x, [underruns_a_minute(run.point) for run in runs], **line)
        costs = [cost_ms(run.point, on_gpu) for run in runs]
        spent.plot(x, [math.nan if value is None else value for value in costs], **line)
    if goal_ms is not None:
        first.axhline(goal_ms, color=COLOURS["limit"], linestyle="--", linewidth=1.2, label=f"goal: {goal_ms:.0f} ms")
    one = "one GPU" if on_gpu else "one core"
    budget = f"all that {one} has: {FRAME_MS:.0f} ms / listeners"
    spent.plot(counts, [FRAME_MS / count for count in counts], "--", color=COLOURS["limit"], label=budget)
    spent.legend(loc="best")
    late.set_ylim(0, max(1.0, 1.1 * late.get_ylim()[1]))
    first.set(yscale="log", ylabel="to first PCM (ms)\nthick: p99, thin: median")
    late.set(ylabel="underruns\na minute of\nlistening")
    spent.set(yscale="log", ylabel=f"{'GPU' if on_gpu else 'CPU'} time spent\non a frame (ms)")
    spent.set(xscale="log", xlabel="listeners (offered)")
    spent.set_xticks(*_named(counts))
    spent.set_xticks([], minor=True)
    for axes in (first, spent):
        _plain_scale(axes)
    titled(first, "What more listeners do: the wait, the gaps, the time spent", source)
    figure.align_ylabels(panels)
    legend_below(first)
    return save(figure, folder, name)


def _first_pcm(axes: Axes, x: np.ndarray, runs: Sequence[Held], line: Mapping[str, Any], label: str) -> None:
    shade = line["color"]
    for at, run in zip(x, runs, strict=True):
        waits_ms = [wait for wait in run.waits_ms if math.isfinite(wait)]
        axes.plot([at] * len(waits_ms), waits_ms, ".", color=shade, alpha=0.35, markersize=6)
        if missed := run.point["refused"] + run.point["unanswered"]:
            at_top = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top", "fontsize": 9}
            axes.annotate(f"{missed} without PCM", (at, 1), color=COLOURS["underrun"], **at_top)
    middle, most = (
        [math.nan if run.point[key] is None else run.point[key] for run in runs]
        for key in ("ttfc_p50_ms", "ttfc_p99_ms")
    )
    axes.plot(x, most, **line, label=label)
    axes.plot(x, middle, **{**line, "linewidth": 0.9, "marker": ""})


def _named(counts: Sequence[int]) -> tuple[list[int], list[str]]:
    """Places and labels of the axis of listeners; where two lie close together, the second has no label."""
    labels, last = [], 0.0
    for count in counts:
        labels.append(f"{count:,}" if count >= ROOM * last else "")
        last = count if labels[-1] else last
    return list(counts), labels


def _plain_scale(axes: Axes) -> None:
    """2, 5, 10 on a logarithmic axis of a decade at least, so that small differences look small."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.get_ylim()
    wider = max(1.0, math.sqrt(10 * low / high))
    axes.set_ylim(low / wider, high * wider)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


@styled
def ticks(found: np.ndarray, folder: Path, source: str, shown: int = TICKS_SHOWN, name: str = "ticks") -> Figure:
    """What the scheduler did: `shown` ticks that follow each other, those in which most streams began.

    found (n,): ticks of dtype mktts.batch.tick.TICKS, oldest first. From top to bottom: the streams that were open;
    every tick as a box, as wide as it took, as high as its bucket has lanes, coloured by what they were used for; the
    prompt rows that entered; by how much the latest frame of the tick was late for its listener. Without a tick, as a
    short load on a busy machine may be, the picture says so.
    """
    title = "What the scheduler did, tick by tick"
    if not len(found):
        return _nothing("no tick while the load was held: hold it for longer", title, folder, source, name)
    found = busiest(found, shown)
    begin_s = found["ended_s"] - found["took_s"]
    since_s, wide_s = begin_s - begin_s[0], found["took_s"]
    figure, panels = new(6.8, rows=4, sharex=True, height_ratios=(1, 3, 1, 1))
    open_streams, lanes, prompts, late = panels
    box = {"align": "edge", "width": wide_s, "linewidth": 0.5, "edgecolor": "white"}
    going_on = found["lanes"] - found["new"]
    empty = np.maximum(found["bucket_lanes"] - found["lanes"], 0)
    lanes.bar(since_s, found["new"], color=LANES["new"], label="a stream's first frame", **box)
    lanes.bar(since_s, going_on, bottom=found["new"], color=LANES["going on"], label="a later frame", **box)
    if empty.any():
        lanes.bar(since_s, empty, bottom=found["lanes"], color=LANES["empty"], label="empty lanes of the bucket", **box)
    ended_s = since_s + wide_s
    open_streams.step(ended_s, found["open"], where="post", color=COLOURS["limit"], linewidth=1.4)
    open_streams.set(ylabel="open\nstreams", ylim=(0, 1.1 * float(found["open"].max()) + 1))
    lanes.set(ylabel="lanes in the tick", ylim=(0, None))
    prompts.bar(since_s, found["rows"], color=LANES["new"], **box)
    prompts.set(ylabel="prompt\nrows", ylim=(0, max(8, 1.1 * float(found["rows"].max()))))
    late_ms = 1e3 * found["late_s"]
    late.bar(since_s, late_ms, color=COLOURS["underrun"], **box)
    late.set(xlabel="time (s)", ylabel="frame late\nby (ms)")
    late.set(xlim=(0, ended_s[-1]), ylim=(0, max(FRAME_MS / 4, 1.1 * float(late_ms.max()))))
    if not late_ms.any():
        late.text(0.5, 0.5, "no frame was late", transform=late.transAxes, ha="center", va="center", color="#666666")
    for axes in panels:
        axes.grid(axis="x", visible=False)
    titled(open_streams, title, f"{source}; {in_words(found)}")
    figure.align_ylabels(panels)
    legend_below(lanes)
    return save(figure, folder, name)


@styled
def cost(found: np.ndarray, folder: Path, source: str, name: str = "cost") -> Figure:
    """What a frame costs by how many are made together: a dot for each tick without a prompt, its time over its lanes;
    the line joins their medians, the dashed one is what it would be if lanes beside the first were free.

    found (n,): ticks of dtype mktts.batch.tick.TICKS. Where none of them is without a prompt, the picture says so.
    """
    title = "What one frame costs, by how many are made together"
    found = found[(found["rows"] == 0) & (found["lanes"] > 0)]
    if not len(found):
        return _nothing("no tick without a prompt: hold a load for longer", title, folder, source, name)
    each_ms = 1e3 * found["took_s"] / found["lanes"]
    counts = np.unique(found["lanes"])
    medians = np.array([np.median(each_ms[found["lanes"] == count]) for count in counts])
    figure, (axes,) = new(3.9)
    apart = 1.0 + 0.02 * np.sin(np.arange(len(found)))
    axes.plot(found["lanes"] * apart, each_ms, ".", color=SERIES[1], alpha=0.25, markersize=4, label="a tick")
    axes.plot(counts, medians, "o-", color=SERIES[1], markersize=4, label="median")
    free = "if further lanes were free"
    axes.plot(counts, medians[0] * counts[0] / counts, "--", color=COLOURS["limit"], linewidth=1.2, label=free)
    axes.set(xscale="log", yscale="log", xlabel="lanes in the tick", ylabel="time of the tick\nfor each (ms)")
    shown, labels = _named(counts.tolist())
    axes.set_xticks(shown, labels)
    axes.set_xticks([], minor=True)
    _plain_scale(axes)
    titled(axes, title, source)
    legend_below(axes)
    return save(figure, folder, name)


def _nothing(why: str, title: str, folder: Path, source: str, name: str) -> Figure:
    figure, (axes,) = new(1.6)
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="#666666")
    axes.set(xticks=[], yticks=[])
    titled(axes, title, source)
    return save(figure, folder, name)


def busiest(found: np.ndarray, shown: int) -> np.ndarray:
    """The `shown` consecutive ticks in which most streams began, the first of such; all where there are fewer."""
    if len(found) <= shown:
        return found
    began = np.convolve(found["new"], np.ones(shown, int), "valid")
    start = int(began.argmax())
    return found[start : start + shown]


def in_words(found: np.ndarray) -> str:
    """The ticks on one line."""
    lasted_s = float(found["ended_s"][-1] - found["ended_s"][0] + found["took_s"][0])
    busy = min(100.0, 100 * float(found["took_s"].sum()) / lasted_s)
    late = int((found["late_s"] > 0).sum())
    lanes = found["lanes"].mean()
    return f"{len(found)} ticks in {lasted_s:.2g} s, {lanes:.1f} lanes each, busy {busy:.0f} %, {late} late"
