"""How like the teacher's audio the codec's copy of it is, sample for sample in step: what no recogniser says.

* Log-spectral distance (mktts.training.judge.signal): how far spectra are off, dB. It counts every bin alike, heard or
  not: two noises of the same spectrum are 7.9 dB apart, so a copy that draws its own noise, as it should, is not near
  0. It tells versions of one codec apart; it does not say how speech sounds.
* STOI (Taal et al. 2011) and extended STOI (Jensen and Taal 2016), by the package pystoi: correlation of the
  envelopes of third-octave bands up to 5 kHz over 384 ms, 0 to 1; above 0.9 speech is as good as fully understood by
  people. They were made for noise and noise reduction: buzz and a wrong timbre hardly count, nothing above 5 kHz does.

Neither can be had of the student, whose timing is its own; mel-cepstral distortion (mktts.training.judge.mcd) warps
time. PESQ is left out: its reference code is not free.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mktts.errors import BackendUnavailable
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.judge.intervals import of_median
from mktts.training.judge.signal import log_spectral_distance_db

_LEAST_S = 0.6  # of audio: STOI needs 384 ms of speech after its pauses are taken out


@dataclass(frozen=True)
class Likeness:
    """stoi, estoi: None where there is too little speech."""

    log_spectral_distance_db: float
    stoi: float | None
    estoi: float | None


def likeness_of(teacher: np.ndarray, copy: np.ndarray) -> Likeness:
    """Of two recordings in step, float32 (n,) at 24 kHz. Raises BackendUnavailable without pystoi."""
    length = min(len(teacher), len(copy))
    teacher, copy = teacher[:length], copy[:length]
    found = [_stoi(teacher, copy, extended) for extended in (False, True)]
    return Likeness(log_spectral_distance_db(teacher, copy), *found)


def section(found: Sequence[Likeness]) -> dict[str, Any]:
    """Medians with 95 % intervals over sentences."""
    names = {"log_spectral_distance_db": "dB", "stoi": "", "estoi": ""}
    rows: dict[str, Any] = {}
    for name, unit in names.items():
        values = np.array([value for one in found if (value := getattr(one, name)) is not None])
        if len(values):
            rows[name] = {"median": float(np.median(values)), "interval_95": of_median(values), "n": len(values)}
            rows[name]["unit"] = unit
    return rows


def _stoi(teacher: np.ndarray, copy: np.ndarray, extended: bool) -> float | None:
    try:
        from pystoi import stoi
    except ImportError as error:
        raise BackendUnavailable(f"STOI needs the package pystoi: {error}") from None
    if len(teacher) < _LEAST_S * SAMPLE_RATE_HZ or not teacher.any():
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = float(stoi(teacher.astype(np.float64), copy.astype(np.float64), SAMPLE_RATE_HZ, extended=extended))
    too_short = any("Not enough STFT frames" in str(warning.message) for warning in said)
    return None if too_short or not np.isfinite(found) else found
