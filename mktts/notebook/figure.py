"""How every figure of the project looks and is saved; `mktts.notebook.plots` draws them.

Colours are those of Okabe and Ito (2008), distinguishable with every common colour-vision deficiency; one thing has one
colour in every figure.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mktts.common import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "talker": "#0072B2",
    "predictor": "#E69F00",
    "codec": "#009E73",
    "prefill": "#CC79A7",
    "launch": "#56B4E9",
    "other": "#999999",
    "product": "#009E73",  # inside a launch: a matrix product, a hop between blocks, a wait for weights
    "hop": "#D55E00",
    "weights": "#F0E442",
    "mktts": "#0072B2",
    "faster-qwen3-tts": "#CC79A7",
    "upstream": "#D55E00",
    "limit": "#444444",  # what playback or a tolerance demands
    "underrun": "#AA1133",
}
SERIES = ("#0072B2", "#CC79A7", "#56B4E9", "#000000", "#009E73")  # for what COLOURS lacks
DPI = 144
DISPLAY_DPI = 96  # a saved figure is shown at this size, so that text is as large as the notebook's

Draw = TypeVar("Draw", bound=Callable[..., Any])


def style() -> dict[str, Any]:
    """Matplotlib settings of every figure, for `matplotlib.rc_context`."""
    return {
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


def styled(draw: Draw) -> Draw:
    """Runs `draw` under `style()`, leaving the caller's settings alone."""

    @functools.wraps(draw)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        from matplotlib import rc_context

        with rc_context(style()):
            return draw(*arguments, **options)

    return wrapper  # type: ignore[return-value]


def colour(label: str, index: int = 0) -> str:
    """The colour of the thing `label` begins with, or the `index`-th series colour where COLOURS has none."""
    return COLOURS.get(label.split(" ")[0].rstrip(",:"), SERIES[index % len(SERIES)])


def new(height: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of the common width and `height` inches with `rows` axes below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, height), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False, **options)[:, 0])


def titled(axes: Axes, title: str, source: str) -> None:
    """The title, and under it in plain type where the numbers come from."""
    axes.set_title(title, pad=20)
    at = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(source, (0, 1), (0, 7), fontsize=9, color="#444444", **at)


def legend_below(axes: Axes, after: Sequence[str] = ()) -> None:
    """The legend of `axes` under the figure, in drawing order, labels of `after` last; one line if it fits."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(entries, key=lambda label: label in after)
    fits = sum(len(label) + 6 for label in labels) < 110
    handles = [entries[label] for label in labels]
    axes.figure.legend(handles, labels, loc="outside lower left", ncols=len(labels) if fits else 1)


def save(figure: Figure, folder: Path, name: str) -> Figure:
    """Writes `figure` to `folder`/<name>.png, whole or not at all, and makes a notebook show exactly those bytes."""
    from PIL import Image

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    # A palette: a third of the bytes, which executed notebooks carry in base64.
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(packed, "png", optimize=True)
    data = packed.getvalue()
    write_whole(Path(folder) / f"{name}.png", data)
    width_px = round(figure.get_figwidth() * DISPLAY_DPI)
    figure._repr_png_ = lambda: (data, {"width": width_px})  # a figure made without pyplot has no display hook
    return figure
