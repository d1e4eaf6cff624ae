"""Codec states that have heard a voice's reference: upstream decodes the reference's audio too, and cuts it off."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.graphs import GraphedCodec

_VOICES = 8
_FRAMES = 32  # at a time: the decoder's working memory grows with the frames of a call


class PrimedStates:
    """Keeps the states of the voices used last. One thread at a time."""

    def __init__(self, codec: CodecDecoder | GraphedCodec) -> None:
        self._codec = codec
        self._states: OrderedDict[int, tuple[Tensor, CodecState]] = OrderedDict()

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
