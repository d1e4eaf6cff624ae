"""The line for whoever waits."""

from __future__ import annotations

import re
import time

from mktts.common import announced


def test_quick_work_says_nothing(capsys):
    with announced("working", patience_s=60):
        pass
    assert capsys.readouterr().err == ""


def test_slow_work_says_what_it_does_and_how_long_it_took(capsys):
    with announced("working", patience_s=0):
        time.sleep(0.05)
    assert re.fullmatch(r"working \.\.\. \d+\.\d s\n", capsys.readouterr().err)
