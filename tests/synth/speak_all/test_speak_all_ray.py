"""Two actors of Ray Data on this machine's CPU: the files and the manifest of one process; killed, and taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absent import needs

from mktts.common import python_path

pytestmark = [pytest.mark.slow, needs("ray", "pandas", "pyarrow")]
WAIT_S = 180.0
COUNT = 24


def command(folder: Path, *words: object) -> list[str]:
    given = ("t.txt", "-o", folder, "--checkpoint", "random:tiny", "--device", "cpu", "--seed", 3, "--max-frames", 25)
    return [sys.executable, "-m", "mktts", "speak-all", *map(str, (*given, *words))]


@pytest.fixture
def here(tmp_path, monkeypatch, checkpoint_cache) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("".join(f"This is sentence number {number}.\n" for number in range(COUNT)) + "\x07\n")
    for name, value in python_path().items():
        monkeypatch.setenv(name, value)
    return tmp_path


def speak(folder: Path, *words: object) -> dict:
    done = subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1, done.stderr[-2_000:]  # of the line that cannot be spoken
    return json.loads(done.stdout.splitlines()[-1])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.wav")}


def parts(folder: Path) -> list[Path]:
    return list(folder.glob(".part-*"))


def test_two_actors_make_the_files_and_the_manifest_of_one_process(here):
    one, two = here / "one", here / "two"
    alone, together = speak(one), speak(two, "--ray", "--replicas", 2)
    assert together["ok"] == alone["ok"] == COUNT and together["bad"] == alone["bad"] == 1
    assert len(files(two)) == COUNT and files(two) == files(one)
    assert (two / "manifest.jsonl").read_bytes() == (one / "manifest.jsonl").read_bytes()
    assert parts(two) == []
    assert speak(two, "--ray", "--replicas", 2)["spoken"] == 0


def test_what_actors_made_for_a_process_that_was_killed_is_taken_over(here):
    folder = here / "out"
    words = command(folder, "--ray", "--replicas", 2, "--at-once", 1)
    with subprocess.Popen(words, start_new_session=True) as child:
        until_s = time.monotonic() + WAIT_S
        while sum(path.read_bytes().count(b"\n") for path in parts(folder)) < 3:
            assert child.poll() is None and time.monotonic() < until_s
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
    before = {name: (folder / name).stat().st_mtime_ns for name in files(folder)}
    noted = [json.loads(line) for path in parts(folder) for line in path.read_bytes().split(b"\n")[:-1]]
    assert len(noted) >= 3
    assert speak(folder)["ok"] == COUNT
    kept = [record["file"] for record in noted if "file" in record]
    assert all((folder / name).stat().st_mtime_ns == before[name] for name in kept)
    assert len(files(folder)) == COUNT and parts(folder) == []
