"""Lanes over the fake backend and codec: what a device must keep to is checked at every call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.batch.lanes import Made
from mktts.batch.pages import NOBODY, Copy, Pages
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import Tick, TickModel
from mktts.codec.decoder import PrimedStates
from mktts.model.backend import PromptRows
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

TICK = TickModel(1e-4, 0.0, 0.0, 0.0)
SETTINGS = TickSettings(max_lanes=8, max_rows=64, min_rows=8, few_lanes=8, idle_lanes=8)


@dataclass
class _Segment:
    """rows: of the prompt. entered: of them. made: further rows. state: the backend's, None before the first frame."""

    rows: Tensor
    sampling: Sampling
    seed: int
    entered: int = 0
    made: int = 0
    state: Any = None
    ended: bool = False
    failed: bool = False


@dataclass(eq=False)
class _Launched:
    tick: Tick
    rows: Sequence[Tensor | None]
    made: Made
    ends_s: float = 0.0
    error: BaseException | None = None


class FakeLanes:
    """See `mktts.batch.lanes.Lanes`. A launched tick runs at once; with `overlaps` it waits with all that is asked for
    behind it, as on a device, until it is collected.

    Keys and values are one number a position, in pages: a segment starts with the prompt that its pages hold, so rows
    that were shared or copied wrongly give other codes. What keeps a lane's stream from a frame (`step` raises a
    RuntimeError, `spoil` is true of its slot) makes its code 0 -1, from then on. wasted: lanes of segments that had
    ended. clock: has `now_s`, by which ticks are launched and take what `model` says; None: they take no time.
    """

    name = "fake lanes"

    def __init__(
        self,
        backend: Any,
        codec: Any,
        *,
        overlaps: bool = False,
        slots: int = 32,
        pages: int = 2_000,
        rows_per_slot: int = 10_000,
        settings: TickSettings = SETTINGS,
        max_kept: int | None = None,
        model: TickModel = TICK,
    ) -> None:
        self.overlaps, self.slots, self.settings = overlaps, slots, settings
        self.model = model
        self.pages = Pages(pages, slots, rows_per_slot, max_kept=max_kept)
        self.backend, self.codec = backend, codec
        self.spoil: Callable[[int], bool] = lambda slot: False
        self.ticks: list[Tick] = []
        self.wasted = 0
        self.clock: Any = None
        self.launched_s: list[float] = []
        self.segments: dict[int, _Segment] = {}
        self.codecs: dict[int, Any] = {}
        self._primed = PrimedStates(codec)
        self._table = self.pages.table.copy()
        self._cache = np.full((pages, self.pages.page_rows), np.nan, np.float32)
        self._launched: deque[_Launched] = deque()
        self._queue: deque[tuple[_Launched | None, Callable[[], None]]] = deque()

    def enter(self, slot: int, reference: Tensor | None) -> None:
        assert 0 <= slot < self.slots
        self._do(partial(self._enter, slot, reference))

    def forget(self, reference: Tensor) -> None:
        self._primed.forget(reference)

    def begin(self, slot: int, prompt: Tensor, sampling: Sampling, seed: int, copies: Sequence[Copy] = ()) -> None:
        self._do(partial(self.segments.__setitem__, slot, _Segment(prompt, sampling, seed)))
        self.copy(copies)

    def copy(self, copies: Sequence[Copy]) -> None:
        for source, target, rows in copies:
            self._do(partial(self._copy, source, target, rows))

    def leave(self, slot: int) -> None:
        self._do(partial(self.codecs.pop, slot, None))
        self._do(partial(self.segments.pop, slot, None))

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> _Launched:
        assert len(self._launched) < (2 if self.overlaps else 1), "too many ticks wait to be collected"
        assert not tick.empty and len(tick.lanes) <= self.settings.max_lanes
        assert [row is None for row in rows] == [i < tick.new_lanes for i in range(len(tick.lanes))]
        assert len(set(tick.lanes.tolist())) == len(tick.lanes)
        changed = self.pages.changes()
        self._do(partial(self._table.__setitem__, changed, self.pages.table[changed]))
        made = Made(
            np.zeros((len(rows), NUM_CODEBOOKS), np.int64),
            np.zeros(len(rows), bool),
            np.zeros((len(rows), SAMPLES_PER_FRAME), np.float32),
            self.model.predict(*tick.bucket, tick.context_rows),
        )
        launched = _Launched(tick, list(rows), made)
        self.ticks.append(tick)
        self._launched.append(launched)
        if self.clock is not None:
            self.launched_s.append(self.clock.now_s)
            launched.ends_s = self.clock.now_s + made.took_s
        self._queue.append((launched, partial(self._run, launched)))
        if not self.overlaps:
            self._work_off(launched)
        return launched

    def collect(self, launched: _Launched) -> Made:
        assert self._launched.popleft() is launched, "ticks are collected in their order, once each"
        self._work_off(launched)
        if self.clock is not None:
            self.clock.now_s = max(self.clock.now_s, launched.ends_s)
        if launched.error is not None:
            raise launched.error
        return launched.made

    def _do(self, work: Callable[[], object]) -> None:
        """Behind what was launched."""
        self._queue.append((None, work))
        if not self._launched:
            self._work_off(None)

    def _work_off(self, until: _Launched | None) -> None:
        """Does what waits in front of `until`, that, and what stands behind it, up to the next tick."""
        while self._queue and (self._queue[0][0] in (None, until) or self._queue[0][0] not in self._launched):
            of, work = self._queue.popleft()
            try:
                work()
            except Exception as error:
                if of is None:
                    raise
                of.error = error

    def _enter(self, slot: int, reference: Tensor | None) -> None:
        assert slot not in self.codecs
        self.codecs[slot] = self.codec.start() if reference is None else self._primed.of(reference).copy()

    def _copy(self, source: int, target: int, rows: int) -> None:
        self._cache[target, :rows] = self._cache[source, :rows]

    def _run(self, launched: _Launched) -> None:
        tick = launched.tick
        for piece in tick.pieces:
            segment = self.segments[piece.slot]
            end = piece.start + piece.rows
            assert segment.state is None and piece.start >= segment.entered, "rows left out or entered twice"
            assert piece.start == segment.entered or not segment.entered, "only the prefix may be there already"
            for position in range(piece.start, end):
                self._write(piece.slot, position, segment.rows[position])
            segment.entered = end
            assert piece.last == (end == len(segment.rows))
        for lane, (slot, row) in enumerate(zip(tick.lanes.tolist(), launched.rows, strict=True)):
            self._lane(launched.made, lane, slot, row)

    def _lane(self, made: Made, lane: int, slot: int, row: Tensor | None) -> None:
        segment = self.segments[slot]
        if segment.ended:
            self.wasted += 1
            made.ended[lane], made.codes[lane] = True, -1  # these codes mean nothing
            return
        if segment.failed:
            made.codes[lane] = -1
            return
        if row is None:
            assert segment.state is None and segment.entered == len(segment.rows)
            embeds = torch.tensor([[self._read(slot, position)] for position in range(len(segment.rows))])
            segment.state = self.backend.start(PromptRows(embeds), segment.sampling, segment.seed, 10**9)
        else:
            self._write(slot, len(segment.rows) + segment.made, row)
            segment.made += 1
        try:
            frame = self.backend.step(segment.state, row)
        except RuntimeError:
            frame = None
        if frame is None or self.spoil(slot):
            made.codes[lane], segment.failed = -1, True
        elif frame.codes is None:
            made.ended[lane], made.codes[lane], segment.ended = True, -1, True
        else:
            made.codes[lane] = frame.codes.numpy()
            made.pcm[lane] = self.codec.decode(frame.codes[None], self.codecs[slot]).numpy()

    def _write(self, slot: int, position: int, row: Tensor) -> None:
        self._cache[self._place(slot, position)] = float(row.sum())

    def _read(self, slot: int, position: int) -> float:
        return float(self._cache[self._place(slot, position)])

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        page = self._table[slot, position // self.pages.page_rows]
        assert page != NOBODY, f"slot {slot} has no page for position {position}"
        return page, position % self.pages.page_rows
