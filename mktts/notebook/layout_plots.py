"""A picture of how the frame kernel lays things out: where a matrix lies on the tape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mktts.kernel.grid import WARPS
from mktts.kernel.tape import pack
from mktts.notebook.figure import new, save, styled, titled

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
