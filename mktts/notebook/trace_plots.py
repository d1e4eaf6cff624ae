"""Pictures of a recorded trace (`mktts.measure.trace`). Each function takes the document, saves `folder`/<name>.png and
returns the Figure; `source` says where the trace comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.kernel.trace import PHASES, PREDICTOR_LAYER, TAIL, frame_points, phases_of, talker_points
from mktts.measure.trace import BUILDS, unpacked
from mktts.notebook.figure import COLOURS, legend_below, new, save, styled, titled
from mktts.notebook.plots import stacked_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"product": "product", "hop": "hop to other blocks", "other": "other"}
STACKS = ("talker", "predictor")


@styled
def where(
    found: Mapping[str, Any], least_us: Mapping[str, float], folder: Path, source: str, name: str = "where"
) -> Figure:
    """Microseconds of a frame by stack and kind, beside the stream and alone; waits for weights by themselves.

    least_us: of each stack, what its weights' bytes allow.
    """
    bars = {f"{stack}, {build}": by_kind(found, stack, build) for stack in STACKS for build in BUILDS}
    figure, (axes,) = new(1.9 + 0.45 * len(bars))
    longest_us = stacked_bars(axes, bars, "{:.0f}")
    for index, label in enumerate(bars):
        stack, build = label.split(", ")
        if build == BUILDS[0]:
            lines = (least_us[stack], index - 0.42, index + 0.42)
            axes.vlines(*lines, color=COLOURS["limit"], linestyle="--", label="weight bytes alone")
    axes.set(xlabel="time in a frame (µs)", xlim=(0, longest_us * 1.1))
    titled(axes, "Where the time of a frame goes", source)
    legend_below(axes)
    return save(figure, folder, name)


def by_kind(found: Mapping[str, Any], stack: str, build: str) -> dict[str, float]:
    """Microseconds in a frame by what a block is doing: product, hop, other, and waiting for weights."""
    rows = [row for row in found["phases"][build] if row["stack"] == stack]
    spent = {kind: sum(r["frame_us"] - r["weights_us"] for r in rows if r["kind"] == kind) for kind in KINDS}
    return {**spent, "weights awaited": sum(row["weights_us"] for row in rows)}


@styled
def layers(found: Mapping[str, Any], folder: Path, source: str, name: str = "layers") -> Figure:
    """One frame, row by row: the talker's layers, then the predictor's passes, coloured by what a block does."""
    settings = found["settings"]
    counts = settings["talker_layers"], settings["predictor_layers"]
    points = frame_points(*counts)
    steps = unpacked(found["frame"][BUILDS[0]]["steps"])
    kinds = [phase.kind for phase in phases_of(points)]
    each = len(PREDICTOR_LAYER) * counts[1] + len(TAIL)
    talker = talker_points(counts[0])
    ends = [0, *np.flatnonzero(points[:talker] == 1)[1:], *range(talker, len(points) + 1, each)]
    figure, panels = new(8.0, 2, height_ratios=(counts[0], 15))
    for axes, of_stack in zip(panels, (ends[: counts[0] + 1], ends[counts[0] :]), strict=True):
        for row, (begin, end) in enumerate(zip(of_stack, of_stack[1:], strict=False)):
            _segments(axes, row, steps[begin:end], kinds[begin:end])
        axes.set_ylim(len(of_stack) - 1.4, -0.6)
        axes.set(xlabel="time since its beginning (µs)", xlim=(0, None))
        axes.grid(axis="y", visible=False)
    panels[0].set_ylabel("talker's layer, the last with head and draw")
    panels[1].set_ylabel("predictor's pass")
    panels[1].set_yticks(range(0, 15, 2), [str(number) for number in range(1, 16, 2)])
    titled(panels[0], "One frame: all layers of the talker, all passes of the predictor", source)
    legend_below(panels[0])
    return save(figure, folder, name)


@styled
def blocks(found: Mapping[str, Any], stack: str, folder: Path, source: str, name: str = "blocks") -> Figure:
    """One layer block by block, above beside the stream, below alone; a grey line parts the groups."""
    figure, panels = new(7.6, 2, sharex=True)
    for axes, build in zip(panels, BUILDS, strict=True):
        kept = found["layers"][build][stack]
        times, points = unpacked(kept["times"]), kept["points"]
        lines = np.arange(times.shape[1])
        for index, pair in enumerate(zip(points, points[1:], strict=False)):
            kind = PHASES[pair].kind
            look = {"color": COLOURS[kind], "alpha": 1.0 if index % 2 else 0.78, "label": KINDS[kind]}
            _rectangles(axes, lines, times[index], times[index + 1], **look)
        axes.hlines(np.arange(0, len(lines), found["settings"]["group"]) - 0.5, 0, times.max(), color="#777777", lw=0.5)
        axes.set(ylabel=f"block, {build}", ylim=(len(lines) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
    panels[1].set(xlabel="time (µs)", xlim=(0, None))
    what = "a layer of the talker" if stack == "talker" else "a last layer of the predictor, its head and draw"
    titled(panels[0], f"Every block through {what}", source)
    legend_below(panels[0])
    return save(figure, folder, f"{name}_{stack}")


@styled
def hops(found: Mapping[str, Any], folder: Path, source: str, name: str = "hops") -> Figure:
    """A phase's time beside the stream and alone: median, and 10 to 90 % of frames and blocks."""
    wanted = {s: [r for r in found["phases"][BUILDS[0]] if r["stack"] == s and r["count"] > 1] for s in STACKS}
    figure, panels = new(9.0, 2, height_ratios=[len(rows) for rows in wanted.values()], sharex=True)
    for axes, (stack, rows) in zip(panels, wanted.items(), strict=True):
        alone = {row["phase"]: row for row in found["phases"][BUILDS[1]] if row["stack"] == stack}
        _dots(axes, rows, BUILDS[0], -0.15, filled=True)
        _dots(axes, [alone[row["phase"]] for row in rows], BUILDS[1], 0.15, filled=False)
        axes.set_yticks(range(len(rows)), [row["phase"] for row in rows], fontsize=9)
        axes.set(ylabel=stack, ylim=(len(rows) - 0.5, -0.5))
    panels[1].set(xlabel="time of one phase (µs)", xlim=(0, None))
    titled(panels[0], "What a hop costs, alone and beside the stream", source)
    legend_below(panels[0])
    return save(figure, folder, name)


