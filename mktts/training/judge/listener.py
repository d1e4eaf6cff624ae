"""One text spoken by student and teacher, heard in free dictation, its sound measured: for many small questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mktts.audio import first_audible_sample
from mktts.measure.recogniser import ClosedRecogniser, Recogniser, errors_by_sound, words
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data import teacher
from mktts.training.judge.keep import Ears, KeptFolder, Spoken, Student, digest_of
from mktts.training.judge.likeness import Likeness, likeness_of
from mktts.training.judge.loudness import integrated_lufs
from mktts.training.judge.signal import BUZZ_LAG_S, FRAME_LAG_S, click_dbfs, lag_correlation, start_dbfs
from mktts.training.judge.utterances import cached, codec_of, student_of

STUDENT, TEACHER, CODEC = "student", "teacher", "codec"
FREE, CHOICE = "free", "choice"  # dictation; one of the texts that were given


@dataclass(frozen=True)
class Line:
    """text: what the voice is given. said: the words that count as right. voices: who speaks it.

    ears: how it is heard, None for not at all. sound: the audio measured.
    """

    text: str
    said: str
    speaker: str
    seed: int
    voices: tuple[str, ...] = (STUDENT, TEACHER)
    ears: str | None = FREE
    sound: bool = False


@dataclass(frozen=True)
class JudgedSound:
    """Measures of one utterance (mktts.training.judge.signal, loudness); None where silence has none."""

    buzz: float | None  # repetition after 20 ms
    frame_buzz: float | None  # after 80 ms
    click_dbfs: float | None
    start_dbfs: float | None
    lead_ms: float | None
    lufs: float | None


@dataclass(frozen=True)
class Judged:
    """What one voice made of a line. errors: None where it was not heard."""

    audio_s: float
    finish: str
    errors: int | None = None
    heard: str | None = None
    sound: JudgedSound | None = None


@dataclass(frozen=True)
class Listened:
    """A line, how many words it has, and what each voice made of it."""

    line: Line
    words: int
    voices: Mapping[str, Judged] = field(default_factory=dict)
    likeness: Likeness | None = None  # of the codec's copy to the teacher


@dataclass(frozen=True)
class ListenerSetup:
    """What a worker process needs to make a `LineJudge` (`utterances.measure`)."""

    checkpoint: str
    device: str = "cpu"
    layout: str | None = None
    keep: Path | None = None
    choices: tuple[str, ...] = ()  # of the recogniser that chooses
    codec_state: Path | None = None
    codec_audio: Path | None = None

    def judge(self) -> LineJudge:
        from mktts.checkpoint import open_checkpoint

        keep = KeptFolder(self.keep)
        names = (digest_of(open_checkpoint(self.checkpoint)), self.layout, self.device)
        recognisers = {FREE: Recogniser(), **({CHOICE: ClosedRecogniser(self.choices)} if self.choices else {})}
        return LineJudge(
            keep.student(student_of(self.checkpoint, self.device, self.layout), names),
            lambda text, speaker: cached(keep.teacher(), text, speaker, teacher.speak),
            {name: keep.ears(recogniser) for name, recogniser in recognisers.items()},
            codec_of(self.codec_state, self.codec_audio),
        )


class LineJudge:
    """Makes and measures lines; student, teacher and codec as of `utterances.Judge`, ears by the names of `Line`."""

    def __init__(
        self,
        student: Student,
        teacher: Callable[[str, str], np.ndarray],
        ears: Mapping[str, Ears | Recogniser],
        codec: Callable[[str, str, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.student, self.teacher, self.ears, self.codec = student, teacher, ears, codec

    def run(self, line: Line) -> Listened:
        audio = {name: self._audio(line, name) for name in line.voices}
        likeness = None
        if line.sound and CODEC in audio:
            likeness = likeness_of(self._audio(line, TEACHER).pcm, audio[CODEC].pcm)
        voices = {name: self._heard(line, spoken) for name, spoken in audio.items()}
        return Listened(line, len(words(line.said)), voices, likeness)

    def _audio(self, line: Line, voice: str) -> Spoken:
        """The line by "student", "teacher" (which says `said`) or "codec" (the teacher's audio through the codec)."""
        if voice == STUDENT:
            return self.student(line.text, line.speaker, line.seed, False)
        truth = self.teacher(line.said, line.speaker)
        if voice == CODEC and self.codec:
            truth = self.codec(line.said, line.speaker, truth)
        return Spoken(truth, "eos")

    def _heard(self, line: Line, spoken: Spoken) -> Judged:
        sound = sound_of(spoken.pcm) if line.sound else None
        audio_s = len(spoken.pcm) / SAMPLE_RATE_HZ
        if line.ears is None:
            return Judged(audio_s, spoken.finish, sound=sound)
        ears = self.ears[line.ears]
        heard = ears.hear(spoken.pcm)
        return Judged(audio_s, spoken.finish, errors_by_sound(line.said, heard, ears.sound), heard, sound)


def sound_of(pcm: np.ndarray) -> JudgedSound:
    """All measures of (n,) float32 at 24 kHz."""
    first = first_audible_sample(pcm)
    return JudgedSound(
        buzz=_finite(lag_correlation(pcm, BUZZ_LAG_S)),
        frame_buzz=_finite(lag_correlation(pcm, FRAME_LAG_S)),
        click_dbfs=_finite(click_dbfs(pcm)),
        start_dbfs=_finite(start_dbfs(pcm)),
        lead_ms=None if first is None else 1_000 * first / SAMPLE_RATE_HZ,
        lufs=integrated_lufs(pcm),
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
