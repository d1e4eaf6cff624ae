"""`say`: captions, also of `speak-all`, read back by a parser; `--play`, by a sounddevice that only takes notes.
`speak-all`: what is read of a table, what is spoken, tried again, skipped, and left by a killed run."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
import torch
from commands import run
from fakes import FakeBackend, fake_synthesizer
from hypothesis import given
from hypothesis import strategies as st

from mktts.audio import to_pcm16
from mktts.cli import main
from mktts.engine.many import SayResult
from mktts.engine.options import WordTime
from mktts.errors import MkttsError, PromptError, SentencesError
from mktts.model.voice import Voice
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer, speak_all
from mktts.synth.say import Loudspeaker, captions
from mktts.synth.speak_all import COLUMNS, RETRIES, Sentence, derived_seed, read_table, speak_into_folder

TEXT = "Dr. Smith opened the door. There was nobody, as far as anybody could tell, in the long and dark hall behind it!"


def cues_of(document: str, kind: str) -> list[tuple[float, float, str]]:
    """Start and end in s, and the text, of each cue of a well-formed file."""
    found, srt = [], kind == "srt"
    blocks = document.rstrip("\n").split("\n\n")
    assert srt or blocks.pop(0) == "WEBVTT"
    clock = rf"(\d\d):([0-5]\d):([0-5]\d)[{',' if srt else '.'}](\d\d\d)"
    for number, block in enumerate(blocks, 1):
        lines = block.split("\n")
        assert not srt or lines.pop(0) == str(number)
        times = [int(part) for part in re.fullmatch(f"{clock} --> {clock}", lines[0]).groups()]
        start_s, end_s = (h * 3_600 + m * 60 + s + ms / 1_000 for h, m, s, ms in (times[:4], times[4:]))
        text = "\n".join(lines[1:])
        found.append((start_s, end_s, text if srt else html.unescape(text)))
    return found


def timed(text: str, start_s: float = 0.0) -> list[WordTime]:
    """A word each half a second, 0.4 s long."""
    return [WordTime(word, start_s + i / 2, start_s + i / 2 + 0.4) for i, word in enumerate(text.split())]


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_a_cue_is_a_sentence_or_what_fits_of_it(kind):
    cues = cues_of(captions(timed(TEXT), kind), kind)
    assert [text.replace("\n", " ") for *_, text in cues] == [
        "Dr. Smith opened the door.",
        "There was nobody, as far as anybody could tell, in the long and dark hall behind",
        "it!",
    ]
    assert [time_s for cue in cues for time_s in cue[:2]] == pytest.approx([0.0, 2.4, 2.5, 10.4, 10.5, 10.9])


def test_a_long_pause_begins_a_cue_and_speed_moves_all():
    words = [*timed("One two", 3_723.0), *timed("three four.", 3_726.0)]
    starts_s, ends_s, texts = zip(*cues_of(captions(words, "srt", 2.0), "srt"), strict=True)
    assert texts == ("One two", "three four.")
    assert (*starts_s, *ends_s) == pytest.approx((1_861.5, 1_863.0, 1_861.95, 1_863.45))
    assert captions([], "srt") == "" and cues_of(captions([], "vtt"), "vtt") == []


@pytest.mark.parametrize("kind", ["srt", "vtt"])
@given(st.lists(st.text("ab.,<&>-!你。", min_size=1, max_size=12), max_size=40))
def test_cues_have_all_words_in_order_within_their_lines(kind, words):
    cues = cues_of(captions(timed(" ".join(words)), kind), kind) if words else []
    said = "".join("".join(text.split()) for *_, text in cues)
    assert said == "".join(words)
    assert all(len(line) <= 42 for *_, text in cues for line in text.split("\n"))
    assert all(first[1] <= second[0] for first, second in pairwise(cues))


def test_say_writes_captions_of_what_it_says(tmp_path):
    text = "Look both ways first. [pause 1s] Then cross the street."
    files = {kind: tmp_path / f"said.{kind}" for kind in ("wav", "srt", "vtt")}
    words = [part for kind in ("srt", "vtt") for part in (f"--{kind}", files[kind])]
    assert run("say", text, "-o", files["wav"], *words, "--checkpoint", "small", "--device", "cpu", "--seed", 3) == 0
    cues = cues_of(files["srt"].read_text(encoding="utf-8"), "srt")
    assert [cue[2] for cue in cues] == ["Look both ways first.", "Then cross the street."]
    assert cues[1][0] - cues[0][1] >= 1.0 and cues[1][1] <= soundfile.info(files["wav"]).duration
    assert cues_of(files["vtt"].read_text(encoding="utf-8"), "vtt") == cues
    with pytest.raises(MkttsError, match="nowhere"):
        run("say", text, "-o", files["wav"], "--srt", tmp_path / "nowhere" / "said.srt")


def test_speak_all_writes_captions_beside_each_and_those_that_are_missing(tmp_path, capsys):
    table("t.txt", "Hello there.\nGood bye.\n")
    command = "speak-all t.txt -o out --captions srt --checkpoint small --device cpu"
    assert run(command) == 0
    out, names = tmp_path / "out", {f"00000{line}.{kind}" for line in (1, 2) for kind in ("wav", "srt")}
    assert {path.name for path in out.iterdir()} == names
    (cue,) = cues_of((out / "000001.srt").read_text(encoding="utf-8"), "srt")
    assert cue[2] == "Hello there." and cue[1] <= soundfile.info(out / "000001.wav").duration
    (out / "000002.srt").unlink()
    capsys.readouterr()
    assert run(command) == 0 and '"spoken": 1' in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == names


SAY = ["say", "Hello there.", "--checkpoint", "random:tiny", "--seed", "1", "--max-frames", "4"]


def sounddevice() -> Mock:
    """Stands for the package sounddevice; what was done with its one output stream is in `device.method_calls`."""
    device = Mock(active=False)
    device.start.side_effect = lambda: setattr(device, "active", True)
    device.write.side_effect = lambda pcm: device.active or pytest.fail("written to before it was started")
    device.stop.side_effect = device.abort.side_effect = lambda: setattr(device, "active", False)
    error = type("PortAudioError", (Exception,), {})
    return Mock(PortAudioError=error, **{"OutputStream.return_value": device})


@pytest.fixture
def device(monkeypatch):
    package = sounddevice()
    monkeypatch.setitem(sys.modules, "sounddevice", package)
    yield package.OutputStream.return_value
    package.OutputStream.assert_called_with(SAMPLE_RATE_HZ, channels=1, dtype="float32")


def done_with(device: Mock) -> list[str]:
    """All but `write`, in order."""
    return [name for name, *_ in device.method_calls if name != "write"]


def test_all_that_the_file_gets_is_played_and_heard_to_the_end_and_without_one_none_is_written(device, tmp_path):
    assert main([*SAY, "--play"]) == 0 and not list(tmp_path.iterdir())
    assert main([*SAY, "--play", "-o", "out.wav"]) == 0
    written, _ = soundfile.read("out.wav", dtype="float32")
    heard = np.concatenate([call.args[0] for call in device.write.call_args_list])
    assert heard.dtype == np.float32
    np.testing.assert_allclose(heard, np.tile(written, 2)[:, None], atol=1 / 32_767)
    assert done_with(device) == 2 * ["start", "stop", "close"]


def test_an_interrupt_ends_the_sound_at_once_and_nothing_played_needs_no_waiting(device):
    with pytest.raises(KeyboardInterrupt), Loudspeaker() as loudspeaker:
        loudspeaker.play(np.zeros(10, np.float32))
        raise KeyboardInterrupt
    with Loudspeaker():
        pass
    assert done_with(device) == ["start", "abort", "close", "close"]


def test_without_package_device_or_library_the_command_says_so_before_it_loads(monkeypatch, capsys, tmp_path):
    broken = sounddevice()
    broken.OutputStream.side_effect = broken.PortAudioError("Error querying device -1")
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    monkeypatch.syspath_prepend(tmp_path)
    found = {"pip install sounddevice": None, "Error querying device": broken}
    for message in (*found, "library PortAudio (PortAudio library not found)"):
        monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
        if message in found:
            monkeypatch.setitem(sys.modules, "sounddevice", found[message])
        assert main(["say", "Hi.", "--play", "--checkpoint", "absent-folder"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and "absent-folder" not in error


RANDOM = ("--checkpoint", "random:tiny", "--device", "cpu", "--seed", "3")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch, checkpoint_cache):
    monkeypatch.chdir(tmp_path)


def table(name: str, content: str | bytes):
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return read_table(Path(name))


def lines(*objects: object) -> str:
    return "".join(f"{json.dumps(one)}\n" for one in objects)


def test_the_three_kinds_say_the_same():
    wanted = [Sentence(2, "a", "Hello.", seed=7), Sentence(4, "b", '"Go\\n," he said.', language="english")]
    tsv = 'seed\tid\ttext\tlanguage\n7\ta\tHello.\t\n\n\tb\t"Go\\n," he said.\tenglish\n'
    jsonl = "\n" + lines({"id": "a", "text": "Hello.", "seed": 7, "voice": None})
    jsonl += "  \n" + lines({"id": "b", "text": '"Go\\n," he said.', "language": "english"})
    for name, content in (("t.tsv", tsv), ("t.jsonl", jsonl)):
        for variant in (content, "\ufeff" + content, content.replace("\n", "\r\n"), content[:-1]):
            assert table(name, variant) == (wanted, {})
    plain, _ = table("t.TXT", "Hello.\n\nGood\tday.\n")
    assert plain == [Sentence(1, "000001", "Hello."), Sentence(3, "000003", "Good\tday.")]
    others = lines({**dict.fromkeys(COLUMNS), "id": 1, "text": "y", "pace": 2})
    assert table("t.jsonl", others) == ([Sentence(1, "1", "y")], {})
    assert table("t.tsv", "id\ttext\tmood\nx\ty\tz\n") == ([Sentence(2, "x", "y")], {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x"}', "text is missing"),
        ('{"text": "x", "seed": 1}', "id is missing"),
        ('{"id": "x", "text": 3}', "text must be a string, found int"),
        ('{"id": true, "text": "x"}', "id must be a string, found bool"),
        ('{"id": "x", "text": "y", "seed": -1}', "seed must be"),
        ('{"id": "x", "text": "y", "seed": "' + "9" * 5_000 + '"}', "seed must be a whole number"),
        ('{"id": "x", "text": "y", "max_frames": 0}', "max_frames must be"),
        ("[1]", "found list"),
        ("{", "could not read it"),
        ("[" * 100_000, "could not read it"),
        ('{"id": "FIRST", "text": "x"}', "'FIRST' stands in line 1 already"),
        (b"\xff\xfe", "expected UTF-8"),
    ],
)
def test_a_bad_line_is_one_line_and_the_others_go_on(line, message):
    first, last = (lines({"id": name, "text": "x"}).encode() for name in ("first", "last"))
    found, bad = table("t.jsonl", first + (line if isinstance(line, bytes) else line.encode()) + b"\n" + last)
    assert [(one.id, one.line) for one in found] == [("first", 1), ("last", 3)]
    assert list(bad) == [2] and message in bad[2] and "\n" not in bad[2]


def test_an_id_is_the_name_of_a_file_and_of_nothing_else():
    bad = ["", " ", ".", "..", ".hidden", "../up", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "-rf", " a", "a "]
    bad += ["x" * 201, "\ud800", "a\u2028b", "é" * 101, "\x7f"]
    good = ["a", "a.b", "Größe 3", "你好", "x" * 200, "con%2F", "manifest", "a:b"]
    found, errors = table("t.jsonl", lines(*({"id": name, "text": "x"} for name in (*bad, *good))))
    assert [one.id for one in found] == good and len(errors) == len(bad)
    assert all(error.startswith("id ") and len(error) < 300 for error in errors.values())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.tsv", "id\tsentence\nx\ty\n", "text is missing"),
        ("t.tsv", "name\ttext\nx\ty\n", "id is missing"),
        ("t.tsv", "id\ttext\ttext\nx\ty\tz\n", "column 'text' stands twice"),
        ("t.tsv", "id\ttext\nx\n", "expected 2 columns, as the first line has, found 1"),
        ("t.jsonl", "", "found none$"),
        ("t.tsv", b"\xff\xfei\0d\0", "line 1: expected UTF-8"),
        ("t.csv", "id,text\n", "expected a name that ends in .jsonl, .tsv, .txt"),
    ],
)
def test_a_table_without_a_sentence_is_one_line_of_error(name, content, message):
    with pytest.raises(SentencesError, match=message) as error:
        table(name, content)
    assert "\n" not in str(error.value)
    with pytest.raises(SentencesError, match="found no file"):
        read_table(Path("none.txt"))


@pytest.mark.parametrize("engine", ["single", "batch-ahead"])
def test_what_runs_away_or_fails_is_tried_again_with_another_seed(engine, tmp_path):
    sentences = [Sentence(number, f"s{number}", f"Text number {number}.", seed=number) for number in range(6)]
    sentences += [Sentence(7, "long", "Never ends.", seed=7), Sentence(8, "cut", "Cut.", seed=8, max_frames=3)]
    sentences += [Sentence(9, "nobody", "Hello.", seed=9, speaker="nobody"), Sentence(10, "none", "\x00", seed=10)]
    sentences += [Sentence(11, "voice", "Hello.", seed=11, voice="missing.voice")]
    seeds = {n: [n, *(derived_seed(n, attempt) for attempt in range(1, RETRIES + 1))] for n in (1, 2, 7)}
    backend = FakeBackend(eos_after=50, fail_at=2, failing=seeds[2][:3])
    backend.code0 = lambda frame: 7 if backend.order[-1] in (*seeds[1][:1], *seeds[7]) else frame
    with fake_synthesizer(backend, engine=engine) as synth:
        found = {one.id: one for one in speak_into_folder(synth, sentences, tmp_path, "wav", RETRIES)}
        assert {name: one.attempts for name, one in found.items() if one.attempts} == {"s1": 1, "s2": 3, "long": 3}
        errors = {name: one.error for name, one in found.items() if one.error}
        assert set(errors) == {"long", "nobody", "none", "voice"} and "runaway" in errors["long"]
        kept = {path.stem for path in tmp_path.iterdir()}
        assert kept == {one.id for one in sentences} - set(errors)
        for name, seed, frames in (("s1", seeds[1][1], None), ("s2", seeds[2][3], None), ("cut", 8, 3)):
            text = next(one.text for one in sentences if one.id == name)
            alone = synth.say(text, seed=seed, max_frames=frames)
            samples, rate_hz = soundfile.read(tmp_path / f"{name}.wav", dtype="int16")
            assert samples.tobytes() == to_pcm16(alone) and rate_hz == SAMPLE_RATE_HZ
            assert found[name].audio_s == len(alone) / SAMPLE_RATE_HZ


def speak(*words: object, name: str = "t.txt", frames: int = 5) -> int:
    return run("speak-all", name, "-o", "out", *RANDOM, "--max-frames", frames, *words)


def test_what_is_there_is_skipped_and_a_line_that_cannot_be_spoken_has_no_file(capsys):
    table("t.tsv", "id\ttext\tspeaker\na\tHello.\t\n../b\tHello.\t\nc\tHello.\tnobody\nd\tGood day.\tryan\n")
    assert speak("--format", "flac", name="t.tsv") == 1
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert [found[name] for name in ("lines", "there", "spoken", "failed")] == [4, 0, 2, 2]
    assert "line 3: id must be" in said.err and "line 4, c: " in said.err
    before = {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    assert sorted(before) == ["a.flac", "d.flac"]
    first = Path("out/a.flac").read_bytes()
    assert soundfile.info("out/a.flac").frames == 5 * SAMPLES_PER_FRAME
    table("t.tsv", "id\ttext\tspeaker\na\tHello.\t\nb\tHello.\t\nd\tGood day.\tryan\n")
    Path("out/a.flac").unlink()
    assert speak("--format", "flac", name="t.tsv") == 0 and '"spoken": 2' in capsys.readouterr().out
    assert Path("out/a.flac").read_bytes() == first and Path("out/d.flac").stat().st_mtime_ns == before["d.flac"]


def test_voices_lie_beside_the_table(tiny_base, capsys):
    Path("beside").mkdir()
    voice = Voice(torch.full((tiny_base.config.talker.hidden_size,), 0.1), None, None, tiny_base.config.model_size)
    voice.save("beside/v.voice")
    table("beside/t.tsv", "id\ttext\tvoice\tseed\na\tHello.\tv.voice\t4\nb\tHello.\tnone.voice\t\n")
    words = ("--checkpoint", "random:tiny:base", "--device", "cpu", "--max-frames", 4)
    assert run("speak-all", "beside/t.tsv", "-o", "out", *words) == 1
    said = capsys.readouterr()
    assert '"spoken": 1' in said.out and "none.voice" in said.err
    with Synthesizer.load(tiny_base, device="cpu", engine="batch") as synth:
        alone = synth.say("Hello.", voice=voice, seed=4, max_frames=4)
    assert Path("out/a.wav").read_bytes().endswith(to_pcm16(alone))
    table("t.tsv", "id\ttext\na\tHello.\n")
    with pytest.raises(PromptError, match="expected a column voice"):
        run("speak-all", "t.tsv", "-o", "out", *words)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("--max-frames", "0", "--max-frames must be"),
        ("--seed", "-1", "--seed must be"),
        ("--voice", "none.voice", "expected a file made by Voice.save"),
        ("-o", "t.txt", "expected a folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(name, value, message):
    table("t.txt", "One.\n")
    with pytest.raises(MkttsError, match=message):
        speak(name, value)
    assert not Path("out").exists()


class SaysAll:
    """A synthesizer without threads, which a forked child can use."""

    sampling = None

    def say_each(self, ask):
        while (asked := ask()) is not None:
            yield SayResult(asked, SimpleNamespace(finish_reason="eos"), np.full(24_000, 0.25, np.float32))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kill_at", [1, 3])
def test_a_killed_run_leaves_whole_files_and_the_next_one_speaks_the_rest(tmp_path, kill_at):
    sentences = [Sentence(number, f"s{number}", "Text.", seed=number) for number in range(5)]
    child = os.fork()
    if not child:
        left, real = iter(range(kill_at - 1, -1, -1)), os.replace

        def killed(*paths: Path) -> None:
            if not next(left):
                os.kill(os.getpid(), signal.SIGKILL)
            real(*paths)

        speak_all.os.replace, speak_all._WRITERS = killed, 1
        list(speak_into_folder(SaysAll(), sentences, tmp_path, "wav", 0))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = {path.name for path in tmp_path.iterdir() if path.suffix == ".wav"}
    assert before == {f"s{number}.wav" for number in range(kill_at - 1)} and len(os.listdir(tmp_path)) == kill_at
    left = [one for one in sentences if f"{one.id}.wav" not in before]
    assert len(list(speak_into_folder(SaysAll(), left, tmp_path, "wav", 0))) == len(left)
    assert sorted(os.listdir(tmp_path)) == [f"{one.id}.wav" for one in sentences]
    assert all(soundfile.info(path).frames == 24_000 for path in tmp_path.iterdir())


def test_a_full_disk_ends_the_run_and_leaves_no_file(monkeypatch, tmp_path):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(speak_all.Path, "write_bytes", full)
    with fake_synthesizer(FakeBackend(eos_after=3)) as synth, pytest.raises(OSError, match="No space"):
        list(speak_into_folder(synth, [Sentence(1, "a", "Hello.", seed=1)], tmp_path, "wav", 0))
    assert not list(tmp_path.iterdir())
