"""The codec of many streams at once, in plain PyTorch: a stream's state is a row, and a tick gathers rows.

At these sizes an operator costs by the call: the same operators that decode one frame of one stream decode one of
sixteen. Streams may be at different positions; what one gives does not depend on which others come with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.errors import CodecError
from mktts.spec import NUM_CODEBOOKS

_LANES_AT_A_TIME = 16  # beyond, an operator gains nothing and its results leave the cache


class CodecLanes:
    """Codec states by slot, and `decode`: the next frame of any of them. One thread at a time.

    A slot's row has the bytes of a `CodecState` of the decoder, so that a primed state is copied in as it is.
    """

    def __init__(self, decoder: CodecDecoder, slots: int) -> None:
        """The weights stay the decoder's."""
        self.config, self.slots = decoder.config, slots
        self._decoder = decoder
        self._silence = _words(decoder.start())
        # words of a state, since wide ones move fast; memory that no stream has used is not taken yet
        self._rows = self._silence.new_empty(slots, len(self._silence))
        self._gathered = self._silence.new_empty(min(slots, _LANES_AT_A_TIME), len(self._silence))
        self._views: dict[int, tuple[Tensor, ...]] = {}  # of so many rows of these: they cost what work does

    @torch.inference_mode()
    def enter(self, slot: int, primed: CodecState | None) -> None:
        """`slot` begins with silence, or goes on from `primed`, which is copied.

        Raises CodecError for a slot that does not exist, and for a state of another decoder.
        """
        if not 0 <= slot < self.slots:
            raise CodecError(f"slots are 0 to {self.slots - 1}, got {slot}")
        if primed is not None and primed.layout != self._decoder.layout:
            raise CodecError("the state belongs to another decoder: use one that start() of this decoder returned")
        self._rows[slot] = self._silence if primed is None else _words(primed)

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Sequence[int]) -> Tensor:
        """The next frame of each slot, once each: codes (B, 16) integer -> PCM (B, 1920) float32 in [-1, 1].

        Raises CodecError, before anything is changed, for codes of another shape, dtype or range.
        """
        shape, size = (len(slots), NUM_CODEBOOKS), self.config.codebook_size
        if codes.shape != shape or codes.is_floating_point() or codes.min() < 0 or codes.max() >= size:
            raise CodecError(f"codes must be {shape} whole numbers in 0..{size - 1}, got {codes}")
        lanes = torch.tensor(list(slots))
        codes = codes.to(torch.int64)
        pcm = []
        for some, their_codes in zip(lanes.split(_LANES_AT_A_TIME), codes.split(_LANES_AT_A_TIME), strict=True):
            rows = self._gathered[: len(some)]
            if len(some) not in self._views:
                self._views[len(some)] = self._decoder.layout.views(rows.view(torch.uint8))
            torch.index_select(self._rows, 0, some, out=rows)
            pcm.append(self._decoder.together(their_codes[:, None], self._views[len(some)]))
            self._rows.index_copy_(0, some, rows)
        return torch.cat(pcm)


def _words(state: CodecState) -> Tensor:
    """The memory of a state as int64 words: its parts start at multiples of 16 bytes, and the last is an int64."""
    return state.flat.view(torch.int64)
