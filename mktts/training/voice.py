"""All of a voice's training in order, within a time: `python -m mktts train voice`.

While the teacher speaks on all cores, the codec is fitted to its first hours; as soon as `--first-hours` are there,
they are encoded and decoder and talker begin to learn on their devices; what comes later is encoded meanwhile, and the
talker takes it along at its next epoch. Decoder and talker need nothing of each other, since codes come from the fitted
analysis. A part that fails is tried again (the talker without CUDA graphs, then on one device; what began with another
voice, from nothing), the others go on. The talker is told how many books of the codec are noise.

RUN/status.json says what stands, RUN/logs holds what every part printed, and `python -m mktts train bring` packs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mktts.common import write_json
from mktts.errors import CheckpointError, OptionsError
from mktts.training.codec.trainer import load_codec
from mktts.training.parts import Part, command

STATUS = "status.json"
# Further words for commands. All begin with the voice in the box, which knows more than minutes can teach.
FIT, CODEC, TALKER = "--begin small --refit", "--graphs --rate 5e-4 --hours 40", "--graphs --begin small"
CLIP_S = 3.2  # of a clip of `train texts`, about
CLIPS_PER_SHARD = 200
_ALL = 1_000_000  # hours: as many as there are texts for
_FIT_SHARDS = 40  # seven hours
_LEAST_SHARDS = 64  # a start of the encoder takes as long as encoding so many
_MOST_FAILURES = 5  # an encoder that fails every time is left alone
_PACK_S = 30.0
_LOOK_S = 1.0  # between looks at what has ended and what is to be encoded


@dataclass(frozen=True)
class VoicePlan:
    """What to train, where, and for how long. Devices of several codecs: one decoder each, of the same codes."""

    texts: Path | None  # None: `recordings` are the teacher
    out: Path
    minutes: float
    first_hours: float
    workers: int
    codec_devices: tuple[str, ...]
    talker_devices: tuple[str, ...]
    fit: str = FIT
    codec: tuple[str, ...] = (CODEC,)
    talker: str = TALKER
    recordings: Path | None = None

    @property
    def teacher(self) -> tuple:
        """Words of the command that makes the audio."""
        if self.texts is None:
            return ("recordings", "--data", self.recordings, "--out", self.audio, "--workers", self.workers)
        return ("teacher", "--texts", self.texts, "--out", self.audio, "--hours", _ALL, "--workers", self.workers)

    @property
    def audio(self) -> Path:
        return self.out / "audio"

    @property
    def codes(self) -> Path:
        return self.out / "codes"

    @property
    def fitted(self) -> Path:
        return self.out / "codec.pt"

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.codec_devices, *self.talker_devices)))

    @property
    def first_shards(self) -> int:
        return max(1, round(self.first_hours * 3600 / CLIP_S / CLIPS_PER_SHARD))

    def codec_out(self, number: int) -> Path:
        return self.out / f"codec{number}"

    @property
    def talker_out(self) -> Path:
        return self.out / "talker"


@dataclass
class VoiceRun:
    """A plan that is being carried out; `status.json` is written whenever something changes."""

    plan: VoicePlan
    began_s: float = field(default_factory=time.monotonic)
    parts: dict[str, Part] = field(default_factory=dict)
    passes: int = 0  # of the encoder
    failures: int = 0  # passes that failed

    @property
    def until_s(self) -> float:
        return self.began_s + 60 * self.plan.minutes

    def minutes_left(self) -> float:
        """For training: up to the end, less the time in which checkpoints are written."""
        return max(0.02, (self.until_s - time.monotonic() - _PACK_S) / 60)

    def start(self, name: str, *attempts) -> Part:
        self.parts[name] = Part(name, self.plan.out / "logs", attempts)
        self.note()
        return self.parts[name]

    def note(self) -> None:
        plan = self.plan
        parts = {name: {"state": part.state, "seconds": round(part.seconds, 1)} for name, part in self.parts.items()}
        counts = {"audio_shards": len(_shards(plan.audio)), "codes_shards": len(_shards(plan.codes))}
        seconds = round(time.monotonic() - self.began_s, 1)
        write_json(plan.out / STATUS, {"seconds": seconds, "minutes": plan.minutes, **counts, "parts": parts})

    def wait_for_shards(self, teacher: Part, count: int) -> None:
        """Until so many are there, or the teacher has ended. Raises CheckpointError where it failed without any."""
        while len(_shards(self.plan.audio)) < count and teacher.running:
            time.sleep(0.2)
        if not _shards(self.plan.audio):
            raise CheckpointError(f"expected audio of the teacher, found none: {teacher.log} says why")

    def encode(self) -> list[Part]:
        """One process a device, each with its share of the shards that have no codes yet."""
        self.passes += 1
        n, found = len(self.plan.devices), []
        for i, device in enumerate(self.plan.devices):
            words = ("encode", "--codec", self.plan.fitted, "--data", self.plan.audio, "--out", self.plan.codes)
            words += ("--device", device, "--part", f"{i + 1}/{n}")
            found.append(self.start(f"encode{self.passes}_{i}", lambda words=words: command(*words)))
        return found

    def learn(self) -> Iterator[Part]:
        """Starts decoders and talker."""
        plan = self.plan
        for i, device in enumerate(plan.codec_devices):
            words = ("codec", "--codec", plan.fitted, "--data", plan.audio, "--codes", plan.codes)
            words += ("--out", plan.codec_out(i), "--device", device, "--by-clock", "--resume")
            words += tuple(shlex.split(plan.codec[min(i, len(plan.codec) - 1)]))
            plain = tuple(word for word in words if word != "--graphs")
            tries = [lambda w=w: command(*w, "--minutes", f"{self.minutes_left():.2f}") for w in (words, words, plain)]
            yield self.start(f"codec{i}", *tries)
        words = ("talker", "--codes", plan.codes, "--out", plan.talker_out, "--follow", "--by-clock", "--resume")
        words += ("--noise-books", load_codec(plan.fitted).sizes.noise_books, *shlex.split(plan.talker))
        plain = tuple(word for word in words if word != "--graphs")
        fresh = tuple(_without(list(plain), "--begin"))
        several, one = ",".join(plan.talker_devices), plan.talker_devices[0]
        ways = ((words, several), (plain, several), (words, one), (plain, one), (fresh, one))
        yield self.start(
            "talker",
            *(lambda w=w, d=d: command(*w, "--device", d, "--minutes", f"{self.minutes_left():.2f}") for w, d in ways),
        )


def train(plan: VoicePlan) -> bool:
    """Carries the plan out; whether all that matters ended well. Raises CheckpointError where nothing can begin."""
    run = VoiceRun(plan)
    plan.out.mkdir(parents=True, exist_ok=True)
    teacher = run.start("teacher", *[lambda: ["nice", *command(*plan.teacher)]] * 2)  # learners go before it
    run.wait_for_shards(teacher, min(_FIT_SHARDS, plan.first_shards))
    fit = ("fit", "--data", plan.audio, "--out", plan.fitted, "--device", plan.codec_devices[0])
    ways = (shlex.split(plan.fit), _without(shlex.split(plan.fit), "--begin"))  # books anew rather than no voice
    if not run.start("fit", *(lambda way=way: command(*fit, *way) for way in ways)).wait(run.until_s):
        teacher.stop()
        raise CheckpointError(f"expected a fitted codec: {plan.out / 'logs' / 'fit.log'} says why there is none")
    run.wait_for_shards(teacher, plan.first_shards)
    _wait(run, run.encode())
    learners = list(run.learn())
    encoders: list[Part] = []
    while any(part.running for part in learners) and time.monotonic() < run.until_s + 120:
        waiting = len(_shards(plan.audio)) - len(_shards(plan.codes))
        free = not any(part.running for part in encoders)
        if free:
            run.failures += any(part.state == "failed" for part in encoders)
            encoders = []
        if free and run.failures < _MOST_FAILURES and waiting >= (_LEAST_SHARDS if teacher.running else 1):
            encoders = run.encode()
        run.note()
        time.sleep(_LOOK_S)
    for part in run.parts.values():
        if part.running:
            part.stop()
    run.note()
    return all(part.state == "done" for part in (*learners, teacher))


def _wait(run: VoiceRun, parts: list[Part]) -> None:
    for part in parts:
        part.wait(run.until_s)
    run.note()


def _without(words: list[str], flag: str) -> list[str]:
    """Command-line words without `flag` and its value."""
    if flag not in words:
        return words
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def _shards(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.npz") if not path.name.startswith(".")]


EXAMPLES = """examples:
  python -m mktts train voice --texts texts.xz --out RUN --minutes 25 --codec-devices cuda:0 --talker-devices cuda:1
  python -m mktts train voice --recordings FOLDER --out RUN --minutes 240

