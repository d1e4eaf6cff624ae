"""A small engine: plays streams on lanes as the real one does, in ticks that are drawn at random, launched ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mktts.batch.lanes import Lanes
from mktts.batch.tick import Piece, Tick
from mktts.model.backend import PromptRows
from mktts.model.sampling import Choice, Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

CHOICES = (
    Choice(do_sample=False),
    Choice(temperature=2.0, top_k=10),
    Choice(temperature=2.0, top_k=20, top_p=0.8),
    Choice(temperature=1.5, top_k=0),
)


@dataclass
class Segment:
    """prompt (L, H), texts (frames, H). prefix: so many rows of the prompt are those of every segment with `key`."""

    prompt: Tensor
    texts: Tensor
    sampling: Sampling
    seed: int
    key: str | None = None
    prefix: int = 0

    @property
    def frames(self) -> int:
        return len(self.texts)

    def of_oracle(self, oracle) -> list[Tensor | None]:
        """Its codes; None last where it ends by itself."""
        state = oracle.start(PromptRows(self.prompt), self.sampling, self.seed, self.frames)
        made: list[Tensor | None] = []
        while len(made) < self.frames and not state.ended:
            made.append(oracle.step(state, self.texts[len(made) - 1] if made else None).codes)
        return made


def random_segments(config, device, count: int, frames: int, longest: int = 90, ends_after=None) -> list[Segment]:
    """Segments of prompts of 2 to `longest` rows. Every third shares its prefix with others. ends_after: the codec
    embeddings of a checkpoint whose greedy streams end by themselves behind its beginning-of-speech row."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def rows(number: int) -> Tensor:
        return 0.5 * torch.randn(number, config.talker.hidden_size, generator=generator)

    prefixes = {"short": rows(longest // 3 + 1), "long": rows(longest * 3 // 4)}
    made = []
    for i in range(count):
        key = (None, "short", None, None, "long", None)[i % 6]
        prompt = rows(int(rng.integers(2, longest + 1)))
        prompt = prompt if key is None else torch.cat((prefixes[key], prompt[: 1 + i % 5]))
        sampling = Sampling(CHOICES[i % 4], CHOICES[i // 2 % 4], repetition_penalty=(1.0, 1.05, 1.7)[i % 3])
        if ends_after is not None and i % 2:
            prompt[-1], sampling = 0.1 * prompt[-1] + ends_after[config.codec_ids.bos], Sampling().greedy()
        texts = 0.2 * rows(int(rng.integers(2, frames + 1)))
        prefix = 0 if key is None else len(prefixes[key])
        segment = Segment(prompt.to(device), texts.to(device), sampling, 1_000 + i + (7 << 33), key, prefix)
        made.append(segment)
    return made


class CountingCodec:
    """PCM that tells what was decoded: the sixteen codes, then how many frames the slot has heard."""

    name = "counting"

    def __init__(self, slots: int, device: torch.device) -> None:
        self.heard = torch.zeros(slots, device=device)

    def enter(self, slot: int, primed: int | None) -> None:
        self.heard[slot].fill_(0 if primed is None else primed)

    def silence(self, slots: Tensor) -> None:
        self.heard.index_fill_(0, slots, 0)

    def decode(self, codes: Tensor, lanes: Tensor) -> Tensor:
        lanes = lanes.long()
        heard = self.heard.index_select(0, lanes) + 1
        self.heard.index_copy_(0, lanes, heard)
        rest = heard.new_zeros(len(lanes), SAMPLES_PER_FRAME - NUM_CODEBOOKS - 1)
        return torch.cat((codes.float(), heard[:, None], rest), 1)


@dataclass
class _Open:
    stream: int
    slot: int
    left: deque[Segment]
    heard: int
    segment: Segment | None = None
    entered: int = 0
    launched: int = 0
    made: list[Tensor | None] = field(default_factory=list)
    serial: int = 0  # of the segment


@dataclass
class Player:
    """`play` runs all streams, each a list of segments, and returns what each segment made."""

    lanes: Lanes
    streams: list[list[Segment]]
    hurry: float = 0.7  # the part of the streams that is in a tick
    cancelled: dict[int, int] = field(default_factory=dict)  # stream -> frames after which it leaves
    sounds: bool = True

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.free = list(range(self.lanes.slots))
        self.open: dict[int, _Open] = {}
        self.made: dict[int, list[list[Tensor | None]]] = {}
        self.flying: deque = deque()
        self.wasted = self.cut = self.kept = 0

    def play(self) -> dict[int, list[list[Tensor | None]]]:
        todo = deque(range(len(self.streams)))
        while todo or self.open or self.flying:
            while todo and self.free and self.rng.random() < 0.6:
                self._enter(todo.popleft())
            tick = self._tick() if len(self.flying) < 2 else Tick()
            if not tick.empty and (not self.flying or self.rng.random() < 0.7):
                self._launch(tick)
            elif self.flying:
                self._collect()
        return self.made

    def _enter(self, stream: int) -> None:
        slot = self.free.pop(int(self.rng.integers(len(self.free))))
        reference = torch.full((stream % 4, NUM_CODEBOOKS), 1) if stream % 2 else None
        self.lanes.enter(slot, reference)
        heard = 0 if reference is None else len(reference)
        state = self.open[slot] = _Open(stream, slot, deque(self.streams[stream]), heard)
        self.made[stream] = []
        self._begin(state)

    def _begin(self, state: _Open) -> None:
        segment = state.segment = state.left.popleft()
        rows, copies = self.lanes.pages.open(state.slot, len(segment.prompt) + segment.frames, segment.key)
        self.kept += rows > 0
        self.lanes.begin(state.slot, segment.prompt, segment.sampling, segment.seed, copies)
        state.entered, state.launched, state.made = rows, 0, []
        state.serial += 1
        self.made[state.stream].append(state.made)

    def _tick(self) -> Tick:
        settings, pieces, new = self.lanes.settings, [], []
        budget = int(self.rng.integers(1, settings.max_rows + 1))
        order = [self.open[slot] for slot in self.rng.permutation(sorted(self.open)).tolist()]
        for state in order:
            left = len(state.segment.prompt) - state.entered
            if left and budget and len(new) < settings.max_lanes:
                rows = min(left, budget)
                if self.rng.random() < 0.3:
                    rows = int(self.rng.integers(1, rows + 1))
                pieces.append(Piece(state.slot, state.entered, rows, rows == left))
                self.cut += rows < left
                new += [state] if rows == left else []
                budget -= rows
        old = [
            state
            for state in order
            if state.entered == len(state.segment.prompt)
            and 0 < state.launched < state.segment.frames
            and self.rng.random() < self.hurry
        ][: settings.max_lanes - len(new)]
        if not old and not pieces:
            return Tick()
        bucket = settings.bucket(self.lanes.model, len(new) + len(old), sum(piece.rows for piece in pieces))
        slots = np.array([state.slot for state in (*new, *old)], np.int32)
        return Tick(bucket=bucket, lanes=slots, new_lanes=len(new), pieces=tuple(pieces))

    def _launch(self, tick: Tick) -> None:
        states = [self.open[slot] for slot in tick.lanes.tolist()]
        rows = [None if i < tick.new_lanes else s.segment.texts[s.launched - 1] for i, s in enumerate(states)]
        launched = self.lanes.launch(tick, rows)
        for piece in tick.pieces:
            self.open[piece.slot].entered += piece.rows
        for state in states:
            state.launched += 1
        for state in states[: tick.new_lanes]:
            if state.segment.key is not None:
                self.lanes.copy(self.lanes.pages.keep(state.slot, state.segment.key, state.segment.prefix) or ())
        self.flying.append((launched, [(state, state.serial) for state in states]))

    def _collect(self) -> None:
        launched, lanes = self.flying.popleft()
        made = self.lanes.collect(launched)
        assert len(made.codes) == len(made.ended) == len(made.pcm) == len(lanes) and made.took_s >= 0
        for (state, serial), codes, ended, pcm in zip(lanes, made.codes, made.ended, made.pcm, strict=True):
            if self.open.get(state.slot) is not state:
                continue
            if serial != state.serial:  # launched before the segment's end was known
                assert ended
                self.wasted += 1
                continue
            if codes[0] < 0:  # no numbers: the stream is over
                self._leave(state)
                continue
            state.made.append(None if ended else torch.from_numpy(codes))
            state.heard += not ended
            if self.sounds and not ended:
                assert pcm[:NUM_CODEBOOKS].tolist() == codes.tolist() and pcm[NUM_CODEBOOKS] == state.heard
            over = ended or len(state.made) == state.segment.frames
            if len(state.made) == self.cancelled.get(state.stream) or (over and not state.left):
                self._leave(state)
            elif over:
                self.lanes.pages.close(state.slot)
                self._begin(state)

    def _leave(self, state: _Open) -> None:
        self.lanes.pages.close(state.slot)
        self.lanes.leave(state.slot)
        del self.open[state.slot]
        self.free.append(state.slot)


def differences(player: Player, oracle) -> list[str]:
    """What is not the oracle's, up to where a stream was cancelled."""
    wrong = []
    for stream, segments in player.made.items():
        for i, found in enumerate(segments):
            expected = player.streams[stream][i].of_oracle(oracle)
            if stream in player.cancelled:
                expected = expected[: len(found)]
            same = len(found) == len(expected) and all(
                (a is None) == (b is None) and (a is None or torch.equal(a, b))
                for a, b in zip(found, expected, strict=True)
            )
            wrong += [] if same else [f"stream {stream}, segment {i}"]
    return wrong
