"""What all sections of the load measure alike, and how the synthesizer is loaded for it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from mktts.checkpoint import Checkpoint
from mktts.errors import MetricsError, OptionsError
from mktts.spec import FRAME_RATE_HZ

if TYPE_CHECKING:
    from mktts.synth import Synthesizer

HELD_S = 60.0  # a point is held for at least so long, or it is none
EngineName = Literal["auto", "single", "batch"]
ContextKind = Literal["auto", "text", "instruct", "voice", "natural"]


@dataclass(frozen=True)
class LoadSettings:
    """checkpoint, revision, backend, device, dtype: as for Synthesizer.load. engine: None leaves its default.

    codec: the precision of the batch engine's codec, "full" or "fast"; deterministic, max_streams: of the batch
    engine. None leaves each default. context_rows: of every prompt; None takes 32, and of trained weights what a text
    as long as the utterance takes. context: what fills it, see mktts.measure.bench.load.texts. seconds: that a load
    is held. warm_s: before, in which it builds up; tail_s: after, in which it goes on, so that the last of the held
    time meet what the others met. frames: the least and the most of an utterance. seed: of the arrivals; utterance i
    is drawn with seed i.
    Raises OptionsError for values out of range.
    """

    checkpoint: str
    revision: str | None = None
    backend: str = "auto"
    device: str = "auto"
    dtype: str | None = None
    engine: EngineName | None = None
    codec: Literal["full", "fast"] | None = None
    deterministic: bool | None = None
    max_streams: int | None = None
    context_rows: int | None = None
    context: ContextKind = "auto"
    seconds: float = HELD_S
    warm_s: float = 8.0
    tail_s: float = 2.0
    frames: tuple[int, int] = (round(2 * FRAME_RATE_HZ), round(12 * FRAME_RATE_HZ))
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "frames", tuple(self.frames))
        if not self.seconds > 0 or not self.warm_s > 0 or self.tail_s < 0:
            raise OptionsError(
                f"expected seconds and warm_s above 0 and tail_s at least 0, got {self.seconds}, {self.warm_s} and "
                f"{self.tail_s}"
            )
        if not 2 <= self.frames[0] <= self.frames[1]:
            raise OptionsError(f"expected 2 <= least frames <= most frames, got {self.frames}")
        if self.engine != "batch" and self.engine != "auto" and (self.codec, self.max_streams) != (None, None):
            raise OptionsError("codec precision and max_streams belong to the batch engine: name it, engine='batch'")

    @property
    def reportable(self) -> bool:
        """Whether a point with these settings may stand in a file."""
        return self.seconds >= HELD_S

    def command(self, section: str, **numbers: object) -> str:
        """The words that measure `section` again with these settings."""
        words = ["python", "-m", "mktts", "bench", "--load", "--section", section]
        for name, value in numbers.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        flags = {
            "codec": "--codec-precision",
            "context_rows": "--context",
            "context": "--context-kind",
            "warm_s": "--warm-seconds",
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or (field.name != "checkpoint" and value == field.default):
                continue
            flag = flags.get(field.name, f"--{field.name.replace('_', '-')}")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            elif isinstance(value, tuple):
                words += [flag, ",".join(map(str, value))]
            elif field.name != "tail_s":
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Loaded:
    """A synthesizer, with what a point must name. codec: "full" or "fast"."""

    synthesizer: Synthesizer
    checkpoint: Checkpoint
    codec: str
    deterministic: bool


def load(settings: LoadSettings, checkpoint: Checkpoint, keys_values_bytes: int | None = None) -> Loaded:
    """Loads and warms up what is measured. keys_values_bytes: of the batch engine; None leaves its default.

    The engine's own defaults are asked for by leaving them out, and then read off it. Raises what Synthesizer.load
    raises.
    """
    import torch

    from mktts.batch.settings import BatchSettings
    from mktts.synth import Synthesizer

    given: dict[str, Any] = {"backend": settings.backend, "device": settings.device}
    given["dtype"] = getattr(torch, settings.dtype) if settings.dtype else None
    given["deterministic"] = settings.deterministic
    if settings.engine is not None:
        given["engine"] = settings.engine
    asked = {"codec": settings.codec, "max_streams": settings.max_streams, "memory_bytes": keys_values_bytes}
    given["batch"] = BatchSettings(**{name: value for name, value in asked.items() if value is not None})
    synthesizer = Synthesizer.load(checkpoint, **given)
    synthesizer.warm_up()
    lanes = synthesizer.lanes
    if lanes is None:  # one stream's codec, and nothing promised
        return Loaded(synthesizer, checkpoint, "full", False)
    return Loaded(synthesizer, checkpoint, lanes.precision, lanes.deterministic)


def of_file(settings: LoadSettings) -> dict[str, Any]:
    """The settings as a document holds them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def loads(words: str) -> tuple[int, ...]:
    """ "64,128" -> (64, 128). Raises MetricsError."""
    try:
        loads = tuple(int(word) for word in words.split(",") if word.strip())
    except ValueError:
        raise MetricsError(f"--listeners takes whole numbers with commas between them, got {words!r}") from None
    if any(load < 1 for load in loads):
        raise MetricsError(f"--listeners takes numbers of at least 1, got {words!r}")
    return loads
