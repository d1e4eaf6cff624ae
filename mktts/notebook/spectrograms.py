"""Spectrograms side by side: what a listener hears in a hiss that no word error shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mktts.notebook.figure import save, styled
from mktts.spec import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

WINDOW, HOP = 1_024, 240  # 43 ms every 10 ms: lines 50 Hz apart stand apart
TOP_HZ = 8_000.0  # the teacher has nothing above
HISS_HZ = (3_500.0, 7_200.0)
DETAIL_HZ = (5_500.0, 6_500.0)  # of it: twenty lines, if there are any
HISS_S = 0.25
_LOW_DB, _HIGH_DB, _STEP_DB = -100.0, -30.0, 5.0  # of a full-scale sine; steps keep the picture's file small


def spectrogram_db(pcm: np.ndarray, window: int = WINDOW, hop: int = HOP) -> np.ndarray:
    """(n,) float32 at 24 kHz -> (window / 2 + 1, frames) in dB of a full-scale sine; frame i is centred at i * hop."""
    padded = np.pad(pcm.astype(np.float64), window // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    shape = np.hanning(window)
    return 20 * np.log10(np.maximum(np.abs(np.fft.rfft(frames * shape)).T * (2 / shape.sum()), 1e-8))


def hiss_at_s(pcm: np.ndarray, seconds: float = HISS_S) -> float:
    """Where the stretch of `seconds` with the most energy in 3.5 to 7.2 kHz begins, in s; 0 for what is shorter."""
    power = 10 ** (spectrogram_db(pcm) / 10)
    hz = np.fft.rfftfreq(WINDOW, 1 / SAMPLE_RATE_HZ)
    band = power[(hz >= HISS_HZ[0]) & (hz <= HISS_HZ[1])].sum(0)
    width = round(seconds * SAMPLE_RATE_HZ / HOP)
    if len(band) <= width:
        return 0.0
    return float(np.argmax(np.convolve(band, np.ones(width), "valid")) * HOP / SAMPLE_RATE_HZ)


@styled
def draw_spectrograms(clips: Mapping[str, np.ndarray], folder: Path, name: str = "spectrograms") -> Figure:
    """A column for each of `clips` (title -> float32 (n,) at 24 kHz), of the same sentence; saves `folder`/<name>.png.

    Above the whole clip up to 8 kHz; below its strongest hiss from 5.5 to 6.5 kHz in finer bins, where a buzz of 50 Hz
    shows as even lines. Colours are the same everywhere. Raises ValueError for no clip.
    """
    from matplotlib.figure import Figure

    if not clips:
        raise ValueError("expected clips to draw, got none")
    figure = Figure(figsize=(8.5, 5.0), layout="constrained")
    panels = figure.subplots(2, len(clips), squeeze=False, sharey="row")
    longest_s = max(len(pcm) for pcm in clips.values()) / SAMPLE_RATE_HZ
    for (title, pcm), (whole, hiss) in zip(clips.items(), panels.T, strict=True):
        image = _draw(whole, spectrogram_db(pcm), HOP, WINDOW, 0.0)
        whole.set(title=title, xlim=(0, longest_s), ylim=(0, TOP_HZ / 1_000), xlabel="s")
        begin_s = hiss_at_s(pcm)
        first = round(begin_s * SAMPLE_RATE_HZ)
        cut = pcm[first : first + round(HISS_S * SAMPLE_RATE_HZ)]
        _draw(hiss, spectrogram_db(cut, 2 * WINDOW, HOP // 2), HOP // 2, 2 * WINDOW, begin_s)
        hiss.set(
            xlim=(begin_s, begin_s + HISS_S), ylim=(DETAIL_HZ[0] / 1_000, DETAIL_HZ[1] / 1_000), xlabel="s, the hiss"
        )
    for row in panels:
        row[0].set_ylabel("kHz")
    figure.colorbar(image, ax=panels, label="dB of a full-scale sine", shrink=0.6)
    return save(figure, folder, name)


def _draw(axes: Axes, levels_db: np.ndarray, hop: int, window: int, begin_s: float) -> AxesImage:
    """One spectrogram in steps of 5 dB."""
    shown = np.clip(np.round(levels_db / _STEP_DB) * _STEP_DB, _LOW_DB, _HIGH_DB)
    half_s, bin_khz = hop / SAMPLE_RATE_HZ / 2, SAMPLE_RATE_HZ / window / 1_000
    end_s = begin_s + (levels_db.shape[1] - 1) * hop / SAMPLE_RATE_HZ
    extent = (begin_s - half_s, end_s + half_s, -bin_khz / 2, SAMPLE_RATE_HZ / 2_000 + bin_khz / 2)
    axes.grid(False)
    return axes.imshow(
        shown, origin="lower", aspect="auto", extent=extent, cmap="magma", vmin=_LOW_DB, vmax=_HIGH_DB,
        interpolation="nearest",
    )  # fmt: skip
