"""The batched frame as parity compares it: many streams with prompts of their own, in ticks drawn at random. Prompts
are cut over ticks, some begin behind a kept prefix, lanes are at different positions; the last few streams of a load
are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.engine.lanes import Lanes
from mktts.engine.pages import PAGE_ROWS
from mktts.engine.scheduler import Piece, Tick, TickSettings
from mktts.engine.stream import Segment
from mktts.measure.parity.ratio import GREEDY, Observed, RowStream, random_rows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

if TYPE_CHECKING:
    from mktts.batch.cuda.lanes import CudaLanes

MODES = {"deterministic": True, "cublas": False}  # of CudaLanes
_PROMPT_ROWS = (0, 64, 1_024)  # of the buckets of each size
_PREFIX_ROWS = 70  # one whole page and a part of the next
_NEIGHBOUR_ROWS = 40  # of a prompt that is not compared, at most
_IN_TICK = 0.8  # the part of the streams that speak already that is in a tick
_CUT = 0.3  # of the prompts, at every tick, though there is room for the whole of them


# ---- ticks drawn at random


@dataclass
class _Playing:
    index: int
    stream: RowStream
    entered: int  # rows of the prompt
    made: list[Tensor] = field(default_factory=list)
    ended: bool = False  # by itself


class RandomTicks:
    """Streams on lanes, in ticks drawn at random: they come one after the other, prompts are cut, some skip a tick.
    cut, kept: pieces that did not end their prompt, and prefixes found kept."""

    def __init__(self, lanes: Lanes, streams: Sequence[RowStream], size: int, seed: int = 0) -> None:
        """size: lanes of every tick's bucket, where lanes have buckets; at most so many streams are open at once.
        seed: of the ticks, not of the streams."""
        self._lanes, self._streams, self._size = lanes, streams, size
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(lanes.slots).tolist()[:size]
        self._open: dict[int, _Playing] = {}
        self.cut = self.kept = 0

    def play(self, each: Callable[[int, int, int, Tensor], None] | None = None) -> list[Tensor]:
        """Codes (T, 16) int64 of each stream, T less than its frames where it ended by itself. each: called behind
        every tick with the lane, the stream, the frame's number and its codes (16,)."""
        waiting = deque(range(len(self._streams)))
        made = [torch.zeros(0, NUM_CODEBOOKS, dtype=torch.int64) for _ in self._streams]
        while waiting or self._open:
            for _ in range(int(self._rng.integers(1, 2 + self._size // 4))):
                if waiting and self._free:
                    self._enter(waiting.popleft())
            tick = self._tick()
            if tick.empty:
                continue
            self._run(tick, each)
            for slot in tick.lanes.tolist():
                one = self._open[slot]
                if one.ended or len(one.made) == len(one.stream.text):
                    made[one.index] = torch.stack(one.made) if one.made else made[one.index]
                    self._lanes.pages.close(slot)
                    self._lanes.leave(slot)
                    del self._open[slot]
                    self._free.append(slot)
        return made

    def _enter(self, index: int) -> None:
        stream, slot = self._streams[index], self._free.pop()
        kept_rows = self._lanes.pages.open(slot, stream.positions, stream.key)
        self.kept += kept_rows > 0
        self._lanes.begin(slot, Segment.of_rows(stream.embeds, stream.sampling, stream.seed))
        self._open[slot] = _Playing(index, stream, kept_rows)

    def _tick(self) -> Tick:
        settings, pieces, old = self._lanes.settings, [], []
        left = int(self._rng.integers(1, settings.max_rows + 1))
        for slot in self._rng.permutation(sorted(self._open)).tolist():
            playing = self._open[slot]
            prompt = len(self._streams[playing.index].embeds)
            missing = prompt - playing.entered
            if not missing:
                old += [slot] if self._rng.random() < _IN_TICK else []
            elif settings.whole_prompts:
                pieces.append(Piece(slot, 0, prompt, True))
            elif left:
                rows = min(missing, left)
                if self._rng.random() < _CUT:
                    rows = int(self._rng.integers(1, rows + 1))
                pieces.append(Piece(slot, playing.entered, rows, rows == missing))
                self.cut += rows < missing
                left -= rows
        new = [piece.slot for piece in pieces if piece.last]
        lanes, rows = len(new) + len(old), sum(piece.rows for piece in pieces)
        fitting = [bucket for bucket in settings.buckets if bucket[0] == self._size and bucket[1] >= rows]
        bucket = min(fitting) if fitting else settings.bucket(self._lanes.model, lanes, rows)
        return Tick(bucket, np.array([*new, *old], np.int32), len(new), pieces=tuple(pieces))

    def _run(self, tick: Tick, each: Callable[[int, int, int, Tensor], None] | None) -> None:
        slots = tick.lanes.tolist()
        lanes = [self._open[slot] for slot in slots]
        rows = [None if i < tick.new_lanes else one.stream.text[len(one.made)] for i, one in enumerate(lanes)]
        launched = self._lanes.launch(tick, rows)
        for piece in tick.pieces:
            self._open[piece.slot].entered += piece.rows
        for slot, one in zip(slots[: tick.new_lanes], lanes, strict=False):
            if one.stream.key is not None:
                self._lanes.pages.keep(slot, one.stream.key, one.stream.prefix)
        made = self._lanes.collect(launched)
        for lane, (one, codes, ended) in enumerate(zip(lanes, made.codes, made.ended, strict=True)):
            one.ended = bool(ended or codes[0] < 0)
            if not one.ended:
                one.made.append(torch.from_numpy(codes.copy()))
                if each is not None:
                    each(lane, one.index, len(one.made) - 1, one.made[-1])


def pages_for(streams: Sequence[RowStream]) -> int:
    """Pages with which all of them are open at once and every prefix stays kept, page 0 with them."""
    prefixes = {stream.key: -(-stream.prefix // PAGE_ROWS) for stream in streams if stream.key is not None}
    own = sum(-(-stream.positions // PAGE_ROWS) for stream in streams) + 1
    return max(own + sum(prefixes.values()), 8 * sum(prefixes.values()))  # prefixes may have an eighth of all


def exact_buckets(sizes: Sequence[int], prompt_rows: Sequence[int] = _PROMPT_ROWS) -> TickSettings:
    """Ticks of exactly these numbers of lanes and prompt rows."""
    buckets = tuple((lanes, rows) for lanes in sizes for rows in prompt_rows)
    return TickSettings(buckets, max(sizes), max(prompt_rows), min_rows=1, few_lanes=1)


class LanesUnderTest:
    """Lanes that play loads in random ticks.

    inside: what the newest tick did in a lane, by the lane, the frame's codes, and whether it came from the prompt
    watched: the last streams of a load, so many, are compared"""

    def __init__(self, lanes: Lanes, inside: Callable[[int, Tensor, bool], Observed], watched: int) -> None:
        self.lanes, self._inside, self._watched = lanes, inside, watched

    def observed(self, streams: Sequence[RowStream], size: int) -> Iterator[tuple[int, list[Observed]]]:
        """What every frame of the compared streams did, with their numbers."""
        seen: dict[int, list[Observed]] = {number: [] for number in range(len(streams))[-self._watched :]}

        def watch(lane: int, number: int, frame: int, codes: Tensor) -> None:
            if number in seen:
                seen[number].append(self._inside(lane, codes, frame == 0))

        RandomTicks(self.lanes, streams, size, seed=size).play(watch)
        return iter(seen.items())

    def codes(self, streams: Sequence[RowStream], size: int) -> list[Tensor]:
        """Codes (T, 16) of each stream."""
        return RandomTicks(self.lanes, streams, size, seed=size).play()


def cuda_lanes(
    checkpoint: Checkpoint, mode: str, device: str, sizes: Sequence[int], streams: Sequence[RowStream], watched: int
) -> LanesUnderTest:
    """The batched frame in bf16, of MODES, with room for `streams`, all open at once. Its ticks are no CUDA graphs."""
    from mktts.batch.cuda.lanes import CudaLanes

    positions = max(stream.positions for stream in streams)
    room = {"slots": max(sizes), "positions": positions, "pages": pages_for(streams), "settings": exact_buckets(sizes)}
    given = (checkpoint.config, checkpoint.tensors(), torch.device(device), torch.bfloat16)
    lanes = CudaLanes(*given, **room, graphs=False, deterministic=MODES[mode])
    return LanesUnderTest(lanes, FrameInside(lanes).observed, watched)


class FrameInside:
    """The inside of a batched frame's newest tick, once it was collected and before the next is launched. Methods of
    the frame are wrapped from outside, so that serving does nothing for it. Kernels of the buckets are compiled
    before."""

    def __init__(self, lanes: CudaLanes) -> None:
        from mktts.batch.cuda.kernels import compiling
        from mktts.batch.cuda.lanes import _THREADS

        self._logits: list[Tensor] = [torch.empty(0)] * NUM_CODEBOOKS  # (lanes, vocabulary) each
        self._hidden: list[Tensor] = [torch.empty(0)] * lanes.config.talker.num_hidden_layers  # (lanes, H) each
        frames = [lanes._buckets[size] for size in sorted(lanes._buckets, reverse=True)]
        with torch.cuda.stream(lanes._stream), compiling(_THREADS):
            for frame in frames:
                frame.run()
        for frame in frames:
            self._watch(frame)

    def _watch(self, frame: Any) -> None:
        draw, layer = frame._draw, frame._layer

        def watched_draw(logits: Tensor, book: int) -> None:
            self._logits[book] = logits.to(torch.float32, copy=True)
            draw(logits, book)

        def watched_layer(stack: Any, index: int, x: Tensor, *more: Any) -> None:
            layer(stack, index, x, *more)
            if stack is frame._weights.talker:
                self._hidden[index] = x[: frame.lane_count].to(torch.float32, copy=True)

        frame._draw, frame._layer = watched_draw, watched_layer

    def observed(self, lane: int, codes: Tensor, first: bool) -> Observed:
        """Of one lane. first: its frame came from the prompt, so it has no hidden states of its own."""
        hidden = None if first else torch.stack([of_layer[lane] for of_layer in self._hidden])
        return Observed(codes, [of_head[lane].clone() for of_head in self._logits], hidden)


def random_load(fp32: TorchBackend, size: int, watched: int, contexts: Sequence[int], frames: int) -> list[RowStream]:
    """`size` streams of which the last `watched` are to be compared, every other greedy. Every fourth has a prefix in
    common with its like. contexts: prompt rows of the compared ones, by turns, each a few more than the one before."""
    prefix = random_rows(fp32, _PREFIX_ROWS, size)
    watched, streams = min(watched, size), []
    for index in range(size):
        seed, place = 1_000 * size + index, index - (size - watched)  # place: among those compared
        rows = 2 + seed % _NEIGHBOUR_ROWS if place < 0 else contexts[place % len(contexts)] + place
        prompt, kept = random_rows(fp32, rows, seed), (None, 0)
        if index % 4 == 3 and place < 0:
            prompt = torch.cat((prefix, prompt))
        if index % 4 == 3 and len(prompt) > _PREFIX_ROWS:
            prompt[:_PREFIX_ROWS], kept = prefix, (f"prefix {size}", _PREFIX_ROWS)
        text, sampling = random_rows(fp32, frames, 500_000 + seed), Sampling() if index % 2 else GREEDY
        streams.append(RowStream(prompt, text, sampling, seed, *kept))
    return streams
