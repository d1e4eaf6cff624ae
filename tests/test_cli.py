"""The command line on a tiny random checkpoint, as its user meets it: files, pipes, exit statuses, messages."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import wave
from unittest.mock import Mock

import numpy as np
import pytest
from absent import needs
from commands import examples
from sounds import decoded

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.cli import COMMANDS, main
from mktts.common import python_path
from mktts.errors import EngineError, MkttsError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FRAMES = 6
BASE = ["--checkpoint", "random:tiny:base"]
RANDOM = ["--checkpoint", "random:tiny"]  # whose speech never ends by itself
SAY = ["say", "Hello there.", *RANDOM, "--seed", "1", "--max-frames", str(FRAMES)]
HI = ["say", "Hi.", "-o", "x.wav"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch, checkpoint_cache):
    monkeypatch.chdir(tmp_path)


def start(*words: str, before: str = "", stdout=subprocess.PIPE) -> subprocess.Popen:
    command = [sys.executable, "-c", f"{before}\nimport sys; from mktts.cli import main; sys.exit(main())", *words]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **python_path()})


def read_wav(path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, SAMPLE_RATE_HZ, 2)
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


def test_say_writes_the_frames_asked_for_and_calls_random_weights_noise(tmp_path, capfdbinary, monkeypatch):
    assert main([*SAY, "-o", "out.wav"]) == 0
    assert len(read_wav("out.wav")) == FRAMES * SAMPLES_PER_FRAME
    assert [path.name for path in tmp_path.iterdir()] == ["out.wav"]
    assert RANDOM_WEIGHTS.encode() in capfdbinary.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello there.\n"))
    assert main(["say", "-", *SAY[2:], "-o", "-"]) == 0
    assert np.array_equal(np.frombuffer(capfdbinary.readouterr().out, dtype="<i2"), read_wav("out.wav"))
    words = ["sh", "-c", '"$0" -m mktts "$@" <&- 2>&-', sys.executable, *SAY, "-o", "-"]  # no message in the speech
    heard = subprocess.run(words, stdout=subprocess.PIPE, env={**os.environ, **python_path()}, check=True).stdout
    assert np.array_equal(np.frombuffer(heard, dtype="<i2"), read_wav("out.wav"))


def test_say_says_the_words_of_a_lexicon_as_they_are_listed_and_greedy_does_not_depend_on_the_seed(tmp_path):
    (tmp_path / "words.tsv").write_text("kit\tHello\n", encoding="utf-8")
    kept = [*RANDOM, "--greedy", "--max-frames", "4"]
    assert main([*SAY[:2], *kept, "--seed", "1", "-o", "plain.wav"]) == 0
    assert main(["say", "Kit there.", *kept, "--seed", "2", "--lexicon", "words.tsv", "-o", "listed.wav"]) == 0
    assert main(["say", "Kit there.", *kept, "-o", "written.wav"]) == 0
    assert np.array_equal(read_wav("listed.wav"), read_wav("plain.wav"))
    assert not np.array_equal(read_wav("written.wav"), read_wav("plain.wav"))


def test_say_clones_a_recording_in_one_command_as_from_a_saved_voice():
    soundfile = pytest.importorskip("soundfile")
    hum = 0.3 * np.sin(np.cumsum(0.05 + 0.02 * np.sin(np.arange(SAMPLE_RATE_HZ) / 3_000)))
    soundfile.write("me.flac", hum, SAMPLE_RATE_HZ)
    base = ["say", "Hello there.", *BASE, "--seed", "1", "--max-frames", "3"]
    assert main(["voice", "me.flac", "-o", "me.safetensors", "--ref-text", "A hum.", *BASE]) == 0
    assert main([*base, "--voice", "me.safetensors", "-o", "saved.wav"]) == 0
    assert main([*base, "--ref-audio", "me.flac", "--ref-text", "A hum.", "-o", "cloned.wav"]) == 0
    assert np.array_equal(read_wav("saved.wav"), read_wav("cloned.wav"))


@needs("av")
def test_the_end_of_the_name_is_the_format_and_speed_changes_the_length_of_file_and_pipe(tmp_path, capfdbinary):
    for codec in ("aac", "mp3"):
        assert main([*SAY, "-o", f"out.{codec}"]) == 0
        found, pcm, rate_hz = decoded((tmp_path / f"out.{codec}").read_bytes())
        assert found.startswith(codec)
        assert len(pcm) / rate_hz == pytest.approx(FRAMES * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ, abs=0.1)
    assert main([*SAY, "-o", "fast.wav", "--speed", "1.6"]) == 0
    assert len(read_wav("fast.wav")) == round(FRAMES * SAMPLES_PER_FRAME / 1.6)
    capfdbinary.readouterr()
    assert main([*SAY, "-o", "-", "--speed", "1.6"]) == 0
    assert np.frombuffer(capfdbinary.readouterr().out, "<i2").tolist() == read_wav("fast.wav").tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["say", " \n", "-o", "x.wav"], "nothing but blanks"),
        (["say", "h\udce9llo", "-o", "x.wav"], "UTF-8"),
        (["say", "Hi.", "-o", "absent/x.wav"], "absent/x.wav: expected a file name in a folder that exists"),
        *(([*HI, name, "nobody"], "nobody") for name in ("--speaker", "--language", "--device")),
        *(([*HI, name, "absent"], "absent") for name in ("--checkpoint", "--voice")),
        ([*HI, "--ref-text", "words"], "--ref-audio, which is missing"),
        ([*HI, "--speed", "5"], "--speed must be 0.25 to 4, got 5"),
        ([*HI, "--lexicon", "absent.tsv", *RANDOM], "absent.tsv: expected a lexicon"),
        (["say", "Hi."], "expected -o FILE, -o - (a pipe) or --play"),
        (["say", "Hi.", "-o", "x.mp4", "--checkpoint", "absent-folder"], "x.mp4: expected a name that ends in .wav"),
        (["say", "Hi.", "-o", ".", "--checkpoint", "absent-folder"], ".: expected a name"),
        ([*HI, "--checkpoint", "random:tiny:base"], "expected --ref-audio RECORDING"),
        ([*HI, "--ref-text", "a", "--ref-audio", "absent.wav", *BASE], "absent.wav"),
        ([*HI, "--ref-text", " ", "--ref-audio", "absent.wav", *BASE], "--ref-text must be"),
        (["voice", "absent.wav", "-o", "v.safetensors", *BASE], "absent.wav"),
        (["voice", "absent.wav", "-o", "absent/v.safetensors", *BASE], "absent/v.safetensors: expected a file name"),
        (["inspect", "random:enormous"], "enormous"),
        (["run", "absent.ipynb"], "absent.ipynb"),
        (["bench", "--checkpoint", "absent-folder"], "absent-folder"),
    ],
    ids=lambda value: None if isinstance(value, list) else value[:24],
)
def test_bad_input_is_one_line_on_standard_error_and_status_2(tmp_path, capsys, words, message):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("mktts: ")
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_without_a_command_all_are_listed_and_an_unknown_one_is_refused_with_a_hint(capsys):
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            main(words)
        return capsys.readouterr().err

    listed = refused()
    assert all(f"  {name} " in listed for name in COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out == listed
    assert "`python -m mktts --help` lists all" in refused("sing") and "did you mean say?" in refused("sya", "Hello.")
    assert "did you mean train talker?" in refused("train", "tlaker", "--help")


@pytest.mark.parametrize("command", [[], *(name.split() for name in COMMANDS)], ids=" ".join)
def test_help_shows_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    shown = examples(capsys.readouterr().out)
    assert shown and shown[0].startswith(" ".join(command))


def test_inspect_names_components_speakers_and_random_weights(capsys):
    assert main(["inspect", "random:tiny-projected"]) == 0
    text = capsys.readouterr().out
    for word in ("talker layers", "predictor", "small_to_mtp_projection", "codec", "ryan", "random weights"):
        assert word in text


def test_bench_prints_a_table_and_ends_in_one_json_document(capsys):
    assert main(["bench", "--only", "codec"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert RANDOM_WEIGHTS in lines
    document = json.loads(lines[-1])
    assert document["figures"]["codec_1_ms"]["n"] == 20
    assert document["settings"]["random_weights"] is True and document["environment"]["torch"]
    assert sum(line.startswith("codec_1_ms ") for line in lines) == 1


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (MkttsError("a wrong word"), 2, "a wrong word"),
        (EngineError("the worker stopped"), 1, "the worker stopped"),
        (OSError(errno.ENOSPC, "No space left on device", "out.wav"), 1, "out.wav: No space left on device"),
        (OSError("timed out"), 1, "timed out"),
        (FileNotFoundError(errno.ENOENT, "no such file", "in.wav"), 2, "in.wav: no such file"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_bad_input_is_2_and_a_failure_inside_is_1(error, status, line, monkeypatch, capsys):
    monkeypatch.setattr("mktts.checkpoint.open_checkpoint", Mock(side_effect=error))
    assert main([*SAY, "-o", "out.wav"]) == status
    assert capsys.readouterr().err == f"mktts: {line}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("output", ["/dev/full", "-"])
def test_a_full_disk_is_one_line_and_status_1(output):
    with open("/dev/full", "wb") as full:
        process = start(*SAY, "-o", output, stdout=full)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = [line for line in error.decode().splitlines() if line.startswith("mktts: ")]
    assert line.endswith("No space left on device") and "Traceback" not in error.decode()


SLOW = """
import time, mktts.checkpoint
def load(*_):
    try:
        print('loading', flush=True)
        time.sleep(60)
    finally:
        open('tidied', 'w').close()
