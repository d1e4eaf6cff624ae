"""Energy that jumps from one code frame to the next."""

from __future__ import annotations

import numpy as np

from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.judge.signal import NOISE_BAND_HZ, band_passed

_SHORT_S = 0.005  # of the windows whose levels are compared
_FLOOR = 10 ** (-80 / 20)  # of full scale


def edge_steps(samples: np.ndarray, band_hz: tuple[float, float] = NOISE_BAND_HZ) -> float:
    """How much more a band's level changes across edges of 80 ms frames than elsewhere: about 1 for any natural sound.

    samples: (n,) at 24 kHz, at least two frames. The ratio of the mean |change of level in neper| between neighbouring
    windows of 5 ms at the edges, and at all other places; levels are cut off at -80 dBFS.
    """
    short = round(_SHORT_S * SAMPLE_RATE_HZ)
    each = SAMPLES_PER_FRAME // short
    band = band_passed(samples, band_hz)[: len(samples) // SAMPLES_PER_FRAME * SAMPLES_PER_FRAME]
    level = np.log(np.sqrt(np.square(band.reshape(-1, short)).mean(1)) + _FLOOR)
    change = np.abs(np.diff(level))
    at_edges = np.arange(len(change)) % each == each - 1
    return float(change[at_edges].mean() / change[~at_edges].mean())
