"""`say`: captions, also of `speak-all`, read back by a parser; `--play`, by a sounddevice that only takes notes."""

from __future__ import annotations

import html
import re
import sys
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
from commands import run
from hypothesis import given
from hypothesis import strategies as st

from mktts.cli import main
from mktts.engine.options import WordTime
from mktts.errors import MkttsError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth.say import Loudspeaker, captions

Cue = tuple[float, float, str]
TEXT = "Dr. Smith opened the door. There was nobody, as far as anybody could tell, in the long and dark hall behind it!"


def cues_of(document: str, kind: str) -> list[Cue]:
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
    (tmp_path / "t.txt").write_text("Hello there.\nGood bye.\n", encoding="utf-8")
    command = ["speak-all", tmp_path / "t.txt", "-o", tmp_path / "out", "--checkpoint", "small", "--device", "cpu"]
    assert run(*command, "--captions", "srt") == 0
    out, names = tmp_path / "out", {f"00000{line}.{kind}" for line in (1, 2) for kind in ("wav", "srt")}
    assert {path.name for path in out.iterdir()} == names
    (cue,) = cues_of((out / "000001.srt").read_text(encoding="utf-8"), "srt")
    assert cue[2] == "Hello there." and cue[1] <= soundfile.info(out / "000001.wav").duration
    (out / "000002.srt").unlink()
    capsys.readouterr()
    assert run(*command, "--captions", "srt") == 0 and '"spoken": 1' in capsys.readouterr().out
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
def device(monkeypatch, checkpoint_cache, tmp_path):
    package = sounddevice()
    monkeypatch.setitem(sys.modules, "sounddevice", package)
    monkeypatch.chdir(tmp_path)
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
