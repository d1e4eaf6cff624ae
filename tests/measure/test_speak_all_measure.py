"""The measure of speak-all: its sentences, and that its figures are those of the folder."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

from commands import run

from mktts.measure import speak_all
from mktts.measure.speak_all import sentences


def test_sentences_are_distinct_the_same_again_and_of_the_length_of_the_load(tmp_path):
    first = list(sentences(500, 0))
    assert len(set(first)) == 500 and first == list(sentences(500, 0)) and first != list(sentences(500, 1))
    words = [len(text.split()) for text in first]
    assert min(words) >= 6 and max(words) <= 45 and 6.0 < sum(words) / len(words) / 2.5 < 8.0
    assert all(re.fullmatch(r"[A-Z][a-z, ]+\.", text) for text in first)


def spoken_here(command: list[str]) -> dict:
    """The command in this process, which has imported everything already."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run(command[3], *command[4:]) == 0
    return json.loads(said.getvalue().splitlines()[-1])


def test_the_document_says_what_is_in_the_folder(tmp_path, capfd, monkeypatch, checkpoint_cache):
    monkeypatch.setattr(speak_all, "_spoken", spoken_here)
    words = ("--checkpoint", "random:tiny", "--device", "cpu", "--sentences", 2, "--format", "flac")
    assert run("bench speak-all", *words, "--folder", tmp_path / "kept", "--into", tmp_path / "figures.json") == 0
    document = json.loads(Path(tmp_path, "figures.json").read_text())
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == document
    figures = {name: entry["value"] for name, entry in document["figures"].items()}
    frames = sum(round(len(text.split()) / 2.5 * 12.5) for text in sentences(2, 0))
    files = list(Path(tmp_path, "kept").glob("*.flac"))
    assert figures["sentences"] == len(files) == 2 and abs(figures["audio_s"] - frames * 0.08) < 1e-3
    assert figures["bytes"] == sum(path.stat().st_size for path in files)
    assert figures["retried"] == figures["failed"] == figures["unfinished"] == 0 and figures["wall_s"] > 0
    assert document["settings"]["checkpoint"] == "random:tiny" and document["device"]
