"""From measured utterances to the figures of a voice's quality, and the lines they are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mktts.errors import MetricsError
from mktts.measure.metrics import percentiles
from mktts.measure.recogniser import MODES, rate_ratio
from mktts.training.judge.speakers import Centroids
from mktts.training.judge.utterances import Measured

WORD_ERROR_RATIO = 1.25  # student over teacher, at most
DURATION_RATIO = (0.8, 1.25)
DURATION_SHARE = 0.95  # of the sentences inside, at least
END_MISSES_PER = 500  # utterances, in each of which one may not end by itself
LEAD_MS = 200.0  # of silence, at most
RTF = 0.5
AUDIBLE_TTFC_MS = 250.0
_PERCENTILES = (2.5, 25, 50, 75, 97.5)

Figures = dict[str, Any]


def word_figures(judged: Sequence[Measured], voice: str = "student") -> Figures:
    """By recogniser mode: error rates of teacher and `voice`, their ratio and its 95 % interval (None: no ratio)."""
    said = sum(m.words for m in judged)
    if not said:
        raise MetricsError("expected sentences with words, got none")
    figures: Figures = {}
    for mode in MODES:
        errors = {name: [m.voices[name].errors[mode] for m in judged] for name in ("teacher", voice)}
        ratio = rate_ratio(errors["teacher"], errors[voice])
        figures[mode] = {
            "teacher": sum(errors["teacher"]) / said,
            voice: sum(errors[voice]) / said,
            "ratio": ratio and ratio[0],
            "interval_95": ratio and ratio[1:],
            "words": said,
            "sentences": len(judged),
            "by_speaker": {speaker: _rates(many, mode, voice) for speaker, many in _by_speaker(judged).items()},
        }
    return figures


def duration_figures(judged: Sequence[Measured]) -> Figures:
    """Length of the student's audio over the teacher's."""
    ratios = np.array([m.voices["student"].audio_s / m.voices["teacher"].audio_s for m in judged])
    low, high = DURATION_RATIO
    return {
        "inside": float(((ratios >= low) & (ratios <= high)).mean()),
        "between": list(DURATION_RATIO),
        "percentiles": {f"{q:g}": float(np.percentile(ratios, q)) for q in _PERCENTILES},
        "min": float(ratios.min()),
        "max": float(ratios.max()),
        "n": len(ratios),
    }


def end_figures(spoken: Sequence[Measured]) -> Figures:
    """How often the student said end-of-speech by itself, and what did not: text, speaker and seed make it again."""
    missed = [m for m in spoken if m.finish != "eos"]
    return {
        "utterances": len(spoken),
        "missed": len(missed),
        "finish": dict(Counter(m.finish for m in spoken)),
        "which": [{"text": m.task.text, "speaker": m.task.speaker, "seed": m.task.seed} for m in missed[:20]],
    }


def lead_figures(spoken: Sequence[Measured]) -> Figures:
    """Silence before the first audible 10 ms, in ms. `silent`: utterances that are never audible."""
    leads = [m.lead_ms for m in spoken if m.lead_ms is not None]
    return {
        **(percentiles(leads) if leads else {}),
        "above_limit": sum(lead > LEAD_MS for lead in leads),
        "silent": len(spoken) - len(leads),
        "unit": "ms",
    }


def speaker_figures(judged: Sequence[Measured], centroids: Centroids) -> Figures:
    """Pitch of each speaker, and how often the nearest centroid of the teacher's is the right one."""
    figures: Figures = {"embedding": "mean and standard deviation of mel cepstra 1 to 13, nearest centroid"}
    for name in ("teacher", "student"):
        right = [centroids.nearest(m.voices[name].embedding) == m.task.speaker for m in judged]
        figures[f"{name}_accuracy"] = float(np.mean(right))
    figures["n"] = len(judged)
    figures["median_f0_hz"] = {
        speaker: {name: _median(m.voices[name].f0_hz for m in many) for name in ("teacher", "student")}
        for speaker, many in _by_speaker(judged).items()
    }
    return figures


def distortion_figures(judged: Sequence[Measured], voice: str) -> Figures:
    return {**percentiles(m.voices[voice].distortion_db for m in judged), "unit": "dB"}


def all_figures(spoken: Sequence[Measured], centroids: Centroids) -> Figures:
    """All figures of utterances; the judged ones among them are the sentences compared with the teacher."""
    judged = [m for m in spoken if m.voices]
    figures: Figures = {
        "word_errors": word_figures(judged),
        "distortion": {"whole": distortion_figures(judged, "student")},
        "duration_ratio": duration_figures(judged),
        "end": end_figures(spoken),
        "lead_ms": lead_figures(spoken),
        "speakers": speaker_figures(judged, centroids),
        "utterances": [_row(m) for m in judged],
    }
    if all("greedy" in m.voices for m in judged):
        figures["word_errors_greedy"] = word_figures(judged, "greedy")
    if all("codec" in m.voices for m in judged):
        figures["distortion"]["codec"] = distortion_figures(judged, "codec")
        figures["word_errors_codec"] = word_figures(judged, "codec")
    return figures


def lines(figures: Figures) -> dict[str, Figures]:
    """Each line of quality: value, limit, and whether it is met; without the lines that were not measured."""
    found: dict[str, Figures] = {}
    if "word_errors" in figures:
        found |= _lines_of_sentences(figures)
    if "speed" in figures:
        found["rtf_median"] = _line(figures["speed"]["rtf"]["median"], RTF)
        audible = None if figures["speed"]["never_audible"] else figures["speed"]["audible_ttfc_ms"]["median"]
        found["audible_ttfc_ms_median"] = _line(audible, AUDIBLE_TTFC_MS)
    return found


def _lines_of_sentences(figures: Figures) -> dict[str, Figures]:
    end, lead, words = figures["end"], figures["lead_ms"], figures["word_errors"]
    found = {f"word_error_ratio_{mode}": _line(words[mode]["ratio"], WORD_ERROR_RATIO) for mode in MODES}
    found["duration_inside"] = _line(figures["duration_ratio"]["inside"], DURATION_SHARE, least=True)
    found["end_missed"] = _line(end["missed"], max(1, end["utterances"] // END_MISSES_PER))
    found["lead_ms_max"] = _line(None if lead["silent"] else lead["max"], LEAD_MS)
    return found


def _line(value: float | None, limit: float, least: bool = False) -> Figures:
    met = value is not None and (value >= limit if least else value <= limit)
    return {"value": value, "limit": limit, "met": met}


def _row(m: Measured) -> Figures:
    """One judged sentence."""
    return {
        "text": m.task.text,
        "speaker": m.task.speaker,
        "seed": m.task.seed,
        "finish": m.finish,
        "words": m.words,
        "distortion_db": m.voices["student"].distortion_db,
        "audio_s": {name: voice.audio_s for name, voice in m.voices.items()},
        "errors": {name: voice.errors for name, voice in m.voices.items()},
        "heard": {name: voice.heard for name, voice in m.voices.items()},
    }


def _rates(judged: Sequence[Measured], mode: str, voice: str) -> dict[str, float]:
    said = sum(m.words for m in judged)
    return {name: sum(m.voices[name].errors[mode] for m in judged) / said for name in ("teacher", voice)}


def _by_speaker(judged: Iterable[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for m in judged:
        found.setdefault(m.task.speaker, []).append(m)
    return found


def _median(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return float(np.median(kept)) if kept else None
