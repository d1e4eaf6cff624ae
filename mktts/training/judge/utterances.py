"""One sentence spoken by teacher and student, and measured; several processes share many sentences."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.audio import first_audible_sample, from_pcm16, to_pcm16, write_audio
from mktts.common import write_whole
from mktts.errors import AudioError
from mktts.measure.recogniser import MODES, Recogniser, errors_by_sound, words
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data import teacher
from mktts.training.judge.keep import Ears, KeptFolder, Spoken, Student, digest_of
from mktts.training.judge.mcd import distortion_db
from mktts.training.judge.speakers import embedding, median_f0_hz

if TYPE_CHECKING:
    from mktts.synth import Synthesizer

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Task:
    """What to say, and what to find out about it: with none of the switches only the student speaks."""

    text: str
    speaker: str
    seed: int
    judged: bool = False  # against the teacher
    greedy: bool = False  # the student once more, by argmax
    centroid: bool = False  # the teacher's embedding and nothing else
    listen: Path | None = None  # WAV files NAME_teacher.wav and NAME_student.wav of this path, and nothing else


@dataclass(frozen=True)
class Rendering:
    """One rendering of a sentence beside the teacher's. errors and heard by recogniser mode."""

    audio_s: float
    errors: dict[str, int]
    heard: dict[str, str]
    distortion_db: float  # to the teacher; 0 for the teacher itself
    f0_hz: float | None
    embedding: np.ndarray


@dataclass(frozen=True)
class Measured:
    """What a task found. `voices` has "teacher" and "student", "codec" and "greedy" where there are those."""

    task: Task
    finish: str | None = None
    audio_s: float = 0.0
    lead_ms: float | None = None  # to the first audible 10 ms (mktts.audio); None where there are none
    words: int = 0
    voices: dict[str, Rendering] = field(default_factory=dict)
    embedding: np.ndarray | None = None


@dataclass(frozen=True)
class Setup:
    """What a worker needs to make a `Judge`."""

    checkpoint: str
    vocabulary: tuple[str, ...]  # of the closed recogniser
    device: str = "cpu"
    layout: str | None = None
    teacher_cache: Path | None = None
    codec_state: Path | None = None  # of `train fit` or `train codec`: its copy of the teacher is measured too
    codec_audio: Path | None = None  # the same from files, named as in the teacher's cache
    keep: Path | None = None  # folder of `KeptFolder`

    def judge(self) -> Judge:
        from mktts.checkpoint import open_checkpoint

        keep = KeptFolder(self.keep)
        names = (digest_of(open_checkpoint(self.checkpoint)), self.layout, self.device)
        return Judge(
            keep.student(student_of(self.checkpoint, self.device, self.layout), names),
            lambda text, speaker: cached(self.teacher_cache or keep.teacher(), text, speaker, teacher.speak),
            {"closed": keep.ears(Recogniser(self.vocabulary)), "free": keep.ears(Recogniser())},
            codec_of(self.codec_state, self.codec_audio),
        )


