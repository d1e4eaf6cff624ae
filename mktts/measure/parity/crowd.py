"""Streams that many lanes play in ticks drawn at random: they come one after the other, prompts are cut, some skip."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mktts.batch.lanes import Lanes
from mktts.batch.pages import PAGE_ROWS
from mktts.batch.tick import Piece, Tick
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

_HURRY = 0.8  # the part of the streams that speak already that is in a tick
_CUT = 0.3  # of the prompts, at every tick, though there is room for the whole of them


@dataclass(frozen=True, eq=False)
class CrowdStream:
    """prompt (L, H); text (F, H), of as many frames: its first row is not used, the first frame comes from the prompt.

    key: of the prompt's first `prefix` rows, which every stream with that key has.
    """

    prompt: Tensor
    text: Tensor
    sampling: Sampling
    seed: int
    key: Hashable | None = None
    prefix: int = 0

    @property
    def rows(self) -> int:
        """Positions of keys and values."""
        return len(self.prompt) + len(self.text)


class MadeFrame(NamedTuple):
    """A frame that a tick made: codes (16,) int64 on the host, of a lane of the tick."""

    lane: int
    stream: int
    frame: int
    codes: Tensor


@dataclass
class _Open:
    index: int
    entered: int  # rows of the prompt
    made: list[Tensor | None] = field(default_factory=list)  # None: ended by itself


class Crowd:
    """`play` runs all streams once. cut, kept: pieces that did not end their prompt, and prefixes found kept."""

    def __init__(self, lanes: Lanes, streams: Sequence[CrowdStream], size: int, seed: int = 0) -> None:
        """size: lanes of every tick's bucket, where lanes have buckets; at most so many streams are open at once.
        seed: of the ticks, not of the streams."""
        self._lanes, self._streams, self._size = lanes, streams, size
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(lanes.slots).tolist()[:size]
        self._open: dict[int, _Open] = {}
        self.cut = self.kept = 0

    def play(self, each: Callable[[list[MadeFrame]], None] | None = None) -> list[Tensor]:
        """Codes (T, 16) int64 of each stream, T less than its frames where it ended by itself.

        each: called behind every tick with the frames that it made.
        """
        waiting = deque(range(len(self._streams)))
        made = [torch.zeros(0, NUM_CODEBOOKS, dtype=torch.int64) for _ in self._streams]
        while waiting or self._open:
            for _ in range(int(self._rng.integers(1, 2 + self._size // 4))):
                if waiting and self._free:
                    self._enter(waiting.popleft())
            tick = self._tick()
            if tick.empty:
                continue
            frames = self._run(tick)
            if each is not None:
                each(frames)
            for slot in tick.lanes.tolist():
                stream = self._open[slot]
                if stream.made[-1] is None or len(stream.made) == len(self._streams[stream.index].text):
                    codes = [codes for codes in stream.made if codes is not None]
                    made[stream.index] = torch.stack(codes) if codes else made[stream.index]
                    self._leave(slot)
        return made

    def _enter(self, index: int) -> None:
        stream, slot = self._streams[index], self._free.pop()
        kept_rows, copies = self._lanes.pages.open(slot, stream.rows, stream.key)
        self.kept += kept_rows > 0
        self._lanes.enter(slot, None)
        self._lanes.begin(slot, stream.prompt, stream.sampling, stream.seed, copies)
        self._open[slot] = _Open(index, kept_rows)

    def _leave(self, slot: int) -> None:
        self._lanes.pages.close(slot)
        self._lanes.leave(slot)
        del self._open[slot]
        self._free.append(slot)

    def _tick(self) -> Tick:
        settings, pieces, new, old = self._lanes.settings, [], [], []
        left = int(self._rng.integers(1, settings.max_rows + 1))
        for slot in self._rng.permutation(sorted(self._open)).tolist():
            stream = self._open[slot]
            prompt = len(self._streams[stream.index].prompt)
            missing = prompt - stream.entered
            if not missing:
                old += [slot] if self._rng.random() < _HURRY else []
            elif settings.whole_prompts:
                pieces.append(Piece(slot, 0, prompt, True))
            elif left:
                rows = min(missing, left)
                if self._rng.random() < _CUT:
                    rows = int(self._rng.integers(1, rows + 1))
                pieces.append(Piece(slot, stream.entered, rows, rows == missing))
                self.cut += rows < missing
                left -= rows
        new = [piece.slot for piece in pieces if piece.last]
        bucket = self._bucket(len(new) + len(old), sum(piece.rows for piece in pieces))
        return Tick(bucket, np.array([*new, *old], np.int32), len(new), pieces=tuple(pieces))

    def _bucket(self, lanes: int, rows: int) -> tuple[int, int]:
        settings = self._lanes.settings
        fitting = [bucket for bucket in settings.buckets if bucket[0] == self._size and bucket[1] >= rows]
        return min(fitting) if fitting else settings.bucket(self._lanes.model, lanes, rows)

    def _run(self, tick: Tick) -> list[MadeFrame]:
        slots = tick.lanes.tolist()
        opened = [self._open[slot] for slot in slots]
        texts = [self._streams[stream.index].text for stream in opened]
        rows = [None if i < tick.new_lanes else texts[i][len(s.made)] for i, s in enumerate(opened)]
        launched = self._lanes.launch(tick, rows)
        for piece in tick.pieces:
            self._open[piece.slot].entered += piece.rows
        for slot, opened_stream in zip(slots[: tick.new_lanes], opened, strict=False):
            stream = self._streams[opened_stream.index]
            if stream.key is not None:
                self._lanes.copy(self._lanes.pages.keep(slot, stream.key, stream.prefix) or ())
        made = self._lanes.collect(launched)
        frames = []
        for lane, (stream, codes, ended) in enumerate(zip(opened, made.codes, made.ended, strict=True)):
            over = bool(ended) or codes[0] < 0
            stream.made.append(None if over else torch.from_numpy(codes.copy()))
            if not over:
                frames.append(MadeFrame(lane, stream.index, len(stream.made) - 1, stream.made[-1]))
        return frames


def pages_for(streams: Sequence[CrowdStream]) -> int:
    """Pages with which all of them are open at once and every prefix stays kept, page 0 with them."""
    prefixes = {stream.key: -(-stream.prefix // PAGE_ROWS) for stream in streams if stream.key is not None}
    own = sum(-(-stream.rows // PAGE_ROWS) for stream in streams) + 1
    return max(own + sum(prefixes.values()), 8 * sum(prefixes.values()))  # prefixes may have an eighth of all
