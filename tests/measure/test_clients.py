"""`python -m mktts clients`: a part of it against real servers, and that a tick cannot be had for nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from absent import needs
from commands import run
from sounds import tone

from mktts.audio import encoded, to_pcm16
from mktts.errors import MetricsError
from mktts.measure.clients.command import all_trials, place
from mktts.measure.clients.sound import Heard, check_length, heard
from mktts.measure.clients.trial import Trial, tried

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"client", "version", "feature", "ok", "note"}


@pytest.fixture(scope="module")
def here(checkpoint_cache):
    with place("random:tiny", frames=8) as found:
        yield found


@needs("av", "openai", "fastapi")
@pytest.mark.parametrize("word", ["mp3", "curl", "WebSocket", "server-sent"])
def test_a_part_of_the_trials_is_passed_and_written(checkpoint_cache, tmp_path, capsys, word):
    file = tmp_path / "clients.json"
    status = run("clients", "--checkpoint", "random:tiny", "--frames", 8, "--only", word, "--into", file)
    document = json.loads(file.read_text())
    assert status == 0, [result for result in document["results"] if not result["ok"]]
    assert document["results"] and {frozenset(result) for result in document["results"]} == {frozenset(KEYS)}
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["results"] == document["results"]
    assert all("0.64 s" in result["note"] for result in document["results"] if "s of" in result["note"])


@needs("av", "fastapi", "qwen_tts", "python_multipart")
def test_recordings_and_uploads_are_tried_on_a_checkpoint_that_clones(checkpoint_cache, capsys):
    assert run("clients", "--frames", 4, "--only", "voices: upload") == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["ok"] and result["client"].startswith("vLLM-Omni")


def test_a_server_whose_sound_is_of_another_length_gets_no_tick(here):
    for trial in all_trials():
        if not trial.clones and trial.feature in ("curl", "wav, streamed", "WebSocket /tts/ws, a word at a time"):
            assert tried(trial, here)["ok"]
            result = tried(trial, replace(here, duration_s=2.0))
            assert not result["ok"] and "s of 2.00 s" in result["note"]


def test_what_a_client_raises_is_the_note(here):
    def broken(place):
        raise ValueError("first line\nsecond line")

    result = tried(Trial("a", "1", "b", broken), here)
    assert (result["ok"], result["note"]) == (False, "ValueError: first line")
    gone = replace(here, url="http://127.0.0.1:1")
    assert not any(tried(trial, gone)["ok"] for trial in all_trials() if trial.feature in ("curl", "HTTP"))


@pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "opus", "aac", "pcm"])
def test_sound_is_heard_by_another_decoder_and_silence_is_none(kind):
    def made(pcm: np.ndarray) -> bytes:
        return to_pcm16(pcm) if kind == "pcm" else encoded(pcm, kind)

    assert heard(made(tone(1.0)), kind).seconds == pytest.approx(1.0, abs=0.1)
    for wrong in (made(np.zeros(24_000, np.float32)), b"" if kind == "pcm" else b"no sound at all"):
        with pytest.raises(MetricsError):
            heard(wrong, kind)


def test_another_format_than_was_asked_for_is_no_tick():
    for sent, asked in (("flac", "wav"), ("mp3", "wav"), ("wav", "flac"), ("mp3", "aac")):
        with pytest.raises(MetricsError, match="it holds|could not decode"):
            heard(encoded(tone(1.0), sent), asked)


def test_a_length_is_right_to_a_tenth_of_a_second():
    assert "1.09 s of 1.00 s" in check_length(Heard(1.09, "x"), 1.0)
    for seconds in (0.89, 1.11):
        with pytest.raises(MetricsError):
            check_length(Heard(seconds, "x"), 1.0)


@pytest.mark.parametrize("words", [["--only", "nobody's client"], ["--frames", "0"]])
def test_bad_settings_are_named_errors(words):
    with pytest.raises(MetricsError, match="no trial|at least 1"):
        run("clients", *words)


def test_the_reference_names_versions_and_every_client():
    results = json.loads((ROOT / "outputs" / "reference" / "clients.json").read_text(encoding="utf-8"))["results"]
    assert all(set(result) == KEYS and result["version"] and result["ok"] for result in results)
    clients = {result["client"] for result in results}
    wanted = {
        "openai",
        "Pipecat's",
        "MkttsTTSService",
        "LiveKit",
        "vLLM",
        "SGLang",
        "Nari",
        "Kokoro",
        "WebUI",
        "faster",
    }
    assert {name for name in wanted if any(name in client for client in clients)} == wanted
