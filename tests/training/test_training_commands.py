"""The training programs under the command line."""

from __future__ import annotations

import pytest
from commands import examples

from mktts.cli import COMMANDS, main


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("train ")])
def test_help_shows_examples_that_parse(name):
    assert all(example.startswith(name) for example in examples(name)) and examples(name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("encode --codec absent.pt --data d --out o", "absent.pt"),
        ("encode --codec absent.pt --data d --out o --device abacus", "abacus"),
        ("fit --data absent --out c.pt", "absent: expected audio shards"),
        ("codec --codec absent.pt --data d --codes c --out o", "absent.pt"),
        ("talker --codes absent --out o --minutes 1", "absent: expected audio shards"),
        ("teacher --texts absent.xz --out o", "absent.xz"),
        ("ship --voice absent", "absent"),
        ("texts --corpora absent --out t.xz", "absent"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mktts: ") and error.count("\n") == 1 and said in error
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_none_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit, match="2"):
        main("train encode --codec c --data d --out o --part 3/2".split())
    assert "expected I/N with I from 1 to N" in capsys.readouterr().err
