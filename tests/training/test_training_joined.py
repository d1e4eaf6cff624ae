"""Every program in turn, as one types them: from texts to a voice in the package's place that speaks."""

import json
import sys

import pytest
from commands import run
from test_training_teacher import PROGRAM

from mktts.checkpoint import open_checkpoint
from mktts.cli import main
from mktts.synth import Synthesizer
from mktts.training import voice_report

CODEC = (
    "--size tiny --block 2 --batch 2 --crop-frames 7 --judged-frames 1 --adversarial-from 1 --joint-steps 3 "
    "--onsets 0.5 --device cpu --resume --minutes 5"
).split()
TALKER = "--size tiny --block 2 --batch-rows 400 --fresh --device cpu --resume --minutes 5".split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("codec --data absent --out o --minutes 1", "absent: expected shards"),
        ("talker --data absent --codec absent --out o --minutes 1", "absent"),
        ("teacher --program x --texts absent.xz --speakers a --out o", "absent.xz"),
        ("teacher --program x --texts absent.xz", "--speakers"),
        ("texts --corpora absent --out t.xz", "absent: expected usr/share/dict/american-english"),
        ("ship --voice v --evaluation absent --keep k --teacher t --curves c c", "absent"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mktts: ") and error.count("\n") == 1 and said in error
    assert list(tmp_path.iterdir()) == []


def test_the_whole_training_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "say.py").write_text(PROGRAM)

    def last(*words):
        assert run(*words) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert last("train texts", "--count", 8, "--out", "texts.xz")["sentences"] == 8
    say = f"{sys.executable} say.py {{text}} {{wav}}"
    given = ["--program", say, "--texts", "texts.xz", "--speakers", "anna:-3,bob", "--out"]
    assert last("train teacher", *given, "AUDIO") == {"shards": 1}
    assert last("train teacher", *given, "NATURAL", "--clips", 2) == {"shards": 1}
    for steps in (2, 4):  # the second begins where the first stopped, in a folder that has travelled
        words = ["--data", "AUDIO", "--out", f"CODEC{steps}", "--steps", steps, *CODEC]
        assert last("train codec", *words)["step"] == steps
        (tmp_path / f"CODEC{steps}").rename(tmp_path / "CODEC4" if steps == 2 else tmp_path / "CODEC")
    for steps in (2, 4):
        words = ["--data", "AUDIO", "--codec", "CODEC", "--out", "TALKER", "--steps", steps, *TALKER]
        assert last("train talker", *words)["step"] == steps

    judged = ["--checkpoint", "TALKER/voice", "--teacher", "NATURAL", "--keep", "KEEP", "--output", "e.json"]
    assert "comb_worst_band" in last("train evaluate", *judged, "--only", "sound")
    spoken = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "KEEP").iterdir()}
    assert {"comb_worst_band", "ends_missed"} <= last("train evaluate", *judged, "--only", "ends").keys()
    assert spoken == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "KEEP").iterdir()} and len(spoken) == 4

    shipped = ["--voice", "TALKER/voice", "--evaluation", "e.json", "--keep", "KEEP", "--teacher", "NATURAL"]
    shipped += ["--curves", "CODEC", "TALKER", "--out", tmp_path / "small", "--reference", tmp_path / "reference"]
    for _ in range(2):  # the second replaces what the first put there
        assert last("train ship", *shipped)["size_bytes"] > 100_000
    found = voice_report.evidence(tmp_path / "reference")
    assert not found.missing and {pair["speaker"] for pair in found.pairs} == {"anna", "bob"}
    assert [line["step"] for line in found.curves["talker"]] == [2, 4]
    card = (tmp_path / "small" / "README.md").read_text()
    assert "anna and bob" in card and "| comb worst band |" in card and "Kokoro-82M" in card
    checkpoint = open_checkpoint(tmp_path / "small")
    assert all(name.startswith("decoder.") for name in checkpoint.codec_files.tensors)
    with Synthesizer.load(checkpoint, backend="torch", device="cpu") as synthesizer:
        assert len(synthesizer.stream("Hello there.", speaker="bob", max_frames=4).read()) > 0
