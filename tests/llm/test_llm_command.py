"""`python -m mktts text` on a tiny random checkpoint."""

from __future__ import annotations

import io

import pytest

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.cli import main
from mktts.llm.decoder import TextDecoder
from mktts.model.sampling import Choice

RANDOM = ["--checkpoint", "random:tiny"]
TEXT = ["text", "Hello world", *RANDOM, "--device", "cpu", "--max-tokens", "6"]


def test_the_continuation_goes_to_standard_output_and_its_timing_to_standard_error(capsys):
    assert main([*TEXT, "--greedy"]) == 0
    captured = capsys.readouterr()
    with TextDecoder.load("random:tiny", device="cpu") as decoder:
        expected = decoder.generate("Hello world", choice=Choice(do_sample=False), max_tokens=6).read()
    assert captured.out == expected + "\n"
    assert "6 tokens" in captured.err and "ended by max_tokens" in captured.err
    assert RANDOM_WEIGHTS in captured.err


def test_a_seed_repeats_and_standard_input_is_a_prompt(capsys, monkeypatch):
    outs = []
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello world\n"))
    for words in ([*TEXT, "--seed", "1"], ["text", "-", *TEXT[2:], "--seed", "1"], [*TEXT, "--seed", "2"]):
        assert main(words) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["text", "", *RANDOM], "at least one token"),
        (["text", "Hi.", "--checkpoint", "absent-folder"], "absent-folder"),
        (["text", "Hi.", *RANDOM, "--backend", "megakernel", "--device", "cpu"], "megakernel"),
        (["text", "Hi.", *RANDOM, "--max-tokens", "0"], "max_tokens"),
    ],
    ids=["empty", "checkpoint", "backend", "tokens"],
)
def test_bad_input_is_one_line_and_status_2(capsys, words, message):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1
