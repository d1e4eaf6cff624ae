"""The project's figures. Each function takes plain data, saves `folder`/<name>.png and returns the Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mktts.measure import tracks
from mktts.notebook.figure import COLOURS, SERIES, colour, legend_below, new, save, style, styled
from mktts.spec import FRAME_MS, SAMPLE_RATE_HZ
from mktts.speech.metrics import play

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "bytes_per_frame", "chunk_timeline", "comparison", "distribution", "error_over_time", "roofline",
    "stacked_bars", "stage_breakdown", "style",
]  # fmt: skip

REAL_TIME = f"real time ({FRAME_MS:.0f} ms)"
MARKS = "dots: median and 95th percentile"
ZERO_ON_LOG_AXIS = 1e-9  # where an error of exactly 0 is drawn
FRAME_GRID_LIMIT_S = 3.0  # beyond this the grid of single frames would be a grey area


@styled
def chunk_timeline(
    ready_ms: Sequence[float], samples: Sequence[int], folder: Path, name: str = "chunk_timeline", title: str = ""
) -> Figure:
    """Audio generated against audio needed, over the time since the call; one step is one chunk.

    `ready_ms[i]` is when chunk i was in host memory, `samples[i]` its length; the player is that of `metrics.play`.
    Above: the staircase of generated audio and the line that real-time playback follows, on the grid of single codec
    frames where the utterance is short enough. Below: audio still to be played when each chunk arrived.
    """
    player = play(ready_ms, samples)
    ready_s, start_s = np.asarray(ready_ms) / 1e3, np.asarray(player.starts_ms) / 1e3
    length_s = np.asarray(samples) / SAMPLE_RATE_HZ
    end_s = np.cumsum(length_s)
    begin_s = end_s - length_s
    figure, (top, bottom) = new(5.2, rows=2, sharex=True, height_ratios=(2.4, 1))
    top.step([0, *ready_s], [0, *end_s], where="post", color=COLOURS["mktts"], label="generated")
    top.plot(ready_s, end_s, "o", color=COLOURS["mktts"], markersize=4)
    needed = np.column_stack([start_s, start_s + length_s]).ravel(), np.column_stack([begin_s, end_s]).ravel()
    top.plot(*needed, color=COLOURS["limit"], linestyle="--", label="needed by real-time playback")
    late = np.append(False, start_s[1:] > start_s[:-1] + length_s[:-1])
    if player.underruns:
        top.plot(start_s[late], begin_s[late], "X", color=COLOURS["underrun"], markersize=9, label="underrun")
    if end_s[-1] <= FRAME_GRID_LIMIT_S:
        _frame_grid(top)
    played_s = np.clip(ready_s[:, None] - start_s[None, :], 0, length_s[None, :]).sum(axis=1)
    bottom.stem(ready_s, (begin_s - played_s) * 1e3, linefmt=COLOURS["mktts"], markerfmt="o", basefmt=" ")
    bottom.axhline(0, color=COLOURS["limit"], linewidth=1)
    facts = f"first PCM after {ready_ms[0]:.0f} ms, underruns: {player.underruns}"
    top.set_title(f"{title}: {facts}" if title else f"F{facts[1:]}")
    top.set(xlim=(0, None), ylim=(0, None), ylabel=top.get_ylabel() or "audio (s)")
    bottom.set(xlabel="time since the call (s)", ylabel="unplayed when a\nchunk arrives (ms)")
    top.legend(loc="lower right")  # below the line of playback, where nothing is ever drawn
    return save(figure, folder, name)


@styled
def error_over_time(
    errors: Mapping[str, Sequence[float]], limit: float, folder: Path, name: str = "codec_error", title: str = ""
) -> Figure:
    """Largest absolute sample error of each codec frame on a log axis: label -> (T,) errors. `limit`: the tolerance."""
    figure, (axes,) = new(3.9)
    for index, (label, values) in enumerate(errors.items()):
        shown = np.maximum(np.asarray(values, dtype=float), ZERO_ON_LOG_AXIS)
        time_s = np.arange(len(shown)) * FRAME_MS / 1e3
        axes.step(time_s, shown, where="post", color=colour(label, index), label=label)
    tolerance = f"tolerance {limit:.0e}"
    axes.axhline(limit, color=COLOURS["limit"], linestyle="--", linewidth=1.2, label=tolerance)
    axes.set_yscale("log")
    zero = f"\n(0 is drawn at {ZERO_ON_LOG_AXIS:.0e})" if any(np.min(values) == 0 for values in errors.values()) else ""
    axes.set(xlabel="position in the utterance (s)", ylabel=f"largest sample error in\na frame (full scale = 1){zero}")
    axes.set_title(title or "Codec error against one offline pass")
    legend_below(axes, after=[tolerance])
    return save(figure, folder, name)


@styled
def stage_breakdown(
    rows: Mapping[str, Mapping[str, float]], folder: Path, name: str = "stages", title: str = ""
) -> Figure:
    """Milliseconds per frame by stage, one stacked bar per label, against the time a frame lasts."""
    figure, (axes,) = new(1.6 + 0.45 * len(rows))
    longest_ms = stacked_bars(axes, rows, "{:.3g}")
    axes.axvline(FRAME_MS, color=COLOURS["limit"], linestyle="--", label=REAL_TIME)
    axes.set(xlabel="compute per frame (ms)", title=title or "Compute per frame by stage")
    axes.set_xlim(0, max(FRAME_MS, longest_ms) * 1.12)
    legend_below(axes, after=[REAL_TIME])
    return save(figure, folder, name)


@styled
def bytes_per_frame(
    models: Mapping[str, Mapping[str, float]], folder: Path, name: str = "bytes_per_frame", title: str = ""
) -> Figure:
    """Weight bytes one frame reads: label -> component -> bytes."""
    figure, (axes,) = new(1.6 + 0.45 * len(models))
    gigabytes = {label: {part: size / 1e9 for part, size in row.items()} for label, row in models.items()}
    longest = stacked_bars(axes, gigabytes, "{:.3g} GB")
    axes.set(xlabel="weights read per frame (GB)", title=title or "Weights read per frame, one stream")
    axes.set_xlim(0, longest * 1.15)
    legend_below(axes)
    return save(figure, folder, name)


@styled
def distribution(
    samples: Mapping[str, Sequence[float]], unit: str, folder: Path, name: str, title: str, budget: float | None = None
) -> Figure:
    """Empirical cumulative distribution of each label's values; dots on it mark median and 95th percentile."""
    figure, (axes,) = new(3.9)
    for index, (label, values) in enumerate(samples.items()):
        ordered = np.sort(np.asarray(values, dtype=float))
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        median, p95 = np.percentile(ordered, [50, 95])
        shown = f"{label}: median {median:.3g}, p95 {p95:.3g} {unit} (n = {len(ordered)})"
        line = {
            "color": colour(label, index),
            "linestyle": ("-", "--", ":")[index % 3] if label not in COLOURS else "-",
        }
        axes.step([ordered[0], *ordered], [0, *share], where="post", label=shown, **line)  # equal curves stay visible
        marks = np.searchsorted(ordered, [median, p95], side="right") / len(ordered)  # where the curve is there
        axes.plot([median, p95], marks, "o", color=colour(label, index), markersize=5)
    axes.plot([], [], "o", color=COLOURS["limit"], markersize=5, label=MARKS)
    if budget is not None:
        axes.axvline(budget, color=COLOURS["limit"], linestyle="--", label=f"real time ({budget:.0f} {unit})")
    axes.set(xlabel=f"time ({unit})", ylabel="share of measurements", title=title, ylim=(0, 1.02))
    axes.set_xlim(left=0)
    legend_below(axes, after=[MARKS])
    return save(figure, folder, name)