RUN/talker and RUN/codec0 hold what `train talker` and `train codec` leave; further words for a command stand in one
quoted argument behind an equals sign, for each codec device in its own --codec. The last line of standard output is
JSON: RUN/status.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--texts", type=Path, metavar="FILE.xz", help="of `train texts`: flite speaks them all")
    source.add_argument("--recordings", type=Path, metavar="FOLDER", help="with transcripts: `train recordings`")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="folder for everything")
    parser.add_argument("--minutes", type=float, required=True, help="from now to the last checkpoint")
    parser.add_argument("--first-hours", type=float, default=36.0, help="of audio to begin with (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of the teacher (default: one a core)")
    parser.add_argument("--codec-devices", default="cuda:0", help="a decoder each (default: %(default)s)")
    parser.add_argument("--talker-devices", default="cuda:0", help="one talker on all (default: %(default)s)")
    parser.add_argument("--fit", default=FIT, metavar="WORDS", help="for `train fit` (default: %(default)s)")
    parser.add_argument("--codec", action="append", metavar="WORDS", help=f"for `train codec` (default: {CODEC})")
    parser.add_argument("--talker", default=TALKER, metavar="WORDS", help="for `train talker` (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Trains. Raises OptionsError for a source that is not there, CheckpointError where nothing can begin."""
    given = arguments.texts or arguments.recordings
    if not given.exists():
        raise OptionsError(f"{given}: expected sentences of `train texts` or a folder of recordings, found nothing")
    plan = VoicePlan(
        arguments.texts,
        arguments.out,
        arguments.minutes,
        arguments.first_hours,
        arguments.workers,
        tuple(arguments.codec_devices.split(",")),
        tuple(arguments.talker_devices.split(",")),
        arguments.fit,
        tuple(arguments.codec or (CODEC,)),
        arguments.talker,
        arguments.recordings,
    )
    well = train(plan)
    print(json.dumps(json.loads((plan.out / STATUS).read_text(encoding="utf-8"))))
    return 0 if well else 1
