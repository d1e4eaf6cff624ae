"""`figures` of evaluation.json: name -> value, unit, n, 95 % interval, and what must be reached.

A figure is met by its point estimate. One that was not measured is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mktts.training.judge.listener import CODEC, STUDENT, TEACHER

AT_MOST, AT_LEAST = "at most", "at least"
# What a voice must reach to be worth shipping.
MUST: Mapping[str, tuple[str, float]] = {
    "natural_wer_ratio": (AT_MOST, 2.0),
    "natural_wer_ratio_best": (AT_MOST, 1.6),
    "natural_wer_teacher": (AT_MOST, 0.08),
    "grammar_wer_ratio_free": (AT_MOST, 1.7),
    "grammar_wer_ratio_closed": (AT_MOST, 1.4),
    "codec_wer_ratio_free": (AT_MOST, 1.2),
    "codec_wer_ratio_closed": (AT_MOST, 1.15),
    "buzz_20ms": (AT_MOST, 0.15),
    "form_wer_ratio_worst": (AT_MOST, 1.1),
    "numbers_right": (AT_LEAST, 57),
    "numbers_heard": (AT_LEAST, 57),
    "click_dbfs": (AT_MOST, -70.0),
    "lead_ms": (AT_MOST, 80.0),
    "loudness_spread_lu": (AT_MOST, 1.0),
    "loudness_off_target_lu": (AT_MOST, 1.0),
    "ends_missed": (AT_MOST, 0),
    "durations_inside": (AT_LEAST, 0.95),
    "speakers_right": (AT_LEAST, 0.95),
    "same_codes_as_upstream": (AT_LEAST, 20),
    "rtf": (AT_MOST, 0.30),
}

Figures = dict[str, Any]


def figures(document: Mapping[str, Any]) -> dict[str, Figures]:
    """All figures of a record of `train evaluate`, of the sections that it has."""
    found: dict[str, Figures] = {}

    def put(name: str, value: float | None, unit: str, n: int, interval: Any = None) -> None:
        bound, limit = MUST.get(name, (None, None))
        row: Figures = {"value": value, "unit": unit, "n": n, "interval_95": interval}
        if bound is not None and limit is not None:
            met = value is not None and (value <= limit if bound == AT_MOST else value >= limit)
            row |= {"must": [bound, limit], "met": met}
        found[name] = row

    def ratio(name: str, of: Mapping[str, Any]) -> None:
        put(name, of["ratio"], "ratio", of["sentences"], of["interval_95"])

    if natural := document.get("natural"):
        ratio("natural_wer_ratio", natural)
        ratio("natural_wer_ratio_best", natural["by_speaker"][natural["best"]])
        for voice in (STUDENT, TEACHER):
            rate = natural[voice]
            put(f"natural_wer_{voice}", rate["rate"], "errors a word", natural["words"], rate["interval_95"])
        if CODEC in natural:
            ratio("natural_codec_wer_ratio", natural[CODEC])
    for key, name in (("word_errors", "grammar"), ("word_errors_codec", "codec")):
        for mode, of in document.get(key, {}).items():
            ratio(f"{name}_wer_ratio_{mode}", of)
    if sound := document.get("sound"):
        of = sound[STUDENT]
        units = {"buzz_20ms": "correlation", "buzz_80ms": "correlation", "click_dbfs": "dBFS", "start_dbfs": "dBFS"}
        for name, unit in units.items():
            put(name, of[name]["median"], unit, of[name]["n"], of[name]["interval_95"])
        put("lead_ms", of["lead_ms"].get("median"), "ms", of["lead_ms"].get("n", 0))
        loud = of["loudness"]
        put("loudness_spread_lu", loud["spread_lu"], "LU", loud["sentences"], loud["interval_95"])
        put("loudness_off_target_lu", loud["off_target_lu"], "LU", loud["sentences"])
    for name, of in document.get("likeness", {}).items():
        put(f"codec_{name}", of["median"], of["unit"], of["n"], of["interval_95"])
    if forms := document.get("forms"):
        worst = forms["forms"].get(forms["worst"], {})
        put("form_wer_ratio_worst", worst.get("ratio"), "ratio", forms["sentences"], worst.get("interval_95"))
    if written := document.get("written"):
        put("numbers_right", written["words"]["right"], "texts", written["words"]["n"])
        if ear := written.get("ear"):
            put("numbers_heard", ear[STUDENT]["best"], "texts", ear["n"])
            put("numbers_heard_teacher", ear[TEACHER]["best"], "texts", ear["n"])
    if end := document.get("end"):
        put("ends_missed", end["missed"], "utterances", end["utterances"])
        put("durations_inside", document["duration_ratio"]["inside"], "share", document["duration_ratio"]["n"])
        put("speakers_right", document["speakers"]["student_accuracy"], "share", document["speakers"]["n"])
    if same := document.get("same_codes"):
        put("same_codes_as_upstream", same["equal"], "sentences", same["sentences"])
    if speed := document.get("speed"):
        put("rtf", speed["rtf"]["median"], "ratio", speed["rtf"]["n"])
    return found