class Judge:
    """Makes and measures utterances.

    student: (text, speaker, seed, greedy) -> Spoken. teacher: (text, speaker) -> float32 (n,). codec: (text, speaker,
    teacher's audio) -> its copy, or None. recognisers: by mode.
    """

    def __init__(
        self,
        student: Student,
        teacher: Callable[[str, str], np.ndarray],
        recognisers: Mapping[str, Ears | Recogniser],
        codec: Callable[[str, str, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.student, self.teacher, self.recognisers, self.codec = student, teacher, recognisers, codec

    def run(self, task: Task) -> Measured:
        if task.centroid:
            return Measured(task, embedding=embedding(self.teacher(task.text, task.speaker)))
        spoken = self.student(task.text, task.speaker, task.seed, False)
        if task.listen:
            write_audio(f"{task.listen}_teacher.wav", self.teacher(task.text, task.speaker))
            write_audio(f"{task.listen}_student.wav", spoken.pcm)
            return Measured(task)
        first = first_audible_sample(spoken.pcm)
        return Measured(
            task,
            finish=spoken.finish,
            audio_s=len(spoken.pcm) / SAMPLE_RATE_HZ,
            lead_ms=None if first is None else 1_000 * first / SAMPLE_RATE_HZ,
            words=len(words(task.text)),
            voices=self._voices(task, spoken) if task.judged else {},
        )

    def _voices(self, task: Task, spoken: Spoken) -> dict[str, Rendering]:
        truth = self.teacher(task.text, task.speaker)
        renderings = {"teacher": truth, "student": spoken.pcm}
        if self.codec:
            renderings["codec"] = self.codec(task.text, task.speaker, truth)
        if task.greedy:
            renderings["greedy"] = self.student(task.text, task.speaker, task.seed, True).pcm
        return {name: self._rendering(task.text, pcm, truth) for name, pcm in renderings.items()}

    def _rendering(self, text: str, pcm: np.ndarray, truth: np.ndarray) -> Rendering:
        heard = {mode: self.recognisers[mode].hear(pcm) for mode in MODES}
        f0_hz = median_f0_hz(pcm)
        return Rendering(
            audio_s=len(pcm) / SAMPLE_RATE_HZ,
            errors={mode: errors_by_sound(text, heard[mode], self.recognisers[mode].sound) for mode in MODES},
            heard=heard,
            distortion_db=0.0 if pcm is truth else distortion_db(truth, pcm),
            f0_hz=f0_hz if np.isfinite(f0_hz) else None,
            embedding=embedding(pcm),
        )


def student_of(checkpoint: str, device: str, layout: str | None) -> Student:
    """A checkpoint's voice with one thread and the torch backend."""
    import torch

    from mktts.synth import Synthesizer

    torch.set_num_threads(1)
    synthesizer: Synthesizer = Synthesizer.load(checkpoint, backend="torch", device=device, cpu_threads=1)

    def speak(text: str, speaker: str, seed: int, greedy: bool) -> Spoken:
        sampling = synthesizer.sampling.greedy() if greedy else None
        stream = synthesizer.stream(text, speaker=speaker, seed=seed, sampling=sampling, layout=layout)
        return Spoken(stream.read(), stream.finish_reason or "failed")

    return speak


def codec_of(state: Path | None, audio: Path | None) -> Callable[[str, str, np.ndarray], np.ndarray] | None:
    """The codec's copy of the teacher's audio: by a file of `load_codec`, from audio files, or None without either."""
    if state is None:
        return None if audio is None else lambda text, speaker, pcm: _read(cache_path(audio, text, speaker))
    import torch

    from mktts.spec import SAMPLES_PER_FRAME
    from mktts.training.codec.trainer import load_codec

    codec = load_codec(state)

    def copy(text: str, speaker: str, pcm: np.ndarray) -> np.ndarray:
        padded = np.pad(pcm, (0, -len(pcm) % SAMPLES_PER_FRAME))
        return codec.decode(codec.encode(torch.from_numpy(padded)[None]))[0, : len(pcm)].numpy()

    return copy


def cache_path(folder: Path, text: str, speaker: str) -> Path:
    """Where a sentence's audio is: int16 (n,) at 24 kHz, .npy."""
    return folder / f"{speaker}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"


def cached(folder: Path | None, text: str, speaker: str, speak: Callable[[str, str], np.ndarray]) -> np.ndarray:
    """float32 (n,) of `speak(text, speaker)`, in 16 bits; kept in `folder` where there is one."""
    if folder is None:
        return speak(text, speaker)
    path = cache_path(folder, text, speaker)
    if not path.exists():
        data = io.BytesIO()
        np.save(data, np.frombuffer(to_pcm16(speak(text, speaker)), "<i2"))
        write_whole(path, data.getvalue())
    return _read(path)


def _read(path: Path) -> np.ndarray:
    try:
        return from_pcm16(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise AudioError(f"{path}: expected int16 audio at 24 kHz as .npy, but: {error}") from None


def measure(setup: Any, tasks: Sequence[Any], workers: int) -> Iterator[Any]:
    """Results in the order of the tasks, by `workers` processes of one thread each; 1 works in this process.

    setup: can be sent to a process; its `judge()` has a method `run` that turns a task into its result.
    """
    if workers <= 1:
        judge = setup.judge()
        yield from map(judge.run, tasks)
        return
    with _one_thread():
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(min(workers, len(tasks)), context, _start, (setup,)) as pool:
            yield from pool.map(_run, tasks)


_setup: list[Any] = []  # of a worker process


def _start(setup: Any) -> None:
    _setup.append(setup)


@cache
def _judge() -> Any:
    """Made with the first task: what fails then reaches the caller by name, and not as a broken pool."""
    return _setup[0].judge()


def _run(task: Any) -> Any:
    return _judge().run(task)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Workers read these variables while they import; they are set back afterwards."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
