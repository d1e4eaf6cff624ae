"""The settings of a load: its duration, the arrivals of its listeners, and their texts."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from mktts.arguments import option
from mktts.batch import BatchSettings
from mktts.checkpoint import Checkpoint
from mktts.engine.options import Guard, StreamOptions
from mktts.errors import MetricsError, OptionsError
from mktts.measure.bench.sections import WORDS, ModelSettings, text_of
from mktts.measure.parity.upstream import made_up_voice
from mktts.model.prompt import PromptBuilder, Request
from mktts.spec import FRAME_RATE_HZ
from mktts.synth.synthesizer import StreamSettings

HELD_S = 60.0  # a shorter load is not recorded
SHORT_ROWS = 32
_CHARS_A_FRAME = 18 / FRAME_RATE_HZ  # more than is spoken in a frame, so that max_frames ends every utterance
_BURST_S = 0.01
_ONE_SEGMENT = 100_000  # characters: longer than any text here, so that none is split
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. ",
    "We will meet at the station in the morning, and then walk along the river. ",
    "She opened the window, looked at the garden, and said that it had rained. ",
    "Please bring the letters to the office before the end of the day. ",
)


@dataclass(frozen=True)
class LoadSettings(ModelSettings):
    """The settings that all loads of a command share; options are described by their help.

    context_rows: rows of every prompt; None, with trained weights: as many as the natural texts take
    tail_s: how long the load goes on after the measured time
    frames: minimum and maximum of an utterance; in a burst all have the mean
    seed: of the arrivals; utterance i is drawn with seed i

    Raises OptionsError for values out of range."""

    engine: Literal["auto", "single", "batch"] | None = option(None, "of the synthesizer (default: its own)")
    codec: Literal["full", "fast"] | None = option(None, "of the batch engine", name="--codec-precision")
    deterministic: bool | None = option(None, "codes that do not depend on other streams in the batch")
    context_rows: int | None = option(
        None, "rows of every prompt (default: 32 with random weights)", name="--context", metavar="ROWS"
    )
    seconds: float = option(HELD_S, "duration of a load; a shorter one cannot be recorded")
    warm_s: float = option(8.0, "time before that to build the load up", name="--warm-seconds")
    tail_s: float = 2.0
    frames: tuple[int, int] = (round(2 * FRAME_RATE_HZ), round(12 * FRAME_RATE_HZ))
    seed: int = option(0, "of the arrivals")
    burst: bool = option(False, "all listeners of a load arrive within 10 ms, with one utterance each")

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.warm_s > 0:
            raise OptionsError(f"expected seconds and warm_s above 0, got {self.seconds} and {self.warm_s}")
        if self.engine not in ("auto", "batch") and self.codec is not None:
            raise OptionsError("codec precision is a setting of the batch engine: add engine='batch'")

    def loading(self) -> dict[str, Any]:
        batch, engine = BatchSettings(codec=self.codec or BatchSettings.codec), self.engine or "auto"
        return {**super().loading(), "deterministic": self.deterministic, "batch": batch, "engine": engine}

    def arrivals(self, listeners: int) -> list[tuple[float, int]]:
        """Sorted arrivals, (seconds from the start of the run, frames), of an offered load: arrivals per second times
        mean seconds per utterance. In the first half of the warm-up, `listeners` with shortened utterances arrive."""
        rng = np.random.default_rng(self.seed)
        low, high = self.frames
        if self.burst:  # all arrive within the measured time
            return [(self.warm_s + (10 + i / listeners) * _BURST_S, (low + high) // 2) for i in range(listeners)]
        mean_s = (low + high) / 2 / FRAME_RATE_HZ
        under_way_s = rng.uniform(0.0, self.warm_s / 2, listeners)
        found = [(at_s, max(2, int(rng.uniform(0.15, 1.0) * rng.integers(low, high + 1)))) for at_s in under_way_s]
        at_s, end_s = self.warm_s / 4, self.warm_s + self.seconds + self.tail_s
        while (at_s := at_s + rng.exponential(mean_s / listeners)) < end_s:
            found.append((at_s, int(rng.integers(low, high + 1))))
        return sorted(found)


class LoadTexts(NamedTuple):
    """The texts and stream settings of a load.

    rows: of the prompt; a mean if texts are natural
    text: one text for all streams, which max_frames ends; None: natural texts as long as the utterance
    settings: of every stream"""

    rows: int
    text: str | None
    settings: StreamSettings

    def of(self, index: int, frames: int) -> tuple[str, StreamSettings]:
        """Text and settings of the stream for utterance `index` of `frames` frames."""
        return self.text or spoken(index, frames), {**self.settings, "max_frames": frames, "seed": index}


def texts_for(checkpoint: Checkpoint, rows: int | None) -> LoadTexts:
    """Texts for prompts of `rows` rows, exact up to SHORT_ROWS, at least `rows` above. None: SHORT_ROWS, or natural
    texts if the weights are trained. Raises MetricsError if the checkpoint's prompts always have more rows."""
    # On the CPU and in the stored dtype, so that the embedding tables stay memory-mapped.
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer())

    def rows_of(request: Request) -> int:
        return len(builder.build(request).embeds)

    if rows is None and not checkpoint.is_random:
        mean = [rows_of(Request(spoken(index, frames))) for index in range(4) for frames in (25, 87, 150)]
        options = StreamOptions(guard=Guard.off())
        return LoadTexts(round(sum(mean) / len(mean)), None, {"options": options})
    rows = SHORT_ROWS if rows is None else rows
    voice = {"voice": made_up_voice(checkpoint, 0)} if checkpoint.config.type.clones else {}
    encode = checkpoint.tokenizer().encode
    constant = rows_of(Request(WORDS, layout="whole", **voice)) - len(encode(WORDS))  # rows that hold no text
    if rows <= constant:
        raise MetricsError(f"a prompt of this checkpoint has more than {constant} rows, got {rows}")
    text = text_of(rows - constant, encode)
    # Random weights do not end by themselves.
    options = StreamOptions(guard=Guard.off(), max_chars_per_segment=_ONE_SEGMENT)
    settings = {**voice, "layout": "whole"}
    return LoadTexts(rows_of(Request(text, **settings)), text, {**settings, "options": options})


def spoken(index: int, frames: int) -> str:
    """Sentences that take longer to speak than `frames` frames, cut after a word."""
    text = "".join(_SENTENCES[(index + i) % len(_SENTENCES)] for i in range(8))
    end = text.find(" ", round(frames * _CHARS_A_FRAME))
    return text[:end].strip(" ,.") + "."
