"""What opens utterances that are made together with others, and one of them as the executor drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mktts.audio import joined
from mktts.batch.lanes import Lanes
from mktts.model.backend import Frame
from mktts.model.prompt import Prompt, Request, SpokenRows, is_of_voice
from mktts.model.voice import Voice
from mktts.speech.options import Chunk, Plan
from mktts.speech.script import Script
from mktts.speech.utterance import Segment, Speaker, Utterance


class LaneUtterance(Utterance):
    """See the module. The executor enters it into a slot and drives it.

    reference: codes (R, 16) that the codec hears first, None for none. segment: that is being made, None before the
    first and between two. number: of that segment, from 0. launched: frames of it in ticks that were launched. row: the
    text row (H,) of the frame after those, None where it is not known. on_close: called once, when the utterance ends.
    """

    def __init__(
        self, script: Script, plan: Plan, positions: int, voice: Voice | None, schedule: tuple[int, ...]
    ) -> None:
        """schedule: of chunks, where the plan leaves it open."""
        super().__init__(script, plan, positions, self._decode, schedule)
        self.reference = None if voice is None else voice.codes
        self.segment: Segment | None = None
        self.number = -1
        self.launched = 0
        self.row: Tensor | None = None
        self.on_close: Callable[[], None] | None = None
        self._pcm: deque[tuple[bytearray, bytes | None]] = deque()  # the samples of frames, and the same in 16 bits

    def input_known(self) -> bool:
        """As `Utterance.input_known`, of the frame after those launched."""
        if self.segment is None:
            return super().input_known()
        self._script.update()
        self._fetch_row()
        return self.row is not None

    def next_segment(self) -> bool:
        """Whether the next segment's turn has come and its prompt is known; it is then `segment`."""
        if self.segment is None and super().input_known():
            self.segment = self.begin()
            self.number += 1
            self.launched, self.row = 0, None
        return self.segment is not None

    def went(self) -> None:
        """A tick with a frame of the segment was launched."""
        self.launched += 1
        self._fetch_row()

    @property
    def may_go_on(self) -> bool:
        """Whether the segment may have another frame, as far as is known before those launched are read."""
        return self.segment is not None and self.launched < self.segment.max_frames

    @property
    def unread(self) -> bool:
        """Whether frames of the segment were launched whose codes are not known yet."""
        return self._guard is not None and self.launched > self._guard.frames

    @property
    def next_chunk_frames(self) -> int:
        """How many frames the chunk has that is being made, the silent lead before it included."""
        return self._chunker.pending_frames + self._chunker.missing_frames

    def made(
        self, codes: np.ndarray | None, pcm: np.ndarray, tick_ms: float, pcm16: bytes | None = None
    ) -> Chunk | None:
        """Books a frame of the segment: codes (16,) int64, None at end of speech, and PCM (1920,) float32, which is
        copied. pcm16: the same in 16 bits, where that was made too."""
        if codes is None:
            self.segment = None
        else:
            # Not `copy`: numpy would let go of the interpreter's lock for it, once for every frame.
            self._pcm.append((bytearray(pcm), pcm16))
        return self.took(Frame(codes, tick_ms, 0.0))

    def close(self) -> None:
        super().close()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    def _fetch_row(self) -> None:
        self.row = self._prompt.row(self.launched - 1) if self.launched else None

    def _decode(self, frames: list[np.ndarray]) -> _Decoded:
        pcm, pcm16 = zip(*(self._pcm.popleft() for _ in frames), strict=True)
        return _Decoded(joined(pcm), None if None in pcm16 else b"".join(pcm16))


class _Decoded(NamedTuple):
    """PCM that is there: as `mktts.codec.decoder.PendingPcm` gives it."""

    pcm: np.ndarray
    pcm16: bytes | None

    def result(self) -> np.ndarray:
        return self.pcm


@dataclass(kw_only=True)
class LaneModel(Speaker):
    """The model behind `lanes`, whose utterances the executor enters into its slots.

    spoken: rows of texts that prompts are made of; None: they are computed.
    """

    lanes: Lanes
    spoken: SpokenRows | None = None

    @property
    def name(self) -> str:
        return self.lanes.name

    def forget(self, voice: Voice) -> None:
        """As `Speaker.forget`; the prefixes' pages and the codec's states too."""
        super().forget(voice)
        for key in self.lanes.pages.known(lambda key: is_of_voice(key, voice)):
            self.lanes.pages.forget(key)
        if voice.codes is not None:
            self.lanes.forget(voice.codes)

    def _utterance(self, script: Script, plan: Plan, voice: Voice | None) -> LaneUtterance:
        return LaneUtterance(script, plan, self.positions, voice, self.lanes.settings.chunks)

    def _prompt(self, request: Request) -> Prompt:
        return super()._prompt(request) if self.spoken is None else self.prompts.of_checked(request, self.spoken)
