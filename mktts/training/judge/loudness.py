"""Loudness by ITU-R BS.1770-4, of one utterance and of a speaker, by the package pyloudnorm."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from mktts.errors import BackendUnavailable
from mktts.spec import SAMPLE_RATE_HZ

TARGET_LUFS = -23.0  # EBU R 128
_BLOCK_S = 0.4  # of the measure: what is shorter has no loudness


def integrated_lufs(pcm: np.ndarray) -> float | None:
    """Integrated loudness of (n,) float32 at 24 kHz, LUFS: K-weighted, gated at -70 LUFS and 10 LU below the rest.

    None for what is shorter than 0.4 s or all below the gate. Raises BackendUnavailable without pyloudnorm.
    """
    if len(pcm) < _BLOCK_S * SAMPLE_RATE_HZ:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the logarithm of silence
        found = float(_meter().integrated_loudness(pcm.astype(np.float64)))
    return found if np.isfinite(found) else None


@cache
def _meter() -> Any:
    try:
        import pyloudnorm
    except ImportError as error:
        raise BackendUnavailable(f"loudness needs the package pyloudnorm: {error}") from None
    return pyloudnorm.Meter(SAMPLE_RATE_HZ, block_size=_BLOCK_S)
