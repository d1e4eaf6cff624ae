"""The teacher's resampling, trimming and shards, with a stand-in for its program."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.training.data import flite, teacher
from mktts.training.data.codec_data import read_shard

STAND_IN = """#!{python}
import io, sys, wave, math, struct
out = io.BytesIO()
with wave.open(out, "wb") as f:
    f.setnchannels(1); f.setsampwidth(2); f.setframerate(16000)
    tone = [int(9000 * math.sin(i / 5)) for i in range(8000)]
    f.writeframes(struct.pack("<16000h", *([0] * 4000 + tone + [0] * 4000)))
sys.stdout.buffer.write(out.getvalue())
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    import sys

    path = tmp_path / "flite"
    path.write_text(STAND_IN.replace("{python}", sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("FLITE", str(path))


@pytest.mark.parametrize("hz", [120, 1000, 6500])
def test_a_tone_keeps_its_frequency_phase_and_level(hz):
    source = 0.5 * np.sin(2 * np.pi * hz * np.arange(8000) / 16_000).astype(np.float32)
    wanted = 0.5 * np.sin(2 * np.pi * hz * np.arange(12_000) / 24_000)
    inner = slice(400, -400)
    assert np.abs(teacher.resampled(source)[inner] - wanted[inner]).max() < 1e-3


def test_silence_at_the_ends_is_cut_and_begins_from_nothing():
    pcm = np.full(48_000, 1e-3, np.float32)
    pcm[20_000:30_000] = 0.3
    cut = teacher.trimmed(pcm)
    assert len(cut) == 10_000 + 1440 + 1920 and cut[1439] == np.float32(1e-3) and cut[1440] == np.float32(0.3)
    assert cut[0] == cut[-1] == 0 and np.abs(np.diff(cut[:1400])).max() < 1e-5  # no click
    assert pcm[20_000 - 1440] == np.float32(1e-3), "the given audio stays as it is"
    with pytest.raises(AudioError):
        teacher.trimmed(np.zeros(100, np.float32))


def test_speaks_through_the_program(program):
    assert abs(len(teacher.speak("hello", "slt")) - (12_000 + 1440 + 1920)) < 60
    with pytest.raises(VoiceError):
        teacher.speak("hello", "nobody")


def test_speakers_have_one_loudness(program):
    peaks = {who: np.abs(teacher.speak("hello", who)).max() for who in teacher.SPEAKERS}  # the program's are all alike
    for who, gain_db in teacher.GAINS_DB.items():
        assert 20 * np.log10(peaks[who] / peaks["rms"]) == pytest.approx(gain_db - teacher.GAINS_DB["rms"], abs=1e-3)


@pytest.mark.skipif(flite._library() is None, reason="needs flite's libraries (Debian: libflite1)")
def test_the_libraries_say_what_the_program_says_in_any_order(monkeypatch, tmp_path):
    monkeypatch.delenv("FLITE", raising=False)
    found = [flite.spoken(text, "rms") for text in ("One of them.", "And two.", "One of them.")]
    np.testing.assert_array_equal(found[0], found[2])
    if program := shutil.which("flite_cmu_us_rms"):
        (tmp_path / "flite").write_text(f'#!/bin/sh\nshift\nexec {program} "$@"\n')
        (tmp_path / "flite").chmod(0o755)
        monkeypatch.setenv("FLITE", str(tmp_path / "flite"))
        np.testing.assert_array_equal(flite.spoken("And two.", "rms"), found[1])


def test_without_the_program_says_so(monkeypatch):
    monkeypatch.setenv("FLITE", "no-such-program-here")
    with pytest.raises(BackendUnavailable, match="FLITE"):
        teacher.speak("hello", "slt")


def test_shards_hold_every_speaker_and_are_made_once(program, tmp_path):
    made = teacher.make_shards(tmp_path / "data", 1.0, 0, 2, ["one", "two", "three", "four"])
    path = tmp_path / "data" / "shard00000.npz"
    before = path.stat().st_mtime_ns
    shard = read_shard(path)
    assert list(shard.speakers) == ["slt", "rms", "awb", "rms"] and made > 0
    assert list(shard.texts) == ["One.", "Two.", "Three.", "Four."], "as the text front end says them"
    assert teacher.make_shards(tmp_path / "data", 1.0, 0, 2, ["one", "two", "three", "four"]) == made
    assert path.stat().st_mtime_ns == before
