"""Ten made-up recordings with transcripts, from their folder to a voice that speaks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import run

from mktts.audio import write_audio
from mktts.checkpoint import open_checkpoint
from mktts.errors import AudioError, OptionsError, TextError
from mktts.training.data import recordings
from mktts.training.data.codec_data import read_shard, vowels
from mktts.training.judge.loudness import integrated_lufs

TEXTS = [f"This is sentence number {word}." for word in "one two three four five six seven eight nine ten".split()]


def sound(seed: int, seconds: float = 1.2, level: float = 1.0) -> np.ndarray:
    """Vowels with half a second of silence before and after, float32."""
    speech = level * vowels(seconds, seed).astype(np.float32) / 32768
    return np.pad(speech, 12_000)


def beside(folder, count: int = 10):
    """Half of the recordings by each of two speakers, at 16 and 48 kHz and very different levels."""
    for i, text in enumerate(TEXTS[:count]):
        speaker, rate_hz, level = (("Anna B", 16_000, 0.1), ("carl", 48_000, 0.9))[i % 2]
        (folder / speaker).mkdir(parents=True, exist_ok=True)
        pcm = sound(i, level=level)
        at = np.arange(len(pcm) * rate_hz // 24_000) * 24_000 / rate_hz
        resampled = np.interp(at, np.arange(len(pcm)), pcm).astype(np.float32)
        write_audio(folder / speaker / f"{i}.wav", resampled, rate_hz)
        (folder / speaker / f"{i}.txt").write_text(f"{text}\n")
    return folder


def ljspeech(folder):
    (folder / "wavs").mkdir(parents=True)
    for i in range(3):
        write_audio(folder / "wavs" / f"LJ{i}.wav", sound(i))
    (folder / "metadata.csv").write_text("LJ0|It costs $5.|It costs five dollars.\nLJ1|Hello there.\nLJ2|Three|\n\n")
    return folder


def test_both_layouts_are_read(tmp_path):
    found = recordings.recordings(ljspeech(tmp_path / "LJ Speech"))
    assert [(r.path.name, r.text, r.speaker) for r in found] == [
        ("LJ0.wav", "It costs five dollars.", "lj_speech"),
        ("LJ1.wav", "Hello there.", "lj_speech"),
        ("LJ2.wav", "Three.", "lj_speech"),
    ]
    found = recordings.recordings(beside(tmp_path / "two"))
    assert sorted((r.text, r.speaker) for r in found) == sorted(
        (text, ("anna_b", "carl")[i % 2]) for i, text in enumerate(TEXTS)
    )
    assert {r.speaker for r in recordings.recordings(tmp_path / "two", "me")} == {"me"}


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 24_000, 44_100, 48_000])
def test_any_rate_becomes_24_khz_without_delay(rate_hz):
    def tone(rate_hz: int) -> np.ndarray:
        time = np.arange(rate_hz // 2) / rate_hz  # half a second
        return (np.hanning(len(time)) * np.sin(2 * np.pi * 1_234 * time)).astype(np.float32)

    found, wanted = recordings.resampled(tone(rate_hz), rate_hz), tone(24_000)
    assert len(found) == len(wanted) and np.abs(found - wanted).max() < 1e-3


def test_speakers_get_one_loudness_and_silence_is_cut(tmp_path):
    run("train recordings", "--data", beside(tmp_path / "in"), "--out", tmp_path / "audio", "--workers", 1)
    shard = read_shard(tmp_path / "audio" / "shard00000.npz")
    assert sorted(shard.texts) == sorted(TEXTS)
    for speaker in ("anna_b", "carl"):
        clips = [shard.clip(i).astype(np.float32) / 32768 for i in range(10) if shard.speakers[i] == speaker]
        assert len(clips) == 5 and all(len(clip) < 1.35 * 24_000 for clip in clips)
        assert abs(integrated_lufs(np.concatenate(clips)) + 23) < 1


def test_what_does_not_fit_is_left_out_and_counted(tmp_path, capsys):
    folder = beside(tmp_path / "in", 4)
    write_audio(folder / "carl" / "long.wav", sound(7, 16.0))
    write_audio(folder / "carl" / "silent.wav", np.zeros(24_000, np.float32))
    for name in ("long", "silent"):
        (folder / "carl" / f"{name}.txt").write_text("What is this?")
    run("train recordings", "--data", folder, "--out", tmp_path / "audio", "--workers", 1)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["recordings"], said["left_out"], said["speakers"]) == (4, 2, ["anna_b", "carl"])


def test_broken_folders_say_what_is_missing(tmp_path):
    with pytest.raises(OptionsError, match=r"metadata\.csv"):
        recordings.recordings(tmp_path)
    folder = beside(tmp_path / "in", 2)
    (folder / "carl" / "1.txt").write_text(" ")
    with pytest.raises(TextError, match="empty"):
        recordings.recordings(folder)
    (folder / "carl" / "1.txt").unlink()
    with pytest.raises(TextError, match=r"1\.txt"):
        recordings.recordings(folder)
    (folder / "metadata.csv").write_text("nothing|Hello.\n")
    with pytest.raises(AudioError, match="line 1"):
        recordings.recordings(folder)
    (folder / "metadata.csv").write_text("no bar\n")
    with pytest.raises(TextError, match="line 1"):
        recordings.recordings(folder)


@pytest.mark.slow
def test_ten_recordings_become_a_voice(tmp_path):
    """Every command of the way, a step or two each: what it says is noise, but it is a checkpoint with its speakers."""
    audio, codes, codec, out = (tmp_path / name for name in ("audio", "codes", "codec", "talker"))
    run("train recordings", "--data", beside(tmp_path / "in"), "--out", audio, "--workers", 1)
    run("train fit", "--data", audio, "--out", tmp_path / "codec.pt", "--device", "cpu")
    run("train encode", "--codec", tmp_path / "codec.pt", "--data", audio, "--out", codes, "--device", "cpu")
    words = ["--codec", tmp_path / "codec.pt", "--data", audio, "--codes", codes, "--out", codec, "--device", "cpu"]
    run("train codec", *words, "--batch", 1, "--crop-frames", 4, "--stop-at", 1, "--adversarial-from", -1)
    words = [
        "--codes",
        codes,
        "--codec",
        codec / "speech_tokenizer",
        "--out",
        out,
        "--device",
        "cpu",
        "--size",
        "small",
    ]
    run("train talker", *words, "--minutes", 5, "--steps", 2, "--batch-rows", 128)
    config = open_checkpoint(out / "voice").config
    assert set(config.speakers) == {"anna_b", "carl"}
    sounds = ["--checkpoint", out / "voice", "--speaker", "carl", "--device", "cpu", "--seed", 1]
    assert run("say", TEXTS[0], "-o", tmp_path / "said.wav", *sounds, "--max-frames", 8) == 0
    assert (tmp_path / "said.wav").stat().st_size > 1000
