"""The trained voice on paper: how it was made, what was measured, and pairs to listen to. For notebook 07 and the card.

outputs/reference/voice holds what `mktts.training.ship` put there: curves.json (stage -> the lines that its training
printed), evaluation.json (of `mktts.training.judge.evaluate`), and NAME_teacher.wav, NAME_student.wav of
index.json's names. A file that is absent is no error here: what shows it says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.common import read_json
from mktts.notebook.figure import COLOURS, SERIES, legend_below, new, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES, EVALUATION, INDEX = "curves.json", "evaluation.json", "index.json"
START_SHARE = 0.03  # of the steps: the fall from untrained weights, which a figure leaves out
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


@dataclass(frozen=True)
class Pair:
    """One sentence by the teacher and by the student: two WAV files."""

    text: str
    speaker: str
    teacher: Path
    student: Path


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
    pairs = tuple(
        Pair(row["text"], row["speaker"], *(folder / f"{row['name']}_{who}.wav" for who in ("teacher", "student")))
        for row in index or ()
    )
    found = {CURVES: curves, EVALUATION: evaluation, INDEX: index}
    missing = tuple(f"{name}: not committed yet" for name, content in found.items() if content is None)
    return Evidence(curves or {}, evaluation, pairs, missing)


def quality(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The lines of quality as rows of a table: what was measured, what is required, whether it is met."""
    if evaluation is None:
        return [{"figure": NOT_MEASURED}]
    rows = []
    lines = evaluation["lines"]
    for name in [*(name for name in _LINES if name in lines), *(name for name in lines if name not in _LINES)]:
        line, (what, bound) = lines[name], _LINES.get(name, (name, "limit"))
        value, limit = line["value"], line["limit"]
        rows.append(
            {
                "figure": what,
                "measured": "none" if value is None else float(f"{value:.3g}"),
                "required": f"{bound} {limit:g}",
                "met": line["met"],
                "short by": "" if line["met"] or value is None else f"{abs(value / limit - 1):.0%}",
            }
        )
    return rows


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


@styled
def draw_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path, name: str = "training") -> Figure:
    """Losses over steps, a panel for each stage that has lines; saves `folder`/<name>.png.

    Codec: log-mel distance of the step's crops and of a fixed set, and where discriminators join. Talker: cross
    entropy of code 0 and of codes 1 to 15, in training and on held-out texts.
    """
    shown = {
        "codec": {"mel": "training crops", "fixed_mel": "the same crops every time"},
        "talker": {
            "code0": "code 0, training",
            "held_out_code0": "code 0, held out",
            "codes": "codes 1-15, training",
            "held_out_codes": "codes 1-15, held out",
        },
    }
    labels = {"codec": "log-mel distance", "talker": "cross entropy (nats)"}
    stages = [stage for stage in shown if curves.get(stage)] or ["codec"]
    figure, panels = new(2.9 * len(stages), rows=len(stages))
    for axes, stage in zip(panels, stages, strict=True):
        families = list(dict.fromkeys(key.removeprefix("held_out_") for key in shown[stage]))
        for key, label in shown[stage].items():
            colour = SERIES[families.index(key.removeprefix("held_out_"))]
            points = [(line["step"], line[key]) for line in curves.get(stage, ()) if key in line]
            if points:
                style = {"marker": ".", "linestyle": "--"} if key.startswith("held_out") else {}
                axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.2, **style)
        joined = [line["step"] for line in curves.get(stage, ()) if "judges" in line]
        if joined:
            axes.axvline(joined[0], color=COLOURS["other"], linestyle=":", label="discriminators join")
        axes.set(xlabel="step", ylabel=labels[stage])
        _leave_out_the_start(axes)
        axes.set_title(f"Stage {1 + list(shown).index(stage)}: {stage}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
    return save(figure, folder, name)


def _leave_out_the_start(axes: Axes) -> None:
    """Scales the y axis to what comes after the first steps, whose losses would flatten all the rest."""
    curves = [np.asarray(line.get_xydata()) for line in axes.lines if len(line.get_xydata()) > 2]
    if not curves:
        return
    last = max(curve[:, 0].max() for curve in curves)
    later = [curve[curve[:, 0] >= START_SHARE * last, 1] for curve in curves]
    values = np.concatenate([found if len(found) else curve[:, 1] for found, curve in zip(later, curves, strict=True)])
    margin = 0.06 * (values.max() - values.min() or 1.0)
    axes.set_ylim(values.min() - margin, values.max() + margin)


@styled
def draw_durations(evaluation: Mapping[str, Any], folder: Path, name: str = "durations") -> Figure:
    """Length of each judged sentence, student over teacher, by speaker, within the required band."""
    figure, (axes,) = new(5.4)
    rows = evaluation["utterances"]
    longest = max(row["audio_s"]["teacher"] for row in rows)
    low, high = evaluation["duration_ratio"]["between"]
    ends = np.array([0.0, longest])
    axes.fill_between(ends, low * ends, high * ends, color=COLOURS["limit"], alpha=0.12, label=f"{low:g} to {high:g}")
    for colour, speaker in zip(SERIES, dict.fromkeys(row["speaker"] for row in rows), strict=False):
        points = [(r["audio_s"]["teacher"], r["audio_s"]["student"]) for r in rows if r["speaker"] == speaker]
        axes.plot(*zip(*points, strict=True), ".", color=colour, label=speaker)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="teacher (s)", ylabel="student (s)", aspect="equal")
    axes.set_title(f"Length of {len(rows)} held-out sentences, a dot each")
    legend_below(axes)
    return save(figure, folder, name)


def _both(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "" if figures[name] is None else figures[name] for name in ("teacher", "student")}
