"""The voice's evidence, its model card and what is shown of both, on a made-up evaluation."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest

from mktts.audio import read_audio, write_audio
from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL, SMALL_FOLDER
from mktts.cli import main, parse
from mktts.errors import CheckpointError
from mktts.training import ship as ship_module
from mktts.training.card import card
from mktts.training.voice_report import Evidence, evidence, quality, reported


def line(value, limit, met):
    return {"value": value, "limit": limit, "met": met}


def words(teacher, student):
    rates = {"teacher": teacher, "student": student}
    return {**rates, "ratio": student / teacher, "interval_95": [1.0, 2.0], "by_speaker": {"slt": rates}}


EVALUATION = {
    "environment": {"date_utc": "2026-01-02T03:04:05+00:00"},
    "settings": {"sentences": 200, "checkpoint": "a/folder/of/somebody"},
    "lines": {
        "a_new_line": line(1.0, 2.0, True),
        "word_error_ratio_closed": line(1.5, 1.25, False),
        "word_error_ratio_free": line(1.1, 1.25, True),
        "lead_ms_max": line(None, 200.0, False),
    },
    "word_errors": {"closed": words(0.1, 0.15), "free": words(0.3, 0.33)},
    "word_errors_codec": {"closed": {"codec": 0.12}},
    "distortion": {"whole": {"median": 5.25}, "codec": {"median": 4.0}},
    "duration_ratio": {"between": [0.8, 1.25]},
    "speakers": {
        "teacher_accuracy": 1.0,
        "student_accuracy": 0.98,
        "median_f0_hz": {"slt": {"teacher": 180.5, "student": None}},
    },
    "utterances": [
        {"speaker": "slt", "audio_s": {"teacher": 2.0, "student": 2.1}},
        {"speaker": "rms", "audio_s": {"teacher": 3.0, "student": 3.2}},
    ],
}
CURVES = {
    "codec": [{"step": 100 * i, "mel": 2 / (i + 1), "fixed_mel": 1.0, "seconds": 1.0} for i in range(1_000)],
    "talker": [
        {"step": i, "code0": 3.0, "codes": 4.0, **({"held_out_code0": 3.1} if i == 7 else {})} for i in range(9)
    ],
}
INDEX = [
    {"name": f"{i}_{who}", "text": text, "speaker": who, "seed": i}
    for i, text in enumerate(("One.", "Two.", "Three."))
    for who in ("slt", "rms", "awb")
]


@pytest.fixture
def run(tmp_path, tiny):
    """The files of a training run and its evaluation, and the arguments of the command that ships them."""
    listen = tmp_path / "listen"
    listen.mkdir()
    for row in INDEX:
        for who in ("teacher", "student"):
            write_audio(listen / f"{row['name']}_{who}.wav", np.zeros(2_400, np.float32))
    for name, content in {
        "listen/index.json": INDEX,
        "evaluation.json": EVALUATION,
        "codec.json": CURVES["codec"],
        "talker.json": CURVES["talker"],
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    return [
        f"--voice={tiny.folder}", f"--evaluation={tmp_path / 'evaluation.json'}", f"--listen={listen}",
        "--curves", str(tmp_path / "codec.json"), str(tmp_path / "talker.json"),
        f"--out={tmp_path / 'voices' / 'small'}", f"--reference={tmp_path / 'reference'}",
    ]  # fmt: skip


def test_lines_say_what_is_required_and_what_falls_short_by_how_much():
    rows = quality(EVALUATION)
    assert [row["figure"] for row in rows][-1] == "a_new_line"
    assert rows[0] == {
        "figure": "word errors over the teacher's, closed vocabulary",
        "measured": 1.5,
        "required": "at most 1.25",
        "met": False,
        "short by": "20%",
    }
    assert [row["met"] for row in rows] == [False, True, False, True]
    assert rows[2]["measured"] == "none" and rows[2]["short by"] == ""


def test_other_figures_stand_beside_the_teachers():
    rows = {row["figure"]: row for row in reported(EVALUATION)}
    first = rows["word error rate, closed vocabulary"]
    assert (first["teacher"], first["student"], first["codec"]) == (0.1, 0.15, 0.12)
    assert rows["median pitch of slt (Hz)"]["student"] == ""
    assert rows["mel-cepstral distortion to the teacher, median (dB)"]["student"] == 5.25


def test_shipping_writes_a_checkpoint_that_opens_its_card_and_the_evidence(run, tmp_path, capsys, tiny):
    for _ in range(2):  # again is harmless: what is there is replaced
        assert main(["train", "ship", *run]) == 0
    shipped = open_checkpoint(tmp_path / "voices" / "small")
    assert all(name.startswith("decoder.") for name in shipped.codec_files.tensors)
    assert shipped.codec_tensors().keys() == tiny.codec_tensors().keys()
    text = (shipped.folder / "README.md").read_text(encoding="utf-8")
    assert "| 1.5 | at most 1.25 | no | 20% |" in text and "Measured on 200 held-out" in text
    assert [path.name for path in (tmp_path / "voices").iterdir()] == ["small"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["size_bytes"] == sum(path.stat().st_size for path in shipped.folder.rglob("*") if path.is_file())

    found = evidence(tmp_path / "reference")
    settings = {"sentences": 200, "checkpoint": "small"}
    assert found.missing == () and found.evaluation == {**EVALUATION, "settings": settings}
    assert [(pair.speaker, pair.text) for pair in found.pairs] == [("slt", "One."), ("rms", "Two."), ("awb", "Three.")]
    assert all(pair.teacher.is_file() and pair.student.is_file() for pair in found.pairs)
    assert len(list((tmp_path / "reference").glob("*.flac"))) == 6 and all(
        pair.previous is None for pair in found.pairs
    )
    assert len(found.curves["codec"]) <= ship_module.MAX_POINTS + 1
    assert found.curves["codec"][-1] == CURVES["codec"][-1] and found.curves["talker"] == CURVES["talker"]


def test_the_voice_before_stays_to_compare_with(run, tmp_path):
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "index.json").write_text(json.dumps(INDEX))
    figure = {"value": 4.7, "unit": "ratio", "n": 9, "interval_95": [4.0, 5.0], "must": ["at most", 2.0], "met": False}
    old = {**EVALUATION, "figures": {"natural_wer_ratio": figure}}
    (reference / "evaluation.json").write_text(json.dumps(old))
    tone = np.full(2_400, 0.25, np.float32)
    write_audio(reference / "0_slt_student.wav", tone)
    new = {**EVALUATION, "figures": {"natural_wer_ratio": {**figure, "value": 1.9, "met": True}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(new))
    assert main(["train", "ship", *run, "--replaces"]) == 0
    for _ in range(2):  # shipped once more, as the same voice: what was before it stays
        found = evidence(reference)
        first, *others = found.pairs
        assert np.allclose(read_audio(first.previous)[0], tone, atol=1e-4)
        assert list(first.clips()) == ["teacher", "voice before", "voice"] and first.student.suffix == ".flac"
        assert all(list(pair.clips()) == ["teacher", "voice"] for pair in others)
        row = quality(found.evaluation)[0]
        assert (row["before"], row["measured"], row["required"], row["met"]) == (4.7, 1.9, "at most 2", True)
        assert row["95 % interval"] == "4 to 5" and "everyday speech" in row["figure"]
        assert "| 4.7 |" in (tmp_path / "voices" / "small" / "README.md").read_text(encoding="utf-8")
        assert main(["train", "ship", *run]) == 0


def test_a_figure_stands_for_the_line_of_the_same_thing():
    figure = {"value": 1.1, "interval_95": None, "must": ["at most", 1.7], "met": True}
    rows = quality({**EVALUATION, "figures": {"grammar_wer_ratio_free": figure, "other": {"value": 3}}})
    assert [row["figure"] for row in rows].count("word errors over the teacher's, free dictation") == 0
    assert len(rows) == 4 and rows[0]["required"] == "at most 1.7" and "95 % interval" not in rows[0]


def test_what_cannot_be_shipped_leaves_the_old_voice(run, tmp_path, capsys):
    assert main(["train", "ship", *run]) == 0
    before = {path.name for path in (tmp_path / "voices" / "small").iterdir()}
    assert main(["train", "ship", f"--voice={tmp_path}", *run[1:]]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "voices" / "small").iterdir()} == before


def test_a_thinned_curve_keeps_its_held_out_points_and_its_end():
    lines = [{"step": i, **({"held_out_code0": 1.0} if i % 10 == 3 else {})} for i in range(995)]
    kept = ship_module.thinned(lines, 50)
    assert sum("held_out_code0" in entry for entry in kept) == 100 and kept[-1] == lines[-1]
    assert sum("held_out_code0" not in entry for entry in kept) <= 51


def test_the_card_says_what_it_is_even_unmeasured(tiny):
    text = card(tiny, None)
    for said in (
        "license: apache-2.0",
        "flite",
        "Carnegie Mellon University",
        "Limits",
        "no cloning",
        "Not measured yet",
    ):
        assert said in text
    assert f"| talker | {tiny.config.talker.num_hidden_layers} | {tiny.config.talker.hidden_size} |" in text


def test_the_cards_commands_are_understood(tiny):
    commands = re.findall(r"python -m mktts (train .*)", card(tiny, None).replace("\\\n", " "))
    assert len(commands) == 5
    for command in commands:
        parse(shlex.split(re.sub(r"\b[HM]\b", "1", command)))  # hours and minutes


def test_the_shipped_card_is_the_one_that_shipping_writes():
    written = card(open_checkpoint(SMALL), evidence().evaluation)
    assert (SMALL_FOLDER / "README.md").read_text(encoding="utf-8") == written


def test_absent_evidence_is_named_and_broken_evidence_refused(tmp_path):
    found = evidence(tmp_path)
    assert found == Evidence(missing=found.missing) and len(found.missing) == 3
    assert "python -m mktts train evaluate" in str(quality(found.evaluation)) + str(reported(found.evaluation))
    (tmp_path / "curves.json").write_text("{")
    with pytest.raises(CheckpointError, match="curves.json"):
        evidence(tmp_path)
