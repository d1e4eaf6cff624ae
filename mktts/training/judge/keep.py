"""What a judgement need not do twice: audio that was spoken and words that were heard, kept in a folder.

A run that was cut off goes on where it was, and a part that is measured again takes the audio of before. What was
measured of the audio is not kept: a definition that changes takes effect at once.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mktts.audio import from_pcm16, to_pcm16
from mktts.checkpoint import Checkpoint
from mktts.common import write_whole
from mktts.errors import AudioError
from mktts.measure.recogniser import Recogniser

TEACHER, STUDENT, HEARD = "teacher", "student", "heard"


@dataclass(frozen=True)
class Spoken:
    """pcm: float32 (n,) at 24 kHz. finish: why the student stopped (`mktts.speech.guard.FinishReason`)."""

    pcm: np.ndarray
    finish: str


Student = Callable[[str, str, int, bool], Spoken]  # (text, speaker, seed, greedy)


class KeptFolder:
    """A folder with audio in 16 bits at 24 kHz, and texts; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def spoken(self, names: tuple[object, ...], speak: Callable[[], Spoken]) -> Spoken:
        """What `speak` makes, or made when it was asked before with the same names.

        Raises AudioError for a file that holds something else.
        """
        if self.folder is None:
            return _in_16_bits(speak())
        path = self.folder / STUDENT / f"{_digest(*names)}.npz"
        if not path.exists():
            made = speak()
            data = io.BytesIO()
            np.savez(data, pcm=np.frombuffer(to_pcm16(made.pcm), "<i2"), finish=np.array(made.finish))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data.getvalue())
        try:
            with np.load(path, allow_pickle=False) as file:
                return Spoken(from_pcm16(file["pcm"]), str(file["finish"]))
        except (OSError, ValueError, KeyError) as error:
            raise AudioError(f"{path}: expected audio that was kept, but: {error}; delete it") from None

    def heard(self, pcm: np.ndarray, ears: str, hear: Callable[[np.ndarray], str]) -> str:
        """What `hear` hears in (n,), or heard before. ears: what tells one recogniser's setting from another."""
        if self.folder is None:
            return hear(pcm)
        path = self.folder / HEARD / f"{_digest(ears, hashlib.sha256(to_pcm16(pcm)).hexdigest())}.txt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, hear(pcm).encode())
        return path.read_text(encoding="utf-8")

    def student(self, student: Student, names: tuple[object, ...]) -> Student:
        """The same student, who says nothing twice. names: what tells it from other students."""

        def speak(text: str, speaker: str, seed: int, greedy: bool) -> Spoken:
            what = (*names, text, speaker, seed, *(["greedy"] if greedy else []))
            return self.spoken(what, lambda: student(text, speaker, seed, greedy))

        return student if self.folder is None else speak

    def ears(self, recogniser: Recogniser) -> Ears:
        return Ears(self, recogniser)

    def teacher(self) -> Path | None:
        """The folder for the teacher's audio (`utterances.cached`), made where it is not there."""
        if self.folder is None:
            return None
        (self.folder / TEACHER).mkdir(parents=True, exist_ok=True)
        return self.folder / TEACHER


class Ears:
    """A recogniser that hears nothing twice."""

    def __init__(self, keep: KeptFolder, recogniser: Recogniser) -> None:
        self._keep, self._recogniser, self.sound = keep, recogniser, recogniser.sound

    def hear(self, pcm: np.ndarray) -> str:
        return self._keep.heard(pcm, self._recogniser.name, self._recogniser.hear)


def digest_of(checkpoint: Checkpoint) -> str:
    """What tells one voice from another: a digest of every file of its folder, codec included."""
    found = hashlib.sha256()
    for path in sorted(path for path in Path(checkpoint.folder).rglob("*") if path.is_file() and path.suffix != ".md"):
        found.update(str(path.relative_to(checkpoint.folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _digest(*names: object) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()[:24]


def _in_16_bits(spoken: Spoken) -> Spoken:
    """As it comes out of the folder."""
    return Spoken(from_pcm16(to_pcm16(spoken.pcm)), spoken.finish)
