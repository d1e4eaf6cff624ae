"""Codec states that have heard a voice's reference: upstream decodes the reference's audio too, and cuts it off."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.graphs import GraphedCodec

_VOICES = 8
_FRAMES = 32  # at a time: the decoder's working memory grows with the frames of a call


class Primed(Protocol):
    """What remembers codec states after a reference."""

    def of(self, reference: Tensor) -> CodecState:
        """The state after the codes `reference` (R, 16), to be copied."""

    def forget(self, reference: Tensor) -> None:
        """Lets go of it. No effect on one that is not kept."""


class PrimedStates:
    """Keeps the states of the voices used last. One thread at a time."""

    def __init__(self, codec: CodecDecoder | GraphedCodec) -> None:
        self._codec = codec
        self._states: OrderedDict[int, tuple[Tensor, CodecState]] = OrderedDict()

    def forget(self, reference: Tensor) -> None:
        """Lets go of the state after `reference`. No effect on one that is not kept."""
        self._states.pop(id(reference), None)

    def of(self, reference: Tensor | None) -> CodecState:
        """The state after the codes `reference` (R, 16), to be copied; None: the state of silence."""
        if reference is None:
            return self._codec.start()
        key = id(reference)
        if key not in self._states:
            state = self._codec.start()
            for codes in reference.split(_FRAMES):
                self._codec.decode(codes, state)
            self._states[key] = (reference, state)  # holding the tensor keeps its id from being reused
            if len(self._states) > _VOICES:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return self._states[key][1]
