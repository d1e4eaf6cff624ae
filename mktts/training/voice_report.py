"""The trained voice on paper: how it was made, what was measured, pairs to listen to. For 09_voice and the card.

outputs/reference/voice holds what `mktts.training.ship` put there: curves.json (stage -> the lines that its training
printed), evaluation.json (of `mktts.training.judge.evaluate`), and NAME_teacher, NAME_student and, where a voice was
replaced, NAME_previous of index.json's names, .flac or .wav. A file that is absent is no error here: what shows it
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mktts.common import read_json

CURVES, EVALUATION, INDEX = "curves.json", "evaluation.json", "index.json"
NOT_MEASURED = "not measured yet: python -m mktts train evaluate"

# Of evaluation.json's "lines": what it is, how its limit reads.
_LINES = {
    "word_error_ratio_closed": ("word errors over the teacher's, closed vocabulary", "at most"),
    "word_error_ratio_free": ("word errors over the teacher's, free dictation", "at most"),
    "duration_inside": ("share of sentences of 0.8 to 1.25 times the teacher's length", "at least"),
    "end_missed": ("utterances that did not end by themselves", "at most"),
    "lead_ms_max": ("longest silence before the first sound (ms)", "at most"),
    "rtf_median": ("real-time factor, median, CPU", "at most"),
    "audible_ttfc_ms_median": ("audible time to first chunk, median, CPU (ms)", "at most"),
}
# The lines that a figure stands for, which has a limit of its own.
_FIGURE_OF = {
    "word_error_ratio_closed": "grammar_wer_ratio_closed",
    "word_error_ratio_free": "grammar_wer_ratio_free",
    "duration_inside": "durations_inside",
    "end_missed": "ends_missed",
    "rtf_median": "rtf",
}
FIGURES = {
    "natural_wer_ratio": "word errors over the teacher's, everyday speech, free dictation",
    "natural_wer_ratio_best": "word errors over the teacher's, everyday speech, the best speaker",
    "natural_wer_teacher": "the teacher's own word errors on everyday speech",
    "grammar_wer_ratio_free": "word errors over the teacher's, the grammar's sentences, free dictation",
    "grammar_wer_ratio_closed": "word errors over the teacher's, the grammar's sentences, closed vocabulary",
    "codec_wer_ratio_free": "the codec alone, free dictation",
    "codec_wer_ratio_closed": "the codec alone, closed vocabulary",
    "buzz_20ms": "noise that repeats after 20 ms (correlation, 3.5 to 7.2 kHz)",
    "form_wer_ratio_worst": "word errors in the worst written form, over as written",
    "numbers_right": "written numbers right, of 60, by the words",
    "numbers_heard": "written numbers right, of 60, by ear",
    "click_dbfs": "click at the start (dBFS)",
    "lead_ms": "silence before the first sound, median (ms)",
    "loudness_spread_lu": "loudest speaker over the faintest (LU)",
    "loudness_off_target_lu": "speaker furthest from -23 LUFS (LU)",
    "ends_missed": "utterances that did not end by themselves",
    "durations_inside": "share of sentences of 0.8 to 1.25 times the teacher's length",
    "speakers_right": "share of sentences nearest to their own speaker",
    "same_codes_as_upstream": "sentences with the same codes as upstream's",
    "rtf": "real-time factor, median, CPU",
}


@dataclass(frozen=True)
class Pair:
    """One sentence by the teacher and by the student, and by the voice that was there before it: audio files."""

    text: str
    speaker: str
    teacher: Path
    student: Path
    previous: Path | None = None

    def clips(self) -> dict[str, Path]:
        """Who says it -> the file: teacher, the voice before where there is one, the voice of today."""
        before = {"voice before": self.previous} if self.previous else {}
        return {"teacher": self.teacher, **before, "voice": self.student}


@dataclass(frozen=True)
class Evidence:
    """What lies in the folder. missing: one line for each thing that does not."""

    curves: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    pairs: tuple[Pair, ...] = ()
    missing: tuple[str, ...] = ()


def reference() -> Path:
    """Where the committed evidence lies."""
    from mktts.notebook.nb import repository

    return repository() / "outputs" / "reference" / "voice"


def evidence(folder: Path | None = None) -> Evidence:
    """Reads `folder`, or the committed one. Raises CheckpointError for a file that is there and cannot be read."""
    folder = folder or reference()
    curves, evaluation, index = (
        read_json(folder / name) if (folder / name).is_file() else None for name in (CURVES, EVALUATION, INDEX)
    )
    pairs = tuple(_pair(folder, row) for row in index or ())
    found = {CURVES: curves, EVALUATION: evaluation, INDEX: index}
    missing = tuple(f"{name}: not recorded yet" for name, content in found.items() if content is None)
    return Evidence(curves or {}, evaluation, pairs, missing)


def _pair(folder: Path, row: Mapping[str, Any]) -> Pair:
    teacher, student, previous = (clip(folder, row["name"], who) for who in ("teacher", "student", "previous"))
    return Pair(row["text"], row["speaker"], teacher, student, previous if previous.is_file() else None)


def clip(folder: Path, name: str, who: str) -> Path:
    """The file of one sentence: NAME_WHO.flac, or .wav where there is no such."""
    path = folder / f"{name}_{who}.flac"
    return path if path.is_file() else path.with_suffix(".wav")


def quality(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What is required as rows of a table: what was measured, the limit, whether it is met.

    First the record's `figures`, then those of its `lines` that no figure stands for.
    """
    if evaluation is None:
        return [{"figure": NOT_MEASURED}]
    figures = {name: row for name, row in evaluation.get("figures", {}).items() if "must" in row}
    before = evaluation.get("previous", {})
    rows = []
    for name in [*(name for name in FIGURES if name in figures), *(name for name in figures if name not in FIGURES)]:
        figure = figures[name]
        was = {"before": before[name]["value"]} if name in before and before[name]["value"] is not None else {}
        what = FIGURES.get(name, name.replace("_", " "))
        rows.append(_row(what, figure["value"], *figure["must"], figure["met"], figure["interval_95"]) | was)
    lines = {name: line for name, line in evaluation["lines"].items() if _FIGURE_OF.get(name) not in figures}
    for name in [*(name for name in _LINES if name in lines), *(name for name in lines if name not in _LINES)]:
        line, (what, bound) = lines[name], _LINES.get(name, (name, "limit"))
        rows.append(_row(what, line["value"], bound, line["limit"], line["met"]))
    return rows


