"""The folder of speak-all: killed at any moment, torn manifests, two processes, other settings, all formats."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import av
import crashes
import numpy as np
import pytest
import soundfile
import torch
from commands import run

from mktts.audio import to_pcm16
from mktts.common import python_path
from mktts.errors import BackendUnavailable, BusyError, MkttsError, OptionsError, PromptError, SentencesError
from mktts.model.voice import Voice
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions
from mktts.synth import Synthesizer
from mktts.synth.speak_all import keeping
from mktts.synth.speak_all.folder import held
from mktts.synth.speak_all.manifest import Manifest
from mktts.synth.speak_all.progress import Progress, duration
from mktts.synth.speak_all.sentences import Sentence
from mktts.synth.speak_all.takes import _voice

WAIT_S = 60.0
RANDOM = ("--checkpoint", "random:tiny", "--device", "cpu", "--seed", "3")
TEXTS = [f"This is sentence number {number}." for number in range(4)]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch, checkpoint_cache):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("".join(f"{text}\n" for text in TEXTS))


def speak(*words: object, table: str = "t.txt", frames: int = 5) -> int:
    return run("speak-all", table, "-o", "out", *RANDOM, "--max-frames", frames, *words)


def records() -> list[dict]:
    return [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]


def state() -> dict[str, int]:
    """When each file was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir() if path.suffix == ".wav"}


