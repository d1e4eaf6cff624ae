"""The command line on a tiny random checkpoint, as its user meets it: files, pipes, exit statuses, messages."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import wave

import numpy as np
import pytest

from mktts.cli import main, parse
from mktts.common import python_path
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FRAMES = 6
RANDOM = ["--checkpoint", "random:tiny"]  # whose speech never ends by itself
SAY = ["say", "Hello there.", *RANDOM, "--seed", "1", "--max-frames", str(FRAMES)]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch, checkpoint_cache):
    monkeypatch.chdir(tmp_path)


def start(*words: str) -> subprocess.Popen:
    code = "import sys; from mktts.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    environment = {**os.environ, **python_path()}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def read_wav(path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, SAMPLE_RATE_HZ, 2)
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


def test_say_writes_a_wav_of_the_frames_asked_for_and_calls_random_weights_noise(tmp_path, capsys):
    assert main([*SAY, "-o", "out.wav"]) == 0
    assert len(read_wav("out.wav")) == FRAMES * SAMPLES_PER_FRAME
    assert [path.name for path in tmp_path.iterdir()] == ["out.wav"]
    assert "random weights: this is noise, not speech" in capsys.readouterr().err


def test_say_to_a_pipe_gives_the_samples_of_the_file(capfdbinary):
    assert main([*SAY, "-o", "out.wav"]) == 0
    capfdbinary.readouterr()
    assert main([*SAY, "-o", "-"]) == 0
    assert np.array_equal(np.frombuffer(capfdbinary.readouterr().out, dtype="<i2"), read_wav("out.wav"))


def test_say_reads_its_text_from_standard_input(monkeypatch):
    assert main([*SAY, "-o", "given.wav"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello there.\n"))
    assert main(["say", "-", *SAY[2:], "-o", "read.wav"]) == 0
    assert np.array_equal(read_wav("read.wav"), read_wav("given.wav"))


def test_greedy_does_not_depend_on_the_seed():
    for seed in ("1", "2"):
        assert main([*SAY[:4], "--greedy", "--seed", seed, "--max-frames", "3", "-o", f"{seed}.wav"]) == 0
    assert np.array_equal(read_wav("1.wav"), read_wav("2.wav"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["say", " \n", "-o", "x.wav"], "nothing but blanks"),
        (["say", "Hi.", "-o", "absent/x.wav"], "absent/x.wav: expected a file name in a folder that exists"),
        (["say", "Hi.", "-o", "x.wav", "--speaker", "nobody"], "nobody"),
        (["say", "Hi.", "-o", "x.wav", "--language", "klingon"], "klingon"),
        (["say", "Hi.", "-o", "x.wav", "--checkpoint", "absent-folder"], "absent-folder"),
        (["say", "Hi.", "-o", "x.wav", "--ref-text", "words"], "--ref-audio, which is missing"),
        (["say", "Hi.", "-o", "x.wav", "--voice", "absent.safetensors"], "absent.safetensors"),
        (["say", "Hi.", "-o", "x.wav", "--device", "abacus"], "abacus"),
        (["voice", "absent.wav", "-o", "v.safetensors"], "absent.wav"),
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


def test_unknown_command_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["sing"])
    assert "invalid choice: 'sing'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["say"], ["voice"], ["inspect"], ["bench"], ["run"], ["serve"]], ids=str)
def test_help_shows_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    text = capsys.readouterr().out
    examples = [line.partition("-m mktts ")[2].split("|")[0] for line in text.splitlines() if line.startswith("  ")]
    examples = [words for words in examples if words]
    assert examples
    for example in examples:
        parse(shlex.split(example))
    assert max(map(len, text.splitlines())) <= 130


def test_inspect_names_the_checkpoint_and_its_random_weights(capsys):
    assert main(["inspect", "random:tiny"]) == 0
    text = capsys.readouterr().out
    assert "talker" in text and "predictor" in text and "codec" in text and "random weights" in text


def test_bench_prints_a_table_and_ends_in_one_json_document(capsys):
    assert main(["bench", "--frames", "4", "--repeats", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "random weights: timing and parity only" in lines
    document = json.loads(lines[-1])
    figures = document["figures"]
    assert {"ttfc_ms", "rtf", "talker_ms_per_frame", "predictor_ms_per_frame", "codec_ms_per_frame"} <= set(figures)
    assert {f"codec_{frames}_ms" for frames in (1, 2, 4, 8)} <= set(figures)
    assert figures["rtf"]["n"] == 2 and figures["load_peak_rss_bytes"]["unit"] == "bytes"
    assert figures["load_peak_rss_bytes"]["median"] >= figures["import_peak_rss_bytes"]["median"] > 0
    assert document["settings"]["random_weights"] is True and document["environment"]["torch"]
    assert sum(line.startswith("rtf ") for line in lines) == 1


def test_closing_the_pipe_ends_the_generation_quietly():
    process = start("say", "Hello there.", *RANDOM, "-o", "-", "--max-frames", "2000")
    assert len(process.stdout.read(SAMPLES_PER_FRAME)) == SAMPLES_PER_FRAME
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""


def test_ctrl_c_ends_the_generation_with_one_line():
    process = start("say", "Hello there.", *RANDOM, "-o", "-", "--max-frames", "2000")
    process.stdout.read(SAMPLES_PER_FRAME)  # the model is loaded and speaking
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGINT, b"interrupted\n")
