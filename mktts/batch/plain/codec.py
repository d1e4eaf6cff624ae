"""One codec frame of many streams at once, in plain PyTorch: a lane's state is a row, and a tick gathers rows.

At these sizes an operator costs by the call: the same operators that decode one frame of one stream decode one of
sixteen. Streams may be at different positions; what one gives does not depend on which others come with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.plain.codec_lanes import Conv, Workspace, lane_layers
from mktts.batch.plain.codec_transformer import LaneTransformer
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.errors import CapacityError, CodecError
from mktts.spec import NUM_CODEBOOKS

_State = tuple[Tensor, Tensor, list[Tensor], Tensor]  # see `CodecLanes._views`

_SLOTS_AT_A_TIME = 8  # that memory is taken for
_LANES_AT_A_TIME = 16  # beyond, an operator gains nothing and its results leave the cache


class CodecLanes:
    """Codec states by slot, and `decode`: the next frame of any of them. One thread at a time.

    A slot's row has the bytes of a `CodecState` of the decoder, so that a primed state is copied in as it is.
    """

    def __init__(self, decoder: CodecDecoder, max_slots: int) -> None:
        """The weights stay the decoder's. Memory is taken for a few slots at a time, up to `max_slots`."""
        self.device = decoder.device
        self.max_slots = max_slots
        self._decoder = decoder
        self._silence = _words(decoder.start())
        self._rows = self._silence.new_empty(0, len(self._silence))  # (slots, words of a state): wide ones move fast
        self._memory = self._rows  # of those that a tick decodes
        self._states: dict[int, _State] = {}  # by lanes
        self._free: list[int] = []  # slots of `_rows` that nobody has; the last one goes first
        work = Workspace()
        self._pre_conv = Conv(decoder.pre_conv, work)
        self._transformer = LaneTransformer(decoder.transformer)
        self._layers = list(lane_layers(decoder, work))

    @property
    def open_slots(self) -> int:
        return len(self._rows) - len(self._free)

    @torch.inference_mode()
    def start(self, primed: CodecState | None = None) -> int:
        """A slot for a stream that begins with silence, or goes on from `primed`, which is copied.

        Raises CapacityError where every slot is taken, CodecError for a state of another decoder.
        """
        if primed is not None and (primed.layout != self._decoder.layout or primed.flat.device != self.device):
            raise CodecError("the state belongs to another decoder: use one that start() of this decoder returned")
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._rows[slot] = self._silence if primed is None else _words(primed)
        return slot

    def free(self, slot: int) -> None:
        """Gives the slot back; it must not be used again. Raises CodecError where it is not open."""
        self._check_open([slot])
        self._free.append(slot)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], codes: Tensor) -> Tensor:
        """The next frame of each slot: codes (B, 16) integer -> PCM (B, 1920) float32 in [-1, 1] on the device.

        Codes may lie on the host or on the device. Raises CodecError, before anything is changed, for codes of another
        shape, dtype or range, and for a slot that is not open or comes twice.
        """
        self._check_open(slots)
        self._check_codes(codes, len(slots))
        lanes = torch.tensor(list(slots), device=self.device)
        codes = codes.to(self.device, torch.int64)
        pcm = []
        for some, their_codes in zip(lanes.split(_LANES_AT_A_TIME), codes.split(_LANES_AT_A_TIME), strict=True):
            rows, state = self._gathered(len(some))
            torch.index_select(self._rows, 0, some, out=rows)
            pcm.append(self._advance(their_codes, state))
            self._rows.index_copy_(0, some, rows)
        return torch.cat(pcm)

    def _advance(self, codes: Tensor, state: _State) -> Tensor:
        """`codes` (B, 16) int64 on the device; `state`: the lanes', updated in place."""
        decoder, (keys, values, histories, position) = self._decoder, state
        history = iter(histories)
        x = F.embedding(codes + decoder.first_row, decoder.books)  # (B, 16, codebook_dim / 2)
        x = decoder.book_out[0](x[:, 0]) + decoder.book_out[1](x[:, 1:].sum(1))
        x = self._pre_conv(x[:, None], history)[:, 0]
        x = self._transformer(x, keys, values, position)[:, None]
        for layer in self._layers:
            x = layer(x, history)
        return x.float().clamp_(-1.0, 1.0)

    def _gathered(self, lanes: int) -> tuple[Tensor, _State]:
        """Memory for the states of so many lanes, (B, words), and its views: made once, as they cost what work does."""
        if len(self._memory) < lanes:
            self._memory = self._rows.new_empty(lanes, self._rows.shape[1])
            self._states.clear()
        if lanes not in self._states:
            self._states[lanes] = self._views(self._memory[:lanes])
        return self._memory[:lanes], self._states[lanes]

    def _views(self, rows: Tensor) -> _State:
        """Keys, values (B, layers, heads, window - 1, head_dim), histories (B, P, C) and position (B, 1) in `rows`."""
        layout, rows = self._decoder.layout, rows.view(torch.uint8)
        shapes = (layout.cache, layout.cache, *layout.history, (1,))
        keys, values, *history, position = (
            rows[:, start : start + count * dtype.itemsize].view(dtype).unflatten(1, shape)
            for (start, count, dtype), shape in zip(layout.places, shapes, strict=True)
        )
        return keys, values, history, position

    def _grow(self) -> None:
        slots = len(self._rows)
        more = min(_SLOTS_AT_A_TIME, self.max_slots - slots)
        if more <= 0:
            raise CapacityError(f"all {self.max_slots} codec slots are taken: free one first, or ask for more")
        self._rows = torch.cat((self._rows, self._rows.new_empty(more, self._rows.shape[1])))
        self._free = list(range(slots + more - 1, slots - 1, -1))

    def _check_open(self, slots: Sequence[int]) -> None:
        wrong = [slot for slot in slots if not 0 <= slot < len(self._rows) or slot in self._free]
        if wrong:
            raise CodecError(f"slots {wrong} are not open: use those that start() returned and that were not freed")
        if len(set(slots)) < len(slots):
            raise CodecError(f"a slot decodes one frame a call, got {list(slots)}")

    def _check_codes(self, codes: Tensor, lanes: int) -> None:
        if not isinstance(codes, Tensor) or codes.is_floating_point() or codes.is_complex():
            found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise CodecError(f"codes must be an integer tensor (B, {NUM_CODEBOOKS}), got {found}")
        if codes.shape != (lanes, NUM_CODEBOOKS) or not lanes:
            raise CodecError(f"codes must be ({lanes} slots >= 1, {NUM_CODEBOOKS}), got {tuple(codes.shape)}")
        low, high = torch.stack(codes.aminmax()).tolist()
        size = self._decoder.config.codebook_size
        if low < 0 or high >= size:
            raise CodecError(f"codes must be in 0..{size - 1}, found {low}..{high}: control ids are not audio")


def _words(state: CodecState) -> Tensor:
    """The memory of a state as int64 words: its parts start at multiples of 16 bytes, and the last is an int64."""
    return state.flat.view(torch.int64)