def report(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_file_is_what_say_gives_with_its_seed_and_as_long_as_the_manifest_says(tiny, capsys):
    Path("t.jsonl").write_text(
        '{"id": "a", "text": "Hello.", "speaker": "ryan", "seed": 4}\n{"id": "b", "text": "Good day.", "language": "en'
        'glish", "max_frames": 9}\n{"id": "c", "text": "Good day."}\n'
    )
    assert speak("--speaker", "vivian", table="t.jsonl") == 0
    found = report(capsys)
    assert (found["lines"], found["ok"], found["spoken"], found["retried"], found["failed"]) == (3, 3, 3, 0, 0)
    settings = [{"speaker": "ryan"}, {"speaker": "vivian", "language": "english"}, {"speaker": "vivian"}]
    with Synthesizer.load(tiny, device="cpu", engine="batch") as synth:
        for record, more in zip(records(), settings, strict=True):
            frames = 9 if record["id"] == "b" else 5
            alone = synth.say(record["text"], seed=record["seed"], max_frames=frames, **more)
            samples, rate_hz = soundfile.read(Path("out", record["file"]), dtype="int16")
            assert samples.tobytes() == to_pcm16(alone) and rate_hz == SAMPLE_RATE_HZ
            assert record["duration_s"] == len(alone) / SAMPLE_RATE_HZ
    assert records()[0]["seed"] == 4
    assert found["audio_s"] == pytest.approx(sum(record["duration_s"] for record in records()), abs=1e-3)


@pytest.mark.parametrize("kind", ["wav", "flac", "opus", "mp3"])
def test_every_format_is_decoded_by_others_as_long_as_the_manifest_says(kind):
    assert speak("--format", kind, frames=12) == 0
    slack_s = 0.1 if kind == "mp3" else 1e-3  # MP3 comes in frames of 24 ms, with a delay of the encoder's
    for record in records():
        path = Path("out", record["file"])
        assert path.suffix == f".{kind}" and path.stat().st_size == record["bytes"]
        samples, rate_hz = soundfile.read(path)
        assert len(samples) / rate_hz == pytest.approx(record["duration_s"], abs=slack_s) and np.abs(samples).max() > 0
        with av.open(str(path)) as container:
            frames = list(container.decode(audio=0))
        assert sum(frame.samples / frame.sample_rate for frame in frames) == pytest.approx(
            record["duration_s"], abs=slack_s
        )


def test_what_is_done_stays_and_only_what_changed_or_is_gone_is_spoken_again(capsys):
    assert speak() == 0
    before, lines = state(), Path("out/manifest.jsonl").read_bytes()
    assert speak() == 0
    assert state() == before and Path("out/manifest.jsonl").read_bytes() == lines and report(capsys)["spoken"] == 0
    Path("t.txt").write_text("\n".join([TEXTS[0], "Another text.", *TEXTS[2:], "One more."]))
    Path("out/000003.wav").unlink()
    Path("out/000004.wav").write_bytes(b"cut")
    assert speak() == 0
    after = state()
    assert after["000001.wav"] == before["000001.wav"] and report(capsys)["spoken"] == 4
    assert all(after[name] != before.get(name) for name in after if name != "000001.wav")
    assert [record["id"] for record in records()] == [f"{number:06d}" for number in range(1, 6)]
    assert records()[1]["text"] == "Another text."


def test_the_seed_that_was_drawn_is_kept():
    words = ("speak-all", "t.txt", "-o", "out", "--checkpoint", "random:tiny", "--max-frames", 4)
    assert run(*words) == 0
    seeds = [record["seed"] for record in records()]
    Path("out/000002.wav").unlink()
    assert run(*words) == 0 and [record["seed"] for record in records()] == seeds


def test_voices_lie_beside_the_table_and_another_one_is_another_sound(tiny_base, capsys):
    Path("table").mkdir()
    Path("table/t.tsv").write_text("id\ttext\tvoice\na\tHello.\tv.voice\nb\tHello.\tnone.voice\n")
    size = tiny_base.config.talker.hidden_size
    sounds = []
    for loudness in (0.1, 0.3):
        voice = Voice(torch.full((size,), loudness), None, None, tiny_base.config.model_size)
        voice.save("table/v.voice")
        _voice.cache_clear()  # another process
        words = ("--checkpoint", "random:tiny:base", "--device", "cpu", "--seed", 3, "--max-frames", 4)
        for spoken in (1, 0):
            assert run("speak-all", "table/t.tsv", "-o", "out", *words) == 1
            assert report(capsys)["spoken"] == spoken
        good, bad = records()
        assert (good["status"], bad["status"]) == ("ok", "bad") and "none.voice" in bad["error"]
        sounds.append(Path("out/a.wav").read_bytes())
    assert sounds[0] != sounds[1]
    with Synthesizer.load(tiny_base, device="cpu", engine="batch") as synth:
        alone = synth.say("Hello.", voice=voice, seed=good["seed"], max_frames=4)
    assert sounds[1].endswith(to_pcm16(alone))


def test_bad_lines_are_recorded_the_others_spoken_and_a_mended_line_is_spoken_then(capsys):
    Path("t.tsv").write_text("id\ttext\tspeaker\na\tHello.\t\n../b\tHello.\t\nc\tHello.\tnobody\nd\tHello.\tryan\n")
    assert speak(table="t.tsv") == 1
    found = report(capsys)
    assert (found["lines"], found["ok"], found["bad"], found["spoken"]) == (4, 2, 2, 2)
    assert [(one["line"], one["status"]) for one in records()] == [(2, "ok"), (3, "bad"), (4, "bad"), (5, "ok")]
    assert "name of a file" in records()[1]["error"] and "nobody" in records()[2]["error"]
    assert sorted(state()) == ["a.wav", "d.wav"] and not Path("b.wav").exists()
    Path("t.tsv").write_text("id\ttext\tspeaker\na\tHello.\t\nb\tHello.\t\nc\tHello.\tvivian\nd\tHello.\tryan\n")
    assert speak(table="t.tsv") == 0
    assert [one["status"] for one in records()] == ["ok"] * 4 and report(capsys)["spoken"] == 2


def test_random_weights_are_tried_again_only_where_that_is_asked_for(capsys, monkeypatch):
    guard = Guard(frames_per_text_token=0.5, slack_frames=4)  # a second instead of ten
    monkeypatch.setattr("mktts.synth.speak_all.takes._UNREAD", StreamOptions(guard=guard))
    Path("t.txt").write_text("A.\n")
    words = ("speak-all", "t.txt", *RANDOM[:4])
    assert run(*words, "-o", "none") == 1 and report(capsys)["attempts"] == 0
    assert run(*words, "-o", "two", "--retries", "2") == 1
    (record,) = (json.loads(line) for line in Path("two/manifest.jsonl").read_text().splitlines())
    assert (record["status"], record["finish_reason"], len(record["retried"])) == ("unfinished", "runaway", 2)
    found = report(capsys)
    assert (found["unfinished"], found["retried"], found["attempts"], found["failed"]) == (1, 1, 2, 0)
    assert len({record["seed"], *(attempt["seed"] for attempt in record["retried"])}) == 3


def test_other_settings_are_refused_by_name():
    assert speak() == 0
    before = state()
    for words, name in (
        (("--format", "flac"), "format 'wav'"), (("--seed", "9"), "seed 3"), (("--greedy",), "greedy False"),
        (("--speaker", "ryan"), "speaker None"), (("--checkpoint", "random:tiny:base"), "checkpoint 'random:tiny'"),
    ):  # fmt: skip
        with pytest.raises((SentencesError, PromptError), match=name if name[0] != "c" else "base checkpoint"):
            speak(*words)
    assert state() == before


def test_a_folder_of_something_else_is_left_alone():
    Path("out").mkdir()
    Path("out/000001.wav").write_text("mine")
    with pytest.raises(SentencesError, match="expected a new folder.*found '000001.wav'"):
        speak()
    assert Path("out/000001.wav").read_text() == "mine"


def test_two_processes_on_one_folder_are_one_too_many():
    with held(Path("out")):
        with pytest.raises(BusyError, match=f"process {os.getpid()} on .* is at work in it"):
            speak()
    assert speak() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--retries", "4"), "--retries must be at most 3"), (("--max-frames", "0"), "--max-frames must be"),
        (("--at-once", "0"), "--at-once must be"), (("--seed", "-1"), "--seed must be"),
        (("--replicas", "2"), "options of --ray"), (("--ray", "--device", "cuda:1"), "leave out --device cuda:1"),
        (("--voice", "none.voice"), "expected a file made by Voice.save"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_made(words, message):
    with pytest.raises((OptionsError, MkttsError), match=message):
        speak(*words)
    assert not Path("out").exists() or set(os.listdir("out")) <= {".lock"}


def test_without_ray_the_folder_is_not_even_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendUnavailable, match=r'pip install -e "\.\[ray\]"'):
        speak("--ray", "--replicas", "2")
    assert not Path("out").exists()


# ---- manifests


def line(name: str, **more: object) -> bytes:
    record = {"id": name, "line": int(name[1:]), "status": "ok", "digest": "d", "bytes": 1, "file": f"{name}.wav"}
    return json.dumps({**record, **more}).encode() + b"\n"


@pytest.mark.parametrize("end", [b"", b'{"id": "s3", "st', line("s3")[:-1], b"\0" * 500, b"{}\nnull\n[1]\n", b"\n"])
def test_a_torn_end_is_cut_off(end, tmp_path):
    whole = line("s1") + line("s2")
    Path("manifest.jsonl").write_bytes(whole + end)
    manifest = Manifest(tmp_path)
    assert sorted(manifest.done) == ["s1", "s2"]
    manifest.append(json.loads(line("s3")))
    manifest.close()
    assert Path("manifest.jsonl").read_bytes() == whole + line("s3")


def test_what_cannot_be_read_in_the_middle_is_refused_with_its_line(tmp_path):
    content = line("s1") + b"edited\n" + line("s2")
    Path("manifest.jsonl").write_bytes(content)
    with pytest.raises(SentencesError, match="line 2 is no line of a manifest"):
        Manifest(tmp_path)
    assert Path("manifest.jsonl").read_bytes() == content


def test_the_last_line_about_a_sentence_counts_and_the_end_is_in_order(tmp_path):
    failed = line("s1", status="failed")
    Path("manifest.jsonl").write_bytes(line("s3") + line("s1") + line("s2") + failed + line("s3", digest="new"))
    manifest = Manifest(tmp_path)
    assert sorted(manifest.done) == ["s2", "s3"] and manifest.done["s3"].digest == "new"
    manifest.append(json.loads(line("s1", text="half a pair: \ud800")))
    manifest.close(tidy=True)
    found = [json.loads(one) for one in Path("manifest.jsonl").read_bytes().splitlines()]
    assert [one["id"] for one in found] == ["s1", "s2", "s3"] and found[0]["text"].endswith("\ud800")


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    manifest = Manifest(tmp_path)
    manifest.append(json.loads(line("s1")))
    real = os.write

    def fills(handle: int, data: bytes) -> int:
        if len(data) < len(line("s2")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:-10])

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "write", fills)
        manifest.append(json.loads(line("s2")))
    manifest.close()
    assert Path("manifest.jsonl").read_bytes() == line("s1")


