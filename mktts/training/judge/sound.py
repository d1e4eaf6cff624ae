"""From the audio of many utterances to figures of the sound: buzz, click, silence before speech, loudness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mktts.measure.metrics import percentiles
from mktts.training.judge.intervals import bootstrap, of_median
from mktts.training.judge.listener import Listened
from mktts.training.judge.loudness import TARGET_LUFS

DEFINITIONS = {
    "buzz_20ms": "correlation of 3.5 to 7.2 kHz of 60 ms with the 60 ms that are 20 ms later, median of an utterance",
    "buzz_80ms": "the same 80 ms later",
    "click_dbfs": "level of sample 0; an utterance whose sample 0 is zero counts as -120",
    "start_dbfs": "loudest sample of the first 10 ms above 1 kHz",
    "lead_ms": "to the first 10 ms whose RMS is above -45 dBFS",
    "lufs": "integrated loudness (ITU-R BS.1770-4) of an utterance, mean over a speaker's",
}
_SILENT_DBFS = -120.0

Figures = dict[str, Any]


def section(listened: Sequence[Listened]) -> Figures:
    """For each voice its figures with 95 % intervals over utterances, and the loudness of each speaker."""
    voices = [name for name in listened[0].voices if listened[0].voices[name].sound]
    return {"definitions": DEFINITIONS, **{name: _figures(listened, name) for name in voices}}


def _figures(listened: Sequence[Listened], voice: str) -> Figures:
    sounds = [one.voices[voice].sound for one in listened]
    kept = [sound for sound in sounds if sound is not None]
    leads = [sound.lead_ms for sound in kept if sound.lead_ms is not None]
    return {
        "buzz_20ms": _median([sound.buzz for sound in kept]),
        "buzz_80ms": _median([sound.frame_buzz for sound in kept]),
        "click_dbfs": _median([_SILENT_DBFS if s.click_dbfs is None else s.click_dbfs for s in kept]),
        "start_dbfs": _median([_SILENT_DBFS if s.start_dbfs is None else s.start_dbfs for s in kept]),
        "lead_ms": {**(percentiles(leads) if leads else {}), "silent": len(kept) - len(leads)},
        "loudness": loudness(listened, voice),
        "utterances": len(kept),
    }


def loudness(listened: Sequence[Listened], voice: str) -> Figures:
    """LUFS of each speaker: the mean over the sentences that all of them say; the spread in LU, loudest less faintest.

    `off_target_lu`: how far the speaker furthest from -23 LUFS is from it.
    """
    speakers = list(dict.fromkeys(one.line.speaker for one in listened))
    levels: dict[str, dict[str, float]] = {}
    for one in listened:
        sound = one.voices[voice].sound
        if sound is not None and sound.lufs is not None:
            levels.setdefault(one.line.said, {})[one.line.speaker] = sound.lufs
    rows = np.array([[of[name] for name in speakers] for of in levels.values() if len(of) == len(speakers)])
    if not len(rows):
        return {"speakers": {}, "spread_lu": None, "interval_95": None, "off_target_lu": None, "sentences": 0}
    means = rows.mean(0)
    return {
        "speakers": dict(zip(speakers, means.tolist(), strict=True)),
        "spread_lu": float(np.ptp(means)),
        "interval_95": bootstrap(len(rows), lambda at: float(np.ptp(rows[at].mean(0)))),
        "off_target_lu": float(np.abs(means - TARGET_LUFS).max()),
        "sentences": len(rows),
    }


def _median(values: Sequence[float | None]) -> Figures:
    found = np.array([value for value in values if value is not None])
    if not len(found):
        return {"median": None, "interval_95": None, "n": 0}
    return {
        "median": float(np.median(found)),
        "interval_95": of_median(found),
        "p5": float(np.percentile(found, 5)),
        "p95": float(np.percentile(found, 95)),
        "max": float(found.max()),
        "n": len(found),
    }
