"""The order of a whole training, with stand-ins for its commands; and what is brought back from it."""

from __future__ import annotations

import json
import sys
import tarfile
import time

import numpy as np
import pytest
import torch
from commands import run
from test_training_talker import TEXTS, synthetic_clips

from mktts.checkpoint import open_checkpoint
from mktts.errors import CheckpointError, OptionsError
from mktts.spec import NUM_CODEBOOKS
from mktts.training import parts, voice
from mktts.training.codec import sizes as codec_sizes
from mktts.training.codec.fit import save
from mktts.training.codec.model import Codec
from mktts.training.talker import sizes
from mktts.training.talker.train import STATE, open_data
from mktts.training.talker.trainer import TalkerRecipe, TalkerTrainer

# Every command writes what it was told; the teacher makes six shards, half of them when the first has codes; the
# encoder copies; the talker ends some looks after all have codes, or after the encoder has failed.
STAND_IN = """
import pathlib, shutil, sys, time
name, words = sys.argv[1], sys.argv[2:]
given = dict(zip(words[::2], words[1::2]))
value = lambda flag: words[words.index(flag) + 1]
out, codes = pathlib.Path(value("--out")), BASE / "run" / "codes"
def wait(condition):
    until_s = time.monotonic() + 60
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.02)
with (BASE / "order").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if name == "teacher":
    out.mkdir(parents=True, exist_ok=True)
    for i in range(6):
        if i == 3:
            wait(lambda: any(codes.glob("*.npz")))
        (out / f"shard{i}.npz").write_text("x")
elif name == "fit":
    if "--begin" in words:
        sys.exit("no such voice here")
    shutil.copy(BASE / "fitted.pt", out)
elif name == "encode":
    out.mkdir(parents=True, exist_ok=True)
    if (BASE / "full").exists() and any(out.iterdir()):
        sys.exit("no space left")
    part, of = map(int, value("--part").split("/"))
    for path in sorted(pathlib.Path(value("--data")).glob("*.npz"))[part - 1::of]:
        shutil.copy(path, out)
elif name == "codec":
    time.sleep(0.2)
elif name == "talker":
    if "--graphs" in words or "," in value("--device") or "--begin" in words:
        sys.exit("no graphs here")
    if (BASE / "full").exists():
        wait(lambda: (BASE / "order").read_text().count("encode ") > 1)
    else:
        wait(lambda: len(list(codes.glob("*.npz"))) == 6)
    time.sleep(0.5)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.replace("BASE", f"pathlib.Path({str(tmp_path)!r})"))
    monkeypatch.setattr(voice, "command", lambda *words: [sys.executable, str(script), *map(str, words)])
    monkeypatch.setattr(voice, "_LOOK_S", 0.05)
    (tmp_path / "texts.xz").write_bytes(b"")
    save(Codec(codec_sizes.TINY), tmp_path / "fitted.pt")
    return tmp_path


def order(folder) -> list[list[str]]:
    return [line.split() for line in (folder / "order").read_text().splitlines()]


def test_parts_come_in_order_and_the_talker_gives_up_graphs_devices_and_its_beginning_before_it_gives_up(
    stand_in, capsys
):
    words = ["--texts", stand_in / "texts.xz", "--out", stand_in / "run", "--minutes", 1, "--first-hours", 0.3]
    words += [
        "--codec-devices",
        "cuda:0,cuda:1",
        "--talker-devices",
        "cuda:2,cuda:3",
        "--codec=--rate 1",
        "--codec=-x 2",
    ]
    assert run("train voice", *words) == 0
    lines = order(stand_in)
    assert [line[0] for line in lines[:3]] == ["teacher", "fit", "fit"]
    assert lines[1][-3:] == ["--begin", "small", "--refit"], "the voice in the box is where to begin"
    assert lines[2] == [*lines[1][:-3], "--refit"], "from nothing where it cannot begin"
    assert [line[0] for line in lines[3:7]] == ["encode"] * 4
    assert sorted(line[line.index("--part") + 1] for line in lines[3:7]) == ["1/4", "2/4", "3/4", "4/4"]
    codecs = sorted((line for line in lines if line[0] == "codec"), key=lambda line: line[line.index("--device") + 1])
    assert [(c[c.index("--device") + 1], "--rate" in c, "-x" in c) for c in codecs] == [
        ("cuda:0", True, False),
        ("cuda:1", False, True),
    ]
    talkers = [line for line in lines if line[0] == "talker"]
    tried = [("--graphs" in t, "--begin" in t, t[t.index("--device") + 1]) for t in talkers]
    several, one = "cuda:2,cuda:3", "cuda:2"
    assert tried[:3] == [(True, True, several), (False, True, several), (True, True, one)]
    assert tried[3:] == [(False, True, one), (False, False, one)]
    assert {t[t.index("--noise-books") + 1] for t in talkers} == {str(codec_sizes.TINY.noise_books)}
    assert all("--resume" in t and 0 < float(t[t.index("--minutes") + 1]) < 0.5 for t in talkers)
    assert len(list((stand_in / "run" / "codes").glob("*.npz"))) == 6, "what came later was encoded meanwhile"
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status["audio_shards"] == 6 and {part["state"] for part in status["parts"].values()} == {"done"}
    assert "no graphs here" in (stand_in / "run" / "logs" / "talker.log").read_text()


def test_an_encoder_that_fails_again_and_again_is_left_alone_and_the_others_go_on(stand_in, monkeypatch):
    monkeypatch.setattr(voice, "_MOST_FAILURES", 1)
    (stand_in / "full").touch()
    words = ["--texts", stand_in / "texts.xz", "--out", stand_in / "run", "--minutes", 1, "--first-hours", 0.3]
    assert run("train voice", *words) == 0
    assert [line[0] for line in order(stand_in)].count("encode") == 2, "the first pass, and one that failed"
    assert 0 < len(list((stand_in / "run" / "codes").glob("*.npz"))) < 6


def test_without_audio_nothing_begins_and_the_log_is_named(stand_in, monkeypatch):
    monkeypatch.setattr(voice, "command", lambda *words: [sys.executable, "-c", "raise SystemExit(3)"])
    words = ["--texts", stand_in / "texts.xz", "--out", stand_in / "run", "--minutes", 1]
    with pytest.raises(CheckpointError, match="teacher.log"):
        run("train voice", *words)
    with pytest.raises(OptionsError, match="absent.xz"):
        run("train voice", "--texts", "absent.xz", "--out", stand_in / "run", "--minutes", 1)


def test_a_part_is_tried_again_and_can_be_stopped(tmp_path):
    script = "import sys; sys.exit(int(sys.argv[1]))"
    part = parts.Part("two", tmp_path, [lambda code=code: [sys.executable, "-c", script, code] for code in "10"])
    assert part.wait(time.monotonic() + 60) and part.log.read_text().count("-- ") == 3  # two commands, one exit status
    part = parts.Part("none", tmp_path, [lambda: [sys.executable, "-c", script, "1"]])
    assert not part.wait(time.monotonic() + 60) and part.state == "failed"
    part = parts.Part("long", tmp_path, [lambda: [sys.executable, "-c", "import time; time.sleep(60)"]] * 2)
    assert part.running
    part.stop()
    assert not part.wait(time.monotonic() + 60) and part.state == "failed"


def test_what_is_brought_back_is_a_checkpoint_in_parts(tmp_path, capsys):
    folder, to = tmp_path / "run", tmp_path / "to"
    data = open_data(synthetic_clips(TEXTS), folder / "talker", sizes.TINY, "cpu")
    TalkerTrainer(data, TalkerRecipe(batch_rows=160, noise_books=2)).save(folder / "talker" / STATE)
    (folder / "codec0").mkdir()
    (folder / "codec1").mkdir()  # nothing in it yet
    torch.manual_seed(0)
    codec = Codec(codec_sizes.TINY)
    codec.quantizer.set_books(torch.randn(NUM_CODEBOOKS - 2, 32, 8), torch.Generator())
    save(codec, folder / "codec0" / "state.pt")
    (folder / "codec0" / "curves.json").write_text("[1]")
    (folder / "logs").mkdir()
    (folder / "logs" / "talker.log").write_text("line\n" * 500)
    (folder / voice.STATUS).write_text("{}")
    run("train bring", "--run", folder, "--to", to)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(said["missing"]) == ["codec1"] and "run.tar.xz" in said["files"]
    whole = tmp_path / "whole.tar"
    whole.write_bytes(b"".join(path.read_bytes() for path in sorted(to.glob("voice.tar.*"))))
    with tarfile.open(whole) as archive:
        archive.extractall(tmp_path / "got", filter="data")
    config = open_checkpoint(tmp_path / "got" / "voice_codec0").config
    assert config.talker.hidden_size == 64 and (tmp_path / "got" / "codec0.pt").is_file()
    with tarfile.open(to / "run.tar.xz") as archive:
        assert {"run/status.json", "run/codec0_curves.json", "run/talker.log"} <= set(archive.getnames())
    with pytest.raises(CheckpointError, match="status.json"):
        run("train bring", "--run", tmp_path, "--to", to)
    assert np.all([size > 0 for size in said["files"].values()])
