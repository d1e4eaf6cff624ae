"""The megakernel's figures. Each function takes rows of `mktts.notebook.evidence`, saves `folder`/<name>.png and
returns the Figure; `source` says where the numbers come from and stands under the title."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.notebook.evidence import WHOLE
from mktts.notebook.figure import COLOURS, SERIES, colour, legend_below, new, save, styled, titled
from mktts.notebook.plots import stacked_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mktts.notebook.evidence import Limit

__all__ = ["against_limit", "first_pcm", "ladder", "peers", "stage_timeline"]

CHUNKS_SHOWN = 5  # the ramp of the default schedule
STEP_CHARS = 44  # of a line that says what a step of the ladder changed


@styled
def against_limit(
    rows: Sequence[Limit], bandwidth_gb_s: float, folder: Path, source: str, name: str = "kernel_roofline"
) -> Figure:
    """Least time (weight bytes over bandwidth) and measured time of every stage, on a log axis, their ratio beside."""
    figure, (axes,) = new(1.8 + 0.42 * len(rows))
    least, measured = [row.least_ms for row in rows], [row.measured_ms for row in rows]
    lines = range(len(rows))
    axes.hlines(lines, least, measured, color="#c8c8c8", linewidth=2.4, zorder=1)
    limit = f"weight bytes / {bandwidth_gb_s:,.0f} GB/s"
    axes.plot(least, lines, "D", color=COLOURS["limit"], fillstyle="none", markersize=7, label=limit)
    axes.plot(measured, lines, "o", color=COLOURS["mktts"], markersize=7, label="measured")
    for line, row in zip(lines, rows, strict=True):
        text = f"{row.measured_ms:.3g} ms = {row.ratio:.2g} × {row.least_ms:.2g} ms"
        axes.annotate(text, (row.measured_ms, line), (9, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set(xscale="log", xlabel="time (ms)", ylim=(len(rows) - 0.5, -0.5))
    _plain_ticks(axes)
    axes.set_xlim(min(least) / 1.5, max(measured) * 6)  # room for the words on the right
    axes.set_yticks(lines, [row.stage for row in rows])
    titled(axes, "What the weights' bytes allow, and what it takes", source)
    axes.grid(axis="y", visible=False)
    legend_below(axes)
    return save(figure, folder, name)


@styled
def first_pcm(
    rows: Mapping[str, Mapping[str, float]], folder: Path, source: str, name: str = "kernel_first_pcm"
) -> Figure:
    """Milliseconds by stage, one stacked bar per label."""
    figure, (axes,) = new(1.9 + 0.45 * len(rows))
    longest_ms = stacked_bars(axes, rows, "{:.3g}")
    axes.set(xlabel="time (ms)", xlim=(0, longest_ms * 1.1))
    titled(axes, "Where the milliseconds go", source)
    legend_below(axes)
    return save(figure, folder, name)


@styled
def stage_timeline(
    rows: Sequence[Mapping[str, Any]], folder: Path, source: str, name: str = "stage_timeline"
) -> Figure:
    """The first chunks of an utterance over the time since its call: what each was waiting for, and when it was ready.

    `rows`: of `evidence.timeline`. Within a chunk the stages are sums over its frames, in the order of the data.
    """
    rows = rows[:CHUNKS_SHOWN]
    figure, (axes,) = new(1.9 + 0.42 * len(rows))
    for index, row in enumerate(rows):
        left = row["begin_ms"]
        spent = {**row["stages"], "other": max(0.0, row["ready_ms"] - left - sum(row["stages"].values()))}
        for stage, width in spent.items():
            axes.barh(index, width, left=left, height=0.6, color=colour(stage), label=stage, edgecolor="white")
            left += width
        ready = {"color": COLOURS["limit"], "markersize": 8, "linestyle": "none", "label": "PCM on the host"}
        axes.plot(row["ready_ms"], index, "|", markeredgewidth=2.4, **ready)
        shown = f"{row['ready_ms']:.3g}"
        axes.annotate(shown, (max(left, row["ready_ms"]), index), (6, 0), textcoords="offset points", va="center")
    labels = [f"chunk {i}, {r['frames']} frame{'s'[: r['frames'] > 1]}" for i, r in enumerate(rows, start=1)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set(xlabel="time since the call (ms)", ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlim(0, max(row["ready_ms"] for row in rows) * 1.1)
    titled(axes, "From the call to the PCM, by stage", source)
    axes.grid(axis="y", visible=False)
    legend_below(axes, after=["PCM on the host"])
    return save(figure, folder, name)


@styled
def peers(axes_rows: Mapping[str, Mapping[str, float]], folder: Path, source: str, name: str = "peers") -> Figure:
    """One panel per quantity on a log axis, one dot per program, its value and how many times the first one's it is."""
    heights = [len(row) for row in axes_rows.values()]
    figure, panels = new(1.6 + 0.36 * sum(heights) + 0.5 * len(heights), len(heights), height_ratios=heights)
    for axes, (quantity, row) in zip(panels, axes_rows.items(), strict=True):
        values = np.array(list(row.values()))
        shades = [SERIES[2] if "graphs" in who else colour(who) for who in row]
        lines = range(len(row))
        axes.scatter(values, lines, color=shades, s=55, zorder=3)
        axes.set_yticks(lines, list(row))
        for index, (who, value) in enumerate(row.items()):
            factor = f"   × {_short(value / values[0])}" if index and who != WHOLE else ""
            at = {"textcoords": "offset points", "va": "center", "fontsize": 9}
            axes.annotate(f"{_short(value)}{factor}", (value, index), (9, 0), **at)
        axes.set(xscale="log", xlabel=quantity, xlim=(values.min() / 3, values.max() * 12))
        axes.set_ylim(len(row) - 0.5, -0.5)
        _plain_ticks(axes)
    titled(panels[0], "Beside other programs, one stream, warm (lower is better)", source)
    return save(figure, folder, name)