@styled
def roofline(
    bytes_by_model: Mapping[str, float],
    bandwidths_gb_s: Mapping[str, float],
    folder: Path,
    name: str = "roofline",
    title: str = "",
) -> Figure:
    """Least time per frame (bytes / bandwidth) over memory bandwidth: one line per model, a dot where a machine of the
    names above lies."""
    figure, (axes,) = new(5.2)
    span = np.geomspace(min(bandwidths_gb_s.values()) * 0.6, max(bandwidths_gb_s.values()) * 1.7, 50)
    for index, (label, size_bytes) in enumerate(bytes_by_model.items()):
        line = f"{label}: {size_bytes / 1e9:.3g} GB per frame"
        axes.plot(span, size_bytes / span / 1e6, color=SERIES[index], label=line)
        machines = np.array(list(bandwidths_gb_s.values()))
        axes.plot(machines, size_bytes / machines / 1e6, "o", color=SERIES[index], markersize=5)
    axes.axhline(FRAME_MS, color=COLOURS["limit"], linestyle="--", label=REAL_TIME)
    axes.set(xscale="log", yscale="log")
    names = axes.secondary_xaxis("top")
    names.set_xticks(list(bandwidths_gb_s.values()), list(bandwidths_gb_s), rotation=35, ha="left", fontsize=9)
    names.set_xticks([], minor=True)
    names.tick_params(length=2, colors="#444444")
    for bandwidth in bandwidths_gb_s.values():
        axes.axvline(bandwidth, color="#c8c8c8", linewidth=0.8, zorder=0)
    axes.set(xlabel="memory bandwidth (GB/s)", ylabel="least time per frame (ms)")
    axes.set_title(title or "Least time per frame that the weights' bytes allow, one stream")
    legend_below(axes)
    return save(figure, folder, name)


