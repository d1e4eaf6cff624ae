"""The line for whoever waits."""

from __future__ import annotations

import re
import time

from mktts.common import announced, counted


def test_quick_work_says_nothing(capsys):
    with announced("working", patience_s=60):
        pass
    assert capsys.readouterr().err == ""


def test_slow_work_says_what_it_does_and_how_long_it_took(capsys):
    with announced("working", patience_s=0):
        time.sleep(0.05)
    assert re.fullmatch(r"working \.\.\. \d+\.\d s\n", capsys.readouterr().err)


def test_one_thing_is_counted_as_one():
    assert [counted(number, "listener") for number in (0, 1, 2)] == ["0 listeners", "1 listener", "2 listeners"]