def _row(
    what: str, value: float | None, bound: str, limit: float, met: bool, interval: Sequence[float] | None = None
) -> dict[str, Any]:
    short = "" if met or not value or limit <= 0 else f"{abs(value / limit - 1):.0%}"
    between = {"95 % interval": "{:.3g} to {:.3g}".format(*interval)} if interval else {}
    measured = "none" if value is None else float(f"{value:.3g}")
    return {"figure": what, "measured": measured, **between, "required": f"{bound} {limit:g}", "met": met} | {
        "short by": short
    }


def reported(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Figures without a limit: word error rates, mel-cepstral distortion, what tells the speakers apart."""
    if evaluation is None:
        return [{"figure": NOT_MEASURED}]
    rows: list[dict[str, Any]] = []
    modes = {"closed": "closed vocabulary", "free": "free dictation"}
    for mode, figures in evaluation["word_errors"].items():
        row = {"figure": f"word error rate, {modes.get(mode, mode)}", **_both(figures)}
        rows.append(row | {"codec": evaluation.get("word_errors_codec", {}).get(mode, {}).get("codec", "")})
        for speaker, rates in figures["by_speaker"].items():
            rows.append({"figure": f"of {speaker}", **_both(rates)})
    distortion = evaluation["distortion"]
    rows.append(
        {
            "figure": "mel-cepstral distortion to the teacher, median (dB)",
            "student": distortion["whole"]["median"],
            "codec": distortion.get("codec", {}).get("median", ""),
        }
    )
    who = evaluation["speakers"]
    right = {name: who[f"{name}_accuracy"] for name in ("teacher", "student")}
    rows.append({"figure": "share of sentences nearest to their own speaker", **right})
    for speaker, pitch in who["median_f0_hz"].items():
        rows.append({"figure": f"median pitch of {speaker} (Hz)", **_both(pitch)})
    return rows


def _both(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "" if figures[name] is None else figures[name] for name in ("teacher", "student")}
