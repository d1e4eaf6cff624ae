"""The interface between the engine, which plans ticks, and what runs them: a lane of a tick is one stream's next frame.

The engine owns the slots: it takes one for a stream, begins the stream's segments in it one after the other, and frees
it. One thread owns the lanes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState, PendingPcm, PrimedStates
from mktts.codec.graphs import GraphedCodec
from mktts.codec.packed import Precision
from mktts.engine.pages import Pages
from mktts.engine.scheduler import Tick, TickModel, TickSettings
from mktts.engine.stream import Segment
from mktts.model.backend import Backend, Frame
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS


class Made(NamedTuple):
    """What a tick made, in the order of its lanes. The second `launch` after `collect` may overwrite the arrays.

    codes (n, 16) int64; code 0 is -1 where the model computed no number. ended (n,) bool: end of speech; codes and PCM
    of such a lane mean nothing. pcm (n, 1920) float32 in [-1, 1]; None where `Lanes.submit` decodes chunks.
    took_s: the tick's time on the device. predictor_s: the predictor's part of it, where known. idle_s: how long the
    device was idle before the tick."""

    codes: np.ndarray
    ended: np.ndarray
    pcm: np.ndarray | None
    took_s: float
    idle_s: float = 0.0
    predictor_s: float = 0.0


class Lanes(Protocol):
    """Talker, predictor, sampling and codec of many streams, by slot."""

    name: str
    deterministic: bool  # whether a stream's codes depend neither on its neighbours nor on their number
    precision: Precision  # of the codec
    overlaps: bool  # whether the newest tick runs while the host goes on; otherwise the host waits for it at once
    slots: int  # the engine uses 0 to slots - 1
    positions: int  # the most of one segment, prompt and frames together
    pages: Pages | None  # which slot holds which page; the lanes copy its changes to the device; None: no limit
    settings: TickSettings  # the ticks that these lanes can run
    model: TickModel  # how long ticks take, as assumed before the first
    alone: bool  # set before every turn: only one stream is open, so that more may be done ahead
    decodes_beside: bool  # whether a chunk may be decoded while the next frames are made
    submit: Callable[[int, list[Any]], Any] | None  # begins to decode a slot's next frames; None: `Made.pcm` has them

    def forget(self, voice: Voice) -> None:
        """Drops what is cached of the voice."""

    def begin(self, slot: int, segment: Segment, anew: bool = True) -> None:
        """Begins a segment of the stream in `slot`: the talker starts anew after the prompt, whose rows enter as pieces
        of the ticks that follow. anew: the codec starts anew too, from silence, or from the state that the segment's
        reference leaves; otherwise it goes on. Raises PromptError, SamplingError."""

    def leave(self, slot: int) -> None:
        """Frees the slot: its stream is over, or `begin` has raised; a tick that still runs may have a lane of it."""

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Any:
        """Queues one tick; two may be in flight. rows: a text row (H,) for each lane, None for the `new_lanes`."""

    def collect(self, launched: Any) -> Made:
        """Waits for the oldest launched tick. A lane whose slot had ended before that tick is `ended` again."""


MAX_FRAMES_AHEAD = 4  # of one launch: a stream that arrives meanwhile waits for them, up to 6 ms on an H200
SLOTS = 1_024  # streams that take turns; others wait until one of them ends


class OneLane:
    """What lanes of width 1 have in common: streams take turns, and a tick is over when `launch` returns."""

    alone = overlaps = deterministic = decodes_beside = False
    precision, pages, slots = "full", None, SLOTS
    settings = TickSettings.one()
    model = TickModel(constant_s=1e-3, lane_s=0.0, row_s=0.0, attention_s=0.0)

    def collect(self, launched: Made) -> Made:
        return launched


@dataclass
class _Slot:
    """state: the backend's, of the segment. ahead: the frames of one launch that are not taken yet. queued: the first
    chunk, of one frame, whose decoding was queued right after its launch."""

    codec_state: CodecState | None = None
    segment: Segment | None = None
    state: Any = None
    ahead: Iterator[Frame] | None = None
    ahead_frames: int = 0
    queued: PendingPcm | None = None


@dataclass
class SingleLanes(OneLane):
    """See `Lanes`. decodes_beside: the codec runs while the host goes on: waiting for it at once would waste time."""

    backend: Backend
    codec: CodecDecoder | GraphedCodec
    positions: int
    decodes_beside: bool = False

    def __post_init__(self) -> None:
        self.primed = PrimedStates(self.codec)
        # Whether a frame can be decoded right after its launch, before the host has its codes.
        self._queues = hasattr(self.backend, "codes_to_come") and hasattr(self.codec, "submit_unmade")
        self._slots: dict[int, _Slot] = {}
        self.name = self.backend.name

    def forget(self, voice: Voice) -> None:
        self.backend.forget(voice)
        if voice.codes is not None:
            self.primed.forget(voice.codes)

    def begin(self, slot: int, segment: Segment, anew: bool = True) -> None:
        """Keeps the segment; the backend starts it in the tick of its first frame."""
        if anew:
            self._slots[slot] = _Slot()
        self._slots[slot].segment = segment

    def leave(self, slot: int) -> None:
        here = self._slots.pop(slot, None)
        if here and here.ahead:
            here.ahead.close()

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Made:
        """Makes a frame; the backend makes several at once where no other stream is open and their inputs are known."""
        slot, backend, inputs = int(tick.lanes[0]), self.backend, list(rows)
        here = self._slots[slot]
        segment, chunker = here.segment, here.segment.stream.chunker
        if tick.new_lanes:
            begun_s = time.perf_counter()
            here.state = backend.start(segment.prompt, segment.sampling, segment.seed, segment.max_frames)
            chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)
        first = here.codec_state is None and not chunker.pending_frames
        if first and chunker.missing_frames == 1 and self._queues:  # a chunk of one frame: decoded after its launch
            frame = backend.step(here.state, rows[0], meanwhile=lambda: self._queue_decoding(slot))
        else:
            if not here.ahead:
                if self.alone:  # up to the chunk's end, as far as the rows are known
                    most = min(MAX_FRAMES_AHEAD, chunker.missing_frames, segment.max_frames - segment.launched)
                    known = segment.launched - 1
                    while len(inputs) < most and (row := segment.prompt.row(known + len(inputs))) is not None:
                        inputs.append(row)
                here.ahead, here.ahead_frames = backend.frames(here.state, inputs), len(inputs)
            frame = next(here.ahead)
            here.ahead_frames -= 1
            if not here.ahead_frames or frame.codes is None:
                here.ahead.close()
                here.ahead = None
        ended = frame.codes is None
        codes = np.zeros((1, NUM_CODEBOOKS), np.int64) if ended else np.asarray(frame.codes)[None]
        if ended:
            here.state = None
        took_s = (frame.talker_ms + frame.predictor_ms) / 1e3
        return Made(codes, np.array([ended]), None, took_s, predictor_s=frame.predictor_ms / 1e3)

    def submit(self, slot: int, frames: list[Any] | None) -> PendingPcm:
        """Begins to decode the next frames, (16,) each, of the stream in `slot`. None: the frame that is being made,
        which has codes, because no stream ends before MIN_NEW_FRAMES."""
        here = self._slots[slot]
        if here.queued is not None:
            queued, here.queued = here.queued, None
            return queued
        if here.codec_state is None:
            reference = here.segment.reference
            here.codec_state = self.codec.start() if reference is None else self.primed.of(reference).copy()
        if frames is None:
            return self.codec.submit_unmade(self.backend.codes_to_come(here.state)[None], here.codec_state)
        return self.codec.submit(torch.as_tensor(np.stack(frames)), here.codec_state)

    def _queue_decoding(self, slot: int) -> None:
        self._slots[slot].queued = self.submit(slot, None)
