"""What every codec decoder is: codes to PCM, chunk by chunk, with all that a stream carries in an explicit state."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mktts.codec.pending import Pending
from mktts.codec.state import CodecState, StateLayout
from mktts.errors import CodecError
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, CodecConfig

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class StreamingCodec(ABC):
    """Codes to PCM. Holds weights only, so any number of streams can share one decoder (one thread at a time).

    Decoders whose `layout` is equal can take turns on one state.
    """

    name: str  # how it computes, as reports call it

    def __init__(self, config: CodecConfig, books: Tensor, layout: StateLayout, device: torch.device) -> None:
        """`books` (16 * 2048, codebook_dim / 2): all codebooks, one behind the other, on the device."""
        self.config = config
        self.books = books
        self.layout = layout
        self.device = device
        self.dtype = books.dtype

    @abstractmethod
    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        """`decode` without checks: tensor operations only, no host synchronisation, so a CUDA graph can hold it.

        `codes` (T, 16) int64 on the device. `state.frames` is left to the caller.
        """

    @torch.inference_mode()
    def start(self) -> CodecState:
        """The state before the first frame: silence, and nothing to attend to."""
        return self.layout.zeros(self.device)

    @torch.inference_mode()
    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """The next T frames of a stream: codes (T, 16) integer -> PCM (T * 1920,) float32 in [-1, 1] on the device.

        Codes may lie on the host (checked there, without waiting for the device) or on the device.
        Raises CodecError for codes of another shape, dtype, device or range, and for a state of another decoder.
        """
        self.check(codes, state)
        pcm = self.advance(codes.to(self.device, torch.int64), state)
        state.frames += len(codes)
        return pcm

    def submit(self, codes: Tensor, state: CodecState) -> Pending:
        """`decode` to the host; here, unlike with graphs, it is there when this returns. Errors as of `decode`."""
        return Pending(self.decode(codes, state).cpu())

    def decode_all(self, codes: Tensor) -> Tensor:
        """A whole utterance in one pass, about 4 MB of working memory per frame at full size. Else as `decode`."""
        return self.decode(codes, self.start())

    def check(self, codes: Tensor, state: CodecState) -> None:
        """Raises what `decode` raises, before anything is changed. Waits for the device only if `codes` lie there."""
        if not isinstance(codes, Tensor) or codes.dtype not in _INTEGERS:
            found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise CodecError(f"codes must be an integer tensor (T, {NUM_CODEBOOKS}), got {found}")
        if codes.dim() != 2 or codes.shape[1] != NUM_CODEBOOKS or not len(codes):
            raise CodecError(f"codes must be (T >= 1, {NUM_CODEBOOKS}), got {tuple(codes.shape)}")
        if codes.device.type not in ("cpu", self.device.type):
            raise CodecError(f"codes must be on cpu or {self.device}, got {codes.device}")
        low, high = torch.stack(codes.aminmax()).tolist()
        if low < 0 or high >= CODEBOOK_SIZE:
            raise CodecError(f"codes must be in 0..{CODEBOOK_SIZE - 1}, found {low}..{high}: control ids are not audio")
        if state.flat.device != self.books.device or state.layout != self.layout:
            raise CodecError("the state belongs to another decoder: use the one that start() of this decoder returned")
