"""A program that is killed at every one of its calls that change a folder; what is left is checked, and work goes on.

`python crashes.py FOLDER` forks a child for each of those calls: it writes three sentences with `speak_into`, over a
synthesizer that is not there, and dies without a word: before the call, in the middle of a write, or with a file that
is still empty.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
import wave
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth.many import Said
from mktts.synth.speak_all import keeping
from mktts.synth.speak_all.folder import held, settle_settings
from mktts.synth.speak_all.manifest import Manifest
from mktts.synth.speak_all.sentences import Sentence
from mktts.synth.speak_all.takes import Manner

SENTENCES = [Sentence(number, f"s{number}", f"Text {number}.") for number in (1, 2, 3)]
MANNER = Manner(seed=1, beside=Path("."))
CALLS = ("write", "fsync", "replace", "ftruncate", "truncate", "chmod", "unlink", "open")
DIED = 9


def tone(sentence: Sentence) -> np.ndarray:
    return np.full(SAMPLE_RATE_HZ // 100 * sentence.line, 0.25, np.float32)


class Synthesizer:
    def say_each(self, ask: Any, at_once: int | None = None) -> Any:
        while (asked := ask()) is not None:
            yield Said(asked, SimpleNamespace(finish_reason="eos"), tone(asked.name[0]))


def speak(folder: Path) -> list[str]:
    """The ids that had to be spoken."""
    with held(folder):
        settle_settings(folder, {"format": "wav", "seed": None}, {"seed": 4})
        manifest = Manifest(folder)
        left = [one for one in SENTENCES if one.id not in manifest.done]
        keeping.speak_into(folder, manifest, "wav", Synthesizer(), left, MANNER)
        manifest.close(tidy=True)
    return [one.id for one in left]


def count_down(name: str, real: Any, left: list[int], *words: Any, **named: Any) -> Any:
    left[0] -= 1
    if not left[0]:
        if name == "write":
            real(words[0], bytes(words[1])[: len(words[1]) // 2])
        os._exit(DIED)
    return real(*words, **named)


def count_down_opened(real: Any, left: list[int], path: Any, mode: str = "r", *words: Any, **named: Any) -> Any:
    """Of files that the interpreter writes to: it dies when one is there, and empty."""
    opened = real(path, mode, *words, **named)
    if "w" in mode:
        count_down("opened", lambda: None, left)
    return opened


def killed_at(folder: Path, call: int) -> bool:
    """Whether the program came so far."""
    child = os.fork()
    if not child:
        left = [call]
        for name in CALLS:
            setattr(os, name, partial(count_down, name, getattr(os, name), left))
        io.open = builtins.open = partial(count_down_opened, io.open, left)
        speak(folder)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, DIED), code
    return code == DIED


def check(folder: Path, *, done: bool) -> None:
    """What a reader may rely on at any moment; `done`: and at the end."""
    for sentence in SENTENCES:
        path = folder / f"{sentence.id}.wav"
        if path.exists() or done:
            with wave.open(str(path)) as file:
                assert file.getnframes() == len(tone(sentence)), path
    lines = (folder / "manifest.jsonl").read_bytes().split(b"\n") if (folder / "manifest.jsonl").exists() else [b""]
    for line in lines[:-1]:
        record = json.loads(line)
        assert (folder / record["file"]).stat().st_size == record["bytes"], record
    if done:
        assert [json.loads(line)["id"] for line in lines[:-1]] == [one.id for one in SENTENCES] and lines[-1] == b""
        names = {"manifest.jsonl", "settings.json", ".lock", *(f"{one.id}.wav" for one in SENTENCES)}
        assert {entry.name for entry in folder.iterdir()} == names


def main(root: Path) -> None:
    keeping._WRITERS = 1
    call, spared = 0, 0
    while True:
        call += 1
        folder = root / str(call)
        came = killed_at(folder, call)
        if folder.exists():
            check(folder, done=not came)
        noted = Path(folder, "manifest.jsonl")
        whole = noted.read_bytes().count(b"\n") if noted.exists() else 0
        left = speak(folder)
        assert len(left) == len(SENTENCES) - whole, (call, left, whole)
        spared += whole
        check(folder, done=True)
        if not came:
            break
    print(json.dumps({"calls": call - 1, "spared": spared}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
