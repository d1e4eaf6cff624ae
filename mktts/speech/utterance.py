"""The bookkeeping of one utterance, whatever makes its frames: segments, text rows, guard, chunks, end.
Single-threaded.

Text longer than a segment is spoken segment after segment, each with its own prompt and talker state, while the
codec state goes on: the waveform is continuous over a join, because the decoder never restarts.

Whoever makes the frames asks `ready`; then, while `input_known`, either begins a segment (`begins`, `begin`) or takes
the text row of the next frame (`take_row`, `rows_ahead`), makes the frame, and hands it to `took`. Without input,
`flush` hands on what waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mktts.model.backend import Frame
from mktts.model.sampling import Sampling
from mktts.spec import FRAME_RATE_HZ
from mktts.speech.chunking import Chunker, Pending
from mktts.speech.guard import FinishReason, GuardState
from mktts.speech.options import SCHEDULE, Chunk, Plan
from mktts.speech.script import Script

MAX_SEGMENT_FRAMES = int(160 * FRAME_RATE_HZ)  # what one prompt may take where the caller sets no limit


@dataclass(frozen=True)
class Segment:
    """What the frames of one segment are made from. prompt: a `Prompt`, or a `FedPrompt` that is ready."""

    prompt: Any
    sampling: Sampling
    seed: int
    max_frames: int


class Utterance:
    """See the module.

    codes: one (16,) int64 tensor or array a frame so far, of all segments. finish_reason: None while there is more to
    come.
    """

    def __init__(
        self,
        script: Script,
        plan: Plan,
        positions: int,
        decode: Callable[[list[Tensor]], Pending],
        schedule: tuple[int, ...] = SCHEDULE,
    ) -> None:
        """positions: of the talker, prompt and frames of one segment together. decode, schedule: see `Chunker`."""
        self.codes: list[Tensor | np.ndarray] = []
        self.finish_reason: FinishReason | None = None
        self.cancelled = False  # set by any thread: no more chunks are wanted
        self._script = script
        self._plan = plan
        self._positions = positions
        self._chunker = Chunker(decode, plan.options, schedule)
        self._segments = 0
        self._prompt: Any = None
        self._guard: GuardState | None = None  # of the segment that has begun
        self._row: Tensor | None = None
        self._max_frames = 0  # of the segment

    @property
    def pending_frames(self) -> int:
        """Made, not yet in a chunk."""
        return self._chunker.pending_frames

    def ready(self) -> bool:
        """Whether there is something to make or to hand on; False means: waiting for text."""
        return self.input_known() or self._spoken() or self._chunker.waiting_frames > 0

    def input_known(self) -> bool:
        """Whether the input of the next frame is known; fetches it."""
        self._script.update()
        if self._prompt is None:
            begun_s = time.perf_counter()
            self._prompt = self._script.next_segment()
            self._chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)
            return self._prompt is not None
        if self._guard is None or self._row is not None:
            return True
        self._row = self._prompt.row(self._guard.frames - 1)
        return self._row is not None

    @property
    def begins(self) -> bool:
        """Whether the next frame is a segment's first: `begin` is to be called, and there is no row."""
        return self._guard is None

    def begin(self) -> Segment:
        """The segment whose turn has come."""
        plan, prompt = self._plan, self._prompt
        limit = MAX_SEGMENT_FRAMES if plan.max_frames is None else plan.max_frames - len(self.codes)
        limit = min(limit, self._positions - len(prompt.embeds))
        # A key-value cache no longer than the guard allows; the frame that reaches the limit is its runaway.
        guarded = plan.options.guard.limit_frames(prompt.text_tokens) if prompt.text_ended else None
        self._max_frames = max(1, limit if guarded is None else min(limit, guarded))
        self._guard = GuardState(plan.options.guard, max(1, limit))
        seed = plan.seed + self._segments
        self._segments += 1
        return Segment(prompt, plan.sampling, seed, self._max_frames)

    def take_row(self) -> Tensor | None:
        """The text row (H,) of the next frame; None at a segment's first."""
        row, self._row = self._row, None
        return row

    def rows_ahead(self, most: int) -> list[Tensor | None]:
        """As `take_row`, and the rows of frames after it as far as they are known, `most` frames, to the chunk's
        end.
        """
        made = self._guard.frames
        rows = [self.take_row()]
        most = min(most, self._chunker.missing_frames, self._max_frames - made)
        while len(rows) < most and (row := self._prompt.row(made - 1 + len(rows))) is not None:
            rows.append(row)
        return rows

    def took(self, frame: Frame, ahead: bool = False) -> Chunk | None:
        """Books a frame; returns a chunk when that completes one. `ahead`: see `Chunker.take`."""
        self._chunker.talker_ms += frame.talker_ms
        self._chunker.predictor_ms += frame.predictor_ms
        if frame.codes is None:
            self._script.leave_segment()
            self._prompt = self._guard = None
            if self._spoken():
                self.finish_reason = "eos"
        else:
            self.codes.append(frame.codes)
            self._chunker.add(frame.codes)
            self.finish_reason = self._guard.count(frame.codes, self._prompt.text_tokens)
        if self.cancelled:
            return None
        over = self.finish_reason is not None
        return self._chunker.take(self._script.started_s, flush=over, ahead=ahead and not over)

    def flush(self) -> Chunk | None:
        """Without input: the end, or the text has stopped for now, and the listener gets what there is."""
        if self._spoken():
            self.finish_reason = "eos"
        return self._chunker.take(self._script.started_s, flush=True)

    def close(self) -> None:
        """Releases what the frames were made with. The utterance is over."""
        self._chunker.close()

    def _spoken(self) -> bool:
        return self._prompt is None and self._script.ended()
