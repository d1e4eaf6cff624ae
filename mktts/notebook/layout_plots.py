"""Pictures of how the frame kernel lays things out: where a matrix lies on the tape, how an exchange fills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mktts.kernel.grid import WARPS
from mktts.kernel.tape import pack
from mktts.notebook.figure import SERIES, new, save, styled, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def places(rows: int, k: int, folder: Path, name: str = "places") -> Figure:
    """A block's share (rows, k) of a matrix: above, when each value comes on the tape; below, the lane that takes it,
    for the first two rows and the columns of the first fragment's first part."""
    order = pack(torch.arange(1, rows * k + 1).view(1, rows, k))[0].numpy()
    when = np.empty(rows * k)
    when[order[order > 0] - 1] = np.flatnonzero(order > 0)
    when = when.reshape(rows, k)
    figure, (top, bottom) = new(5.4, 2, height_ratios=(2.6, 1))
    image = top.imshow(when * 2 / 1024, aspect="auto", interpolation="nearest", cmap="viridis")
    top.set(xlabel="column", ylabel="row of the block")
    figure.colorbar(image, ax=top, label="place on the tape (KiB)")
    lanes = when[:2, : min(k, 32)].astype(int) % 256 // 8
    image = bottom.imshow(lanes, aspect="auto", interpolation="nearest", cmap="tab20")
    for (row, column), lane in np.ndenumerate(lanes):
        bottom.annotate(str(lane), (column, row), ha="center", va="center", fontsize=7)
    bottom.set(xlabel="column", ylabel="row", yticks=range(len(lanes)))
    bottom.set_title("The lane that takes a value")
    for axes in (top, bottom):
        axes.grid(visible=False)
    titled(top, f"{rows} rows of {k} on one block's tape", f"{WARPS} warps in turns, each two rows a tile")
    return save(figure, folder, name)


@styled
def filling(fresh: Sequence[Sequence[float]], labels: Sequence[str], folder: Path, name: str = "filling") -> Figure:
    """How far an exchange has come over the steps of the blocks: (steps,) tuples of a part of 1 a label."""
    values = np.asarray(fresh, dtype=float)
    figure, (axes,) = new(3.2)
    for index, label in enumerate(labels):
        axes.plot(100 * values[:, index], color=SERIES[index % len(SERIES)], label=label)
    axes.set(xlabel="step of any one block", ylabel="of all (%)", xlim=(0, len(values) - 1))
    titled(axes, "How an exchange fills", "blocks in random order; a step ends where a block polls in vain")
    axes.legend(loc="lower right")
    return save(figure, folder, name)
