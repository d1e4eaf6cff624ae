"""What the sections of a bench measure alike: sizes, texts, and how a figure is handed over.

A section is a process; it prints one line of JSON a figure (`emit`), which the runner puts into the document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mktts.checkpoint import Checkpoint
from mktts.errors import MetricsError
from mktts.measure.metrics import percentiles
from mktts.model.backend import default_dtype
from mktts.model.prompt import Request
from mktts.spec import FRAME_RATE_HZ

WORDS = "The quick brown fox jumps over the lazy dog and then it runs home to sleep for the rest of a long day"
SENTENCE = "The quick brown fox jumps over the lazy dog while a farmer watches from home."  # 15 words


@dataclass(frozen=True)
class BenchSettings:
    """What all sections measure alike.

    frames: of one utterance (RTF). context, around: frames are timed at positions [context - around, context + around).
    samples: timed frames, chunks or first chunks of one figure. peer_utterances: of upstream, which takes its time.
    prompt_tokens: of the short text. open_streams, open_frames: of the memory figure.
    """

    checkpoint: str = "random:0.6b"
    revision: str | None = None  # of the checkpoint, where it is a Hub id
    large: str = "random:1.7b"
    text_model: str = "random:0.6b"
    backend: str = "auto"
    device: str = "cuda"
    prompt_tokens: int = 12
    frames: int = round(10 * FRAME_RATE_HZ)
    context: int = 200
    around: int = 50
    samples: int = 200
    utterances: int = 10
    peer_utterances: int = 2
    open_streams: int = 4
    open_frames: int = 2_000

    @property
    def dtype(self) -> torch.dtype:
        return default_dtype(torch.device(self.device))


def emit(name: str, values: Sequence[float], unit: str) -> None:
    """Prints the figure `name`. Raises MetricsError where `values` is empty or not finite."""
    print(json.dumps({"figures": {name: {**percentiles(values), "unit": unit}}}), flush=True)


def note(**facts: object) -> None:
    """Prints facts that belong to the settings of the document."""
    print(json.dumps({"notes": facts}), flush=True)


def text_of(tokens: int, encode: Callable[[str], list[int]]) -> str:
    """A text of exactly `tokens` tokens: words, and letters of the next word where words alone miss the number."""
    words = WORDS.split()
    whole = [" ".join(words[:count]) for count in range(1, len(words) + 1)]
    for text in (*whole, *(WORDS[:end].strip() for end in range(1, len(WORDS) + 1))):
        if len(encode(text)) == tokens:
            return text
    raise MetricsError(
        f"no beginning of the bench's text has {tokens} tokens with this tokenizer: change prompt_tokens"
    )


def request_of(checkpoint: Checkpoint, settings: BenchSettings) -> Request:
    """The short prompt of every section: streaming layout, the checkpoint's first speaker."""
    text = text_of(settings.prompt_tokens, checkpoint.tokenizer().encode)
    return Request(text, "auto", checkpoint.config.default_speaker, layout="streaming")


def sentence_of(checkpoint: Checkpoint) -> Request:
    """A whole sentence as a user says it: the checkpoint's own layout and first speaker."""
    return Request(SENTENCE, "auto", checkpoint.config.default_speaker)