mktts.checkpoint.open_checkpoint = load
"""


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, b"interrupted\n"), (signal.SIGTERM, b"")])
def test_a_signal_while_the_model_loads_ends_it_without_a_traceback(number, said, tmp_path):
    process = start(*SAY, "-o", "out.wav", before=SLOW)
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + number, said)
    assert [path.name for path in tmp_path.iterdir()] == ["tidied"]


@pytest.mark.parametrize(("number", "said"), [(signal.SIGPIPE, b""), (signal.SIGINT, b"interrupted\n")])
def test_a_closed_pipe_ends_the_generation_quietly_and_ctrl_c_with_one_line(number, said):
    process = start("say", "Hello there.", *RANDOM, "-o", "-", "--max-frames", "2000")
    assert len(process.stdout.read(SAMPLES_PER_FRAME)) == SAMPLES_PER_FRAME  # the model is loaded and speaking
    process.stdout.close() if number == signal.SIGPIPE else process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert process.stderr.read() == said


def test_a_signal_that_a_library_turns_into_an_error_still_ends_the_command_by_it(monkeypatch, capsys):
    def swallows(arguments):
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise ValueError("could not determine the shape of object type") from None

    monkeypatch.setattr("mktts.measure.inspection.main", swallows)
    assert main(["inspect", "small"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == ""