@styled
def comparison(
    rows: Sequence[tuple[str, float]], unit: str, folder: Path, name: str, title: str, budget: float | None = None
) -> Figure:
    """Runs side by side: one dot per (label, value); equal labels share a line, with an upright stroke at their
    median."""
    labels = list(dict.fromkeys(label for label, _ in rows))
    figure, (axes,) = new(1.5 + (0.55 if any("\n" in label for label in labels) else 0.45) * len(labels))
    for index, label in enumerate(labels):
        values = [value for other, value in rows if other == label]
        median = float(np.median(values))
        shade = COLOURS["upstream" if "upstream" in label else "mktts"]
        axes.plot(values, [index] * len(values), "o", color=shade, markersize=6, alpha=0.6)
        axes.plot([median, median], [index - 0.25, index + 0.25], color=shade, linewidth=2.4)
        shown = f"{median:,.0f}" if median >= 1_000 else f"{median:.3g}"
        axes.annotate(shown, (max(values), index), (8, 0), textcoords="offset points", va="center")
    axes.plot([], [], "o", color=COLOURS["limit"], markersize=6, label="a run")
    axes.plot([], [], "|", color=COLOURS["limit"], markersize=12, markeredgewidth=2.4, label="median of equal runs")
    if budget is not None:
        axes.axvline(budget, color=COLOURS["limit"], linestyle="--", label="real time")
    legend_below(axes)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel=unit, title=title, ylim=(len(labels) - 0.5, -0.5))
    axes.set_xlim(0, max([value for _, value in rows] + ([budget] if budget else [])) * 1.12)
    axes.grid(axis="y", visible=False)
    return save(figure, folder, name)


def stacked_bars(axes: Axes, rows: Mapping[str, Mapping[str, float]], total_format: str) -> float:
    """Horizontal stacked bars, the total written at their end. Returns the longest total."""
    labels, left = list(rows), np.zeros(len(rows))
    for index, part in enumerate(dict.fromkeys(part for row in rows.values() for part in row)):
        width = np.array([rows[label].get(part, 0.0) for label in labels])
        axes.barh(labels, width, left=left, height=0.6, color=colour(part, index), label=part, edgecolor="white")
        left += width
    for index, total in enumerate(left):
        label = total_format.format(total)
        axes.annotate(label, (total, index), (5, 0), textcoords="offset points", va="center", backgroundcolor="white")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return float(left.max())


def _frame_grid(axes: Axes) -> None:
    from matplotlib.ticker import MultipleLocator

    axes.yaxis.set_minor_locator(MultipleLocator(FRAME_MS / 1e3))
    axes.grid(which="minor", axis="y", color="#eeeeee", linewidth=0.6)
    axes.tick_params(which="minor", axis="y", length=0)
    axes.set_ylabel(f"audio (s), grid {FRAME_MS:.0f} ms")


@styled
def conversation(
    user: np.ndarray, bot: np.ndarray, folder: Path, name: str = "conversation", bot_is: str = "bot"
) -> Figure:
    """The levels of `user` and `bot` (S,) float32 over time, one above the other; saves `folder`/<name>.png.

    bot_is: what to call the bot's side.
    """
    figure, (axes,) = new(2.8)
    for side, sign, shade, label in ((user, 1, "mktts", "user"), (bot, -1, "codec", bot_is)):
        level = tracks.levels(side)
        times_s = np.arange(len(level)) * tracks.STEP_S
        axes.fill_between(times_s, 0, sign * level, color=COLOURS[shade], label=label, linewidth=0)
    for index, (start_s, end_s) in enumerate(tracks.overlaps(user, bot)):
        label = "both at once" if index == 0 else None
        axes.axvspan(start_s, end_s, color=COLOURS["underrun"], alpha=0.25, label=label, linewidth=0)
    axes.set(xlim=(0, len(user) / SAMPLE_RATE_HZ), ylim=(-1.05, 1.05), yticks=[], xlabel="time (s)")
    axes.set_title("The conversation, each side scaled to its own peak")
    legend_below(axes)
    return save(figure, folder, name)