@styled
def ladder(document: Mapping[str, Any], least_ms: float, folder: Path, source: str, name: str = "ladder") -> Figure:
    """Milliseconds a frame after every change, on the way down to what the weights' bytes allow."""
    steps = document["steps"]
    figure, (axes,) = new(1.9 + 0.46 * len(steps))
    times_ms, lines = [step["ms"] for step in steps], range(len(steps))
    axes.step(times_ms, lines, where="post", color="#c8c8c8", zorder=1)
    axes.plot(times_ms, lines, "o", color=COLOURS["mktts"], markersize=7)
    for line, value in zip(lines, times_ms, strict=True):
        at = {"textcoords": "offset points", "va": "center"}
        axes.annotate(f"{value:.2f}", (value, line), (9, 0), **at)
    axes.axvline(least_ms, color=COLOURS["limit"], linestyle="--", label=f"weight bytes alone: {least_ms:.2f} ms")
    usual = steps[0]["frames_a_launch"]
    words = [_step_words(step, usual) for step in steps]
    axes.set_yticks(lines, words, fontsize=9)
    axes.set(xlabel=f"time per frame (ms), {usual} frames a launch", ylim=(len(steps) - 0.5, -0.5))
    axes.set_xlim(0, max(times_ms) * 1.12)
    titled(axes, "How the frame kernel became faster", source)
    axes.grid(axis="y", visible=False)
    legend_below(axes)
    return save(figure, folder, name)


def _step_words(step: Mapping[str, Any], usual_frames: int) -> str:
    frames = step["frames_a_launch"]
    words = step["what"] + (f" ({frames} frames a launch)" if frames != usual_frames else "")
    return textwrap.fill(words, STEP_CHARS)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def _plain_ticks(axes: Axes) -> None:
    """0.1, 1, 10 on a logarithmic axis instead of powers of ten."""
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
