"""The style of the notebooks' figures, how they are saved, and the figures that several cells draw.

Colours are from Okabe and Ito (2008), distinguishable with every common colour-vision deficiency; each part has the
same colour in every figure. A drawing function takes plain data, saves `folder`/<name>.png and returns the Figure."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MultipleLocator, NullLocator
from PIL import Image

from mktts.common import write_whole
from mktts.engine.metrics import play
from mktts.spec import FRAME_MS, SAMPLE_RATE_HZ

COLOURS = {
    "talker": "#0072B2",
    "predictor": "#E69F00",
    "codec": "#009E73",
    "prefill": "#CC79A7",
    "launch": "#56B4E9",
    "other": "#999999",
    "product": "#009E73",  # within a launch: a matrix product, an exchange between blocks, a wait for weights
    "hop": "#D55E00",
    "weights": "#F0E442",
    "mktts": "#0072B2",
    "faster-qwen3-tts": "#CC79A7",
    "upstream": "#D55E00",
    "limit": "#444444",  # a limit of playback or a tolerance
    "underrun": "#AA1133",
}
SERIES = ("#0072B2", "#CC79A7", "#56B4E9", "#000000", "#009E73")  # for labels that are not in COLOURS
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
DPI = 120
DISPLAY_DPI = 96  # a notebook displays figures at this resolution, so that their text matches its own
REAL_TIME = f"real time ({FRAME_MS:.0f} ms)"
BESIDE = {"textcoords": "offset points", "va": "center"}  # of an annotation to the right of a point
FRAME_GRID_LIMIT_S = 3.0  # in longer audio the grid of single frames would be a grey area


# ---- any figure


def new(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Makes a figure of the common width and `height` inches, with one axes or an array of them. Also sets matplotlib
    to the notebooks' style."""
    rcParams.update(STYLE)
    figure = Figure(figsize=(8.5, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def colour(label: str, index: int = 0) -> str:
    """The colour in COLOURS for the first word of `label`, or else the series colour number `index`."""
    return COLOURS.get(label.split(" ")[0].rstrip(",:"), SERIES[index % len(SERIES)])


def titled(axes: Axes, title: str, source: str) -> None:
    """Sets the title, and under it, in plain type, the source of the numbers."""
    axes.set_title(title, pad=20)
    at = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(source, (0, 1), (0, 7), fontsize=9, color="#444444", **at)


def legend_below(axes: Axes, last: Sequence[str] = ()) -> None:
    """Puts the legend of `axes` under the figure, in drawing order but `last` last, on one line if it fits."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(entries, key=lambda label: label in last)
    fits = sum(len(label) + 6 for label in labels) < 110
    handles = [entries[label] for label in labels]
    axes.figure.legend(handles, labels, loc="outside lower left", ncols=len(labels) if fits else 1)


def lines_from_top(axes: Axes, labels: Sequence[str], **options: Any) -> None:
    """Labels the y axis with one label per line, the first at the top, without grid lines."""
    axes.set_yticks(range(len(labels)), labels, **options)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def plain_ticks(axis: Any, numbers: Sequence[float] | None = None) -> None:
    """Labels a logarithmic axis with plain numbers (1, 2, 5, 10, ...) instead of powers of ten, over at least a decade.
    numbers: the exact ticks; one that is too close to the one before gets no label."""
    axis.set_minor_locator(NullLocator())
    if numbers is None:
        low, high = axis.get_view_interval()
        if not 0 < low < high:  # an empty plot
            low, high = 1.0, 10.0
        wider = max(1.0, math.sqrt(10 * low / high))
        axis.axes.set(**{f"{axis.axis_name}lim": (low / wider, high * wider)})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1_000 * low else (1,)))
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        return
    labels, written = [], 0.0
    for number in numbers:
        labels.append(f"{number:,}" if number >= 1.3 * written else "")  # closer ones would overlap
        written = number if labels[-1] else written
    axis.set_ticks(list(numbers), labels)


def save(figure: Figure, folder: Path, name: str) -> Figure:
    """Writes `figure` to `folder`/<name>.png atomically, and makes a notebook display exactly those bytes."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    # A palette takes a fifth of the bytes, which executed notebooks embed in base64.
    Image.open(drawn).convert("RGB").quantize(64, Image.Quantize.FASTOCTREE).save(packed, "png", optimize=True)
    data = packed.getvalue()
    write_whole(Path(folder) / f"{name}.png", data)
    width_px = round(figure.get_figwidth() * DISPLAY_DPI)
    figure._repr_png_ = lambda: (data, {"width": width_px})  # a figure made without pyplot has no display hook
    return figure


# ---- figures of several notebooks


def bars(
    rows: Mapping[str, Mapping[str, float]],
    xlabel: str,
    title: str,
    folder: Path,
    name: str,
    *,
    total: str = "{:.3g}",
    source: str = "",
    real_time: bool = False,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Draws horizontal stacked bars, label -> part -> length, with the total at the end of each. total: its format.
    real_time: marks the duration of a frame. marks: by label, a dashed line in the bar at the time that reading the
    weights would take."""
    figure, axes = new(1.9 + 0.45 * len(rows))
    labels, left = list(rows), np.zeros(len(rows))
    for index, part in enumerate(dict.fromkeys(part for row in rows.values() for part in row)):
        width = np.array([rows[label].get(part, 0.0) for label in labels])
        axes.barh(labels, width, left=left, height=0.6, color=colour(part, index), label=part, edgecolor="white")
        left += width
    for index, length in enumerate(left):
        axes.annotate(total.format(length), (length, index), (5, 0), backgroundcolor="white", **BESIDE)
    for label, value in (marks or {}).items():
        line = labels.index(label)
        style = {"color": COLOURS["limit"], "linestyle": "--", "label": "weight bytes alone"}
        axes.vlines(value, line - 0.42, line + 0.42, **style)
    lines_from_top(axes, labels)
    if real_time:
        axes.axvline(FRAME_MS, color=COLOURS["limit"], linestyle="--", label=REAL_TIME)
    axes.set(xlabel=xlabel, xlim=(0, 1.13 * max(left.max(), FRAME_MS if real_time else 0)))
    titled(axes, title, source) if source else axes.set_title(title)
    legend_below(axes, last=[REAL_TIME])
    return save(figure, folder, name)


def chunk_timeline(chunks: Sequence[Any], folder: Path, name: str = "chunk_timeline", title: str = "") -> Figure:
    """Draws generated audio and audio needed by playback over the time since the call; each step is a chunk.

    Playback is that of `mktts.engine.metrics.play`. Top: the staircase of generated audio and the line of real-time
    playback, with a grid of codec frames if the utterance is short enough. Bottom: audio that was still unplayed when
    each chunk arrived."""
    ready_ms, samples = [chunk.timings.ready_ms for chunk in chunks], [len(chunk.pcm) for chunk in chunks]
    player = play(ready_ms, samples)
    ready_s, start_s = np.asarray(ready_ms) / 1e3, np.asarray(player.starts_ms) / 1e3
    length_s = np.asarray(samples) / SAMPLE_RATE_HZ
    end_s = np.cumsum(length_s)
    begin_s = end_s - length_s
    figure, (top, bottom) = new(5.2, 2, sharex=True, height_ratios=(2.4, 1))
    top.step([0, *ready_s], [0, *end_s], where="post", color=COLOURS["mktts"], label="generated")
    top.plot(ready_s, end_s, "o", color=COLOURS["mktts"], markersize=4)
    needed = np.column_stack([start_s, start_s + length_s]).ravel(), np.column_stack([begin_s, end_s]).ravel()
    top.plot(*needed, color=COLOURS["limit"], linestyle="--", label="needed by real-time playback")
    late = np.append(False, start_s[1:] > start_s[:-1] + length_s[:-1])
    if player.underruns:
        top.plot(start_s[late], begin_s[late], "X", color=COLOURS["underrun"], markersize=9, label="underrun")
    top.set(xlim=(0, None), ylim=(0, None), ylabel="audio (s)")
    if end_s[-1] <= FRAME_GRID_LIMIT_S:
        top.yaxis.set_minor_locator(MultipleLocator(FRAME_MS / 1e3))
        top.grid(which="minor", axis="y", color="#eeeeee", linewidth=0.6)
        top.tick_params(which="minor", axis="y", length=0)
        top.set_ylabel(f"audio (s), grid {FRAME_MS:.0f} ms")
    played_s = np.clip(ready_s[:, None] - start_s[None, :], 0, length_s[None, :]).sum(axis=1)
    bottom.stem(ready_s, (begin_s - played_s) * 1e3, linefmt=COLOURS["mktts"], markerfmt="o", basefmt=" ")
    bottom.axhline(0, color=COLOURS["limit"], linewidth=1)
    facts = f"first PCM after {ready_ms[0]:.0f} ms, underruns: {player.underruns}"
    top.set_title(f"{title}: {facts}" if title else f"F{facts[1:]}")
    bottom.set(xlabel="time since the call (s)", ylabel="unplayed when a\nchunk arrives (ms)")
    top.legend(loc="lower right")  # the area below the line of playback is always empty
    return save(figure, folder, name)


def diagram(
    boxes: Mapping[str, tuple[float, float, str]],
    arrows: Sequence[tuple[str, str]],
    folder: Path,
    name: str,
    title: str,
) -> Figure:
    """Draws boxes joined by arrows. boxes: key -> (column, line from the top, text); arrows: pairs of keys."""
    x, y, _ = zip(*boxes.values(), strict=True)
    figure, axes = new(0.9 + 0.8 * (max(y) - min(y) + 1))
    framed = {"bbox": {"boxstyle": "round,pad=0.5", "facecolor": "white"}, "ha": "center", "va": "center"}
    drawn = {key: axes.text(*where, words, **framed, fontsize=8) for key, (*where, words) in boxes.items()}
    for start, end in arrows:
        ends = {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
        axes.annotate("", boxes[end][:2], boxes[start][:2], arrowprops={"arrowstyle": "-|>", "color": "black", **ends})
    axes.set(xlim=(min(x) - 0.5, max(x) + 0.5), ylim=(max(y) + 0.5, min(y) - 0.5), title=title)
    axes.set_axis_off()
    return save(figure, folder, name)