def test_parts_of_other_processes_are_taken_over_and_deleted(tmp_path):
    main, part = Manifest(tmp_path), Manifest(tmp_path, part="one")
    main.append(json.loads(line("s1")))
    for name in ("s1", "s2"):
        part.append(json.loads(line(name, digest="of the part")))
    part.append({"id": "s4", "line": 4, "status": "failed", "error": "x"})
    main.close()
    again = Manifest(tmp_path)
    again.absorb()
    again.close()
    assert {name: kept.digest for name, kept in again.done.items()} == {"s1": "d", "s2": "of the part"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".part")] == []


# ---- killed


def test_killed_before_any_call_that_changes_the_folder_nothing_is_lost_or_half_there(tmp_path):
    program = Path(__file__).with_name("crashes.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path / "folders"],
        capture_output=True,
        text=True,
        env={**os.environ, **python_path()},
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    found = json.loads(done.stdout)
    assert found["calls"] > 20 and found["spared"] > 10


def test_kill_9_in_the_middle_then_the_rest(tmp_path):
    Path("t.txt").write_text("".join(f"Sentence {number}.\n" for number in range(16)))
    command = [sys.executable, "-m", "mktts", "speak-all", "t.txt", "-o", "out", *RANDOM, "--max-frames", "12"]
    with subprocess.Popen([*command, "--at-once", "1"], env={**os.environ, **python_path()}) as child:
        until_s, manifest = time.monotonic() + WAIT_S, Path("out/manifest.jsonl")
        while not manifest.exists() or manifest.read_bytes().count(b"\n") < 3:
            assert child.poll() is None and time.monotonic() < until_s
            time.sleep(0.005)
        with pytest.raises(BusyError):
            speak(frames=12)
        child.send_signal(signal.SIGKILL)
    before = state()
    assert 3 <= len(before) < 16
    assert all(soundfile.info(Path("out", name)).frames == 12 * 1_920 for name in before)
    noted = [json.loads(one)["file"] for one in manifest.read_bytes().split(b"\n")[:-1]]
    assert speak(frames=12) == 0
    after = state()
    assert len(after) == 16 and all(after[name] == before[name] for name in noted)
    assert sorted(os.listdir("out")) == sorted([*after, ".lock", "manifest.jsonl", "settings.json"])


# ---- bounded
def test_the_synthesis_waits_for_the_disk(tmp_path, monkeypatch):
    taken, written = [], []
    ahead = threading.Event()

    def write(path: Path, data: bytes, *, lasting: bool) -> None:
        assert ahead.wait(WAIT_S)  # until so many wait that no more may be made
        assert len(taken) - len(written) <= keeping._QUEUED + 1
        written.append(path)

    def sentences():
        for number in range(20 * keeping._QUEUED):
            taken.append(number)
            if len(taken) == keeping._QUEUED:
                ahead.set()
            yield Sentence(1, f"s{number}", "Text.")

    monkeypatch.setattr(keeping, "write_whole", write)
    manifest = Manifest(tmp_path)
    keeping.speak_into(tmp_path, manifest, "wav", crashes.Synthesizer(), sentences(), crashes.MANNER)
    manifest.close()
    assert len(written) == len(taken) == len(manifest.done) == 20 * keeping._QUEUED


# ---- progress


def test_progress_counts_and_estimates_by_the_letters_that_are_left(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("mktts.synth.speak_all.progress.time.monotonic", lambda: now_s[0])
    out = io.StringIO()
    progress = Progress(10, 1_000, out)
    progress.begin()
    for _ in range(4):
        now_s[0] += 10
        progress.kept({"status": "ok", "duration_s": 5.0}, 50)
    progress.kept({"status": "failed", "retried": [1, 2, 3]}, 0)
    assert out.getvalue() == "3 of 10 sentences, 0.5 s of audio a second, 2 min 50 s left\n"  # once in 30 s
    assert progress.line() == ("5 of 10 sentences, 0.5 s of audio a second, 2 min 40 s left, 3 tried again, 1 failed")
    assert [duration(seconds) for seconds in (0, 59.4, 61, 3_600, 86_400)] == [
        "0 s", "59 s", "1 min 01 s", "1 h 00 min", "24 h 00 min"
    ]  # fmt: skip