def _rectangles(axes: Axes, lines: np.ndarray, begin: np.ndarray, end: np.ndarray, **look: Any) -> None:
    """One a line, as high as the line: a collection, which is drawn five times as fast as the bars of `barh`."""
    from matplotlib.collections import PolyCollection

    below, above = lines - 0.5, lines + 0.5
    corners = np.array([[begin, below], [end, below], [end, above], [begin, above]]).transpose(2, 0, 1)
    axes.add_collection(PolyCollection(corners, linewidth=0, antialiased=False, **look))


def _segments(axes: Axes, row: int, steps: np.ndarray, kinds: Sequence[str]) -> None:
    left = np.concatenate([[0.0], np.cumsum(steps)[:-1]])
    for kind, label in KINDS.items():
        mine = np.array([k == kind for k in kinds])
        axes.barh(
            np.full(mine.sum(), row), steps[mine], left=left[mine], height=0.86, color=COLOURS[kind], label=label, lw=0
        )


def _dots(axes: Axes, rows: Sequence[Mapping[str, Any]], label: str, shift: float, filled: bool) -> None:
    shades = [COLOURS[row["kind"]] for row in rows]
    lines = np.arange(len(rows)) + shift
    axes.hlines(lines, [r["us_p10"] for r in rows], [r["us_p90"] for r in rows], colors=shades, linewidth=1.6)
    faces = shades if filled else "white"
    axes.scatter([row["us"] for row in rows], lines, s=34, c=faces, edgecolors=shades, zorder=3, label=label)
