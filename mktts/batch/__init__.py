"""Lanes of many streams, and what the user sets about them."""

from dataclasses import dataclass
from typing import get_args

from mktts.codec.packed import Precision
from mktts.common import checked_int, one_of


@dataclass(frozen=True)
class BatchSettings:
    """How many streams may be open on the batch engine, and what memory they take.

    max_streams: open at once; None: on a CUDA device up to 2,048, as many as have slots in a quarter of the memory; on
    a CPU 32. positions: of one segment's prompt and frames together, at most. memory_bytes: for keys and values; None:
    on a CUDA device four fifths of what is free less weights and slots, on a CPU 2 GiB. codec: its precision on a CUDA
    device: "fast" computes the waveform in fp16, 55 dB from fp32; "full", 88 dB, takes twice the time and slot memory.

    A slot takes memory whether it has a stream or not. At the start of a segment a stream gets the pages of its prompt
    and of all frames that it may speak, so that none stops for want of one: a lower `max_frames` lets more streams in.
    Raises OptionsError for values out of range."""

    max_streams: int | None = None
    positions: int = 4_096
    memory_bytes: int | None = None
    codec: Precision = "fast"

    def __post_init__(self) -> None:
        for name in ("max_streams", "positions", "memory_bytes"):
            if (value := getattr(self, name)) is not None:
                checked_int(name, value, at_least=1)
        one_of("codec", self.codec, get_args(Precision))
