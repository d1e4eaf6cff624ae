"""What the listeners hear, so that every prompt has the rows that are wanted.

* text: a text so long that the prompt has them, in the whole layout; every arrival computes all its rows
* instruct: a text of the short prompt behind an instruction, where the checkpoint takes one: the instruction's rows are
  the same for all, so an engine may keep them
* voice: in-context cloning, whose reference's frames are rows of the prompt (Base alone)
* natural: for trained weights, which end by themselves: as many words as the utterance takes, in the checkpoint's
  own layout
* auto: natural for trained weights where no rows are asked for; text up to 64 rows; above, voice for Base, instruct
  where it is taken, else text

Random weights have no end of their own: `max_frames` is the length, and the guard is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mktts.checkpoint import Checkpoint
from mktts.errors import MetricsError
from mktts.measure.bench.load.settings import ContextKind
from mktts.measure.bench.settings import WORDS
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.voice import Voice
from mktts.spec import CODEBOOK_SIZE, FRAME_RATE_HZ, NUM_CODEBOOKS
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions

if TYPE_CHECKING:
    from mktts.synth.synthesizer import StreamSettings

SHORT_ROWS = 32
_SHORT_TEXT_ROWS = 64  # up to here a text alone fills the prompt
_CHARS_A_FRAME = 18 / FRAME_RATE_HZ  # more than is spoken in a frame, so that max_frames is what ends
_MARGIN_CHARS = 30  # in which some beginning of a text has exactly the tokens that are wanted
_ONE_SEGMENT = 100_000  # characters: no text here is cut
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. ",
    "We will meet at the station in the morning, and then walk along the river. ",
    "She opened the window, looked at the garden, and said that it had rained. ",
    "Please bring the letters to the office before the end of the day. ",
)


@dataclass(frozen=True)
class Said:
    """What a stream of this load is called with. rows: of its prompt; a mean where the kind is natural."""

    kind: str
    rows: int
    text_of: Callable[[int, int], str]  # of utterance i, of so many frames
    settings: StreamSettings

    def of(self, index: int, frames: int) -> tuple[str, StreamSettings]:
        """Text and settings of `stream` for utterance `index`."""
        return self.text_of(index, frames), {**self.settings, "max_frames": frames, "seed": index}


def said(checkpoint: Checkpoint, rows: int | None, kind: ContextKind = "auto") -> Said:
    """Text, voice and instruction for prompts of `rows` rows; None: SHORT_ROWS, or what is natural.

    Up to SHORT_ROWS exactly so many, above at least. Raises MetricsError where the checkpoint cannot have them.
    """
    config = checkpoint.config
    if kind == "auto":
        kind = "natural" if rows is None and not checkpoint.is_random else "text"
        if rows is not None and rows > _SHORT_TEXT_ROWS:
            kind = "voice" if config.type.clones else "instruct" if config.takes_instruct else "text"
    build = _builder(checkpoint)
    base = {"voice": _voice(checkpoint, 0)} if config.type.clones else {}
    guard_off = StreamOptions(guard=Guard.off(), max_chars_per_segment=_ONE_SEGMENT)
    if kind == "natural":
        if rows is not None:
            raise MetricsError("natural texts have the rows that they have: leave the context out")
        mean = [build(Request(spoken(index, frames))) for index in range(4) for frames in (25, 87, 150)]
        return Said(kind, round(sum(mean) / len(mean)), spoken, {"options": StreamOptions(guard=Guard.off())})
    rows = SHORT_ROWS if rows is None else rows
    encode = checkpoint.tokenizer().encode

    def whole(rows: int) -> str:
        constant = build(Request(WORDS, layout="whole", **base)) - len(encode(WORDS))  # rows that are no text's
        if rows <= constant:
            raise MetricsError(f"a prompt of this checkpoint has more than {constant} rows, got {rows}")
        return _words_of(rows - constant, lambda text: len(encode(text)))

    if kind == "text":
        text = whole(rows)
        found = build(Request(text, layout="whole", **base))
        settings = {**base, "layout": "whole", "options": guard_off}
        return Said(kind, found, lambda index, frames: text, settings)
    text = whole(SHORT_ROWS)
    if kind == "instruct":
        if not config.takes_instruct:
            raise MetricsError(f"this {config.type.name} checkpoint takes no instruction: choose another context")
        constant = build(Request(text, layout="whole", instruct=WORDS, **base)) - len(encode(WORDS))
        instruct = _words_of(rows - constant, lambda text: len(encode(text)))
        found = build(Request(text, layout="whole", instruct=instruct, **base))
        settings = {"instruct": instruct, "layout": "whole", "options": guard_off}
        return Said(kind, found, lambda index, frames: text, settings)
    if not config.type.clones:
        raise MetricsError(f"only Base clones a voice in context, this is {config.type.name}: choose another context")
    head = build(Request(text, layout="streaming", voice=_voice(checkpoint, 1))) - 1
    if rows <= head:
        raise MetricsError(f"an in-context prompt has more than {head} rows, got {rows}")
    voice = _voice(checkpoint, rows - head)
    found = build(Request(text, layout="streaming", voice=voice))
    settings = {"voice": voice, "layout": "streaming", "options": guard_off}
    return Said(kind, found, lambda index, frames: text, settings)


def _builder(checkpoint: Checkpoint) -> Callable[[Request], int]:
    """Rows of a request's prompt. On the CPU and in the stored type, so that the tables stay on the disk."""
    builder = PromptBuilder(
        checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), torch.device("cpu"), torch.bfloat16
    )
    return lambda request: len(builder.build(request).embeds)


def _words_of(tokens: int, count: Callable[[str], int]) -> str:
    """Words of `tokens` tokens, or of the next more where none have exactly those. count: the tokens of a text."""
    words = WORDS.split()
    text, used = words[0], 1
    while count(text) < tokens:
        text, used = f"{text} {words[used % len(words)]}", used + 1
    text += " " + WORDS[:_MARGIN_CHARS]
    ends = range(len(text), max(0, len(text) - 3 * _MARGIN_CHARS), -1)  # also within words: letters have tokens too
    found = {piece: number for end in ends if (number := count(piece := text[:end].rstrip())) >= tokens}
    return min(found, key=lambda piece: (found[piece], len(piece)))


def spoken(index: int, frames: int) -> str:
    """Sentences that take longer to say than `frames`, cut behind a word."""
    text = "".join(_SENTENCES[(index + i) % len(_SENTENCES)] for i in range(8))
    end = text.find(" ", round(frames * _CHARS_A_FRAME))
    return text[:end].strip(" ,.") + "."


def _voice(checkpoint: Checkpoint, reference_frames: int) -> Voice:
    """A voice of the right shape, drawn at random; with frames of a reference it continues them."""
    draw = torch.Generator().manual_seed(0)
    embedding = torch.randn(checkpoint.config.talker.hidden_size, generator=draw)
    codes, transcript = None, None
    if reference_frames:
        size = min(CODEBOOK_SIZE, checkpoint.codec_config.codebook_size)
        codes = torch.randint(size, (reference_frames, NUM_CODEBOOKS), generator=draw)
        transcript = "Reference speech."  # shorter than the frames, so that they alone are the rows
    return Voice(embedding, codes, transcript, checkpoint.config.model_size)


def arguments_of_open(settings: StreamSettings) -> dict[str, Any]:
    """The settings of a stream whose text is fed, which is spoken in the streaming layout."""
    return {**settings, "layout": None}
