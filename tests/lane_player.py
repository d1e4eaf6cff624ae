"""A small engine: plays streams on lanes as the real one does, in ticks that are drawn at random, launched ahead."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mktts.engine.lanes import Lanes
from mktts.engine.pages import PAGE_ROWS
from mktts.engine.scheduler import Piece, Tick, TickSettings
from mktts.engine.stream import Segment
from mktts.measure.parity.kernel import RowStream
from mktts.measure.parity.upstream import our_codes
from mktts.model.backend import PromptRows
from mktts.model.sampling import Choice, Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

CHOICES = (
    Choice(do_sample=False),
    Choice(temperature=2.0, top_k=10),
    Choice(temperature=2.0, top_k=20, top_p=0.8),
    Choice(temperature=1.5, top_k=0),
)

PROMPT_ROWS = (0, 64, 1_024)  # of the buckets of each size
_IN_TICK = 0.8  # the part of the streams that speak already that is in a tick
_CUT = 0.3  # of the prompts, at every tick, though there is room for the whole of them


def random_segments(config, device, count: int, frames: int, longest: int = 90, ends_after=None) -> list[RowStream]:
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
        text = 0.2 * rows(int(rng.integers(2, frames + 1)))
        prefix = 0 if key is None else len(prefixes[key])
        made.append(RowStream(prompt.to(device), text.to(device), sampling, 1_000 + i + (7 << 33), key, prefix))
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


def pages_for(streams: Sequence[RowStream]) -> int:
    """Pages with which all of them are open at once and every prefix stays kept, page 0 with them."""
    prefixes = {stream.key: -(-stream.prefix // PAGE_ROWS) for stream in streams if stream.key is not None}
    own = sum(-(-stream.positions // PAGE_ROWS) for stream in streams) + 1
    return max(own + sum(prefixes.values()), 8 * sum(prefixes.values()))  # prefixes may have an eighth of all


def exact_buckets(sizes: Sequence[int], prompt_rows: Sequence[int] = PROMPT_ROWS) -> TickSettings:
    """Ticks of exactly these numbers of lanes and prompt rows."""
    buckets = tuple((lanes, rows) for lanes in sizes for rows in prompt_rows)
    return TickSettings(buckets, max(sizes), max(prompt_rows), min_rows=1, few_lanes=1)


@dataclass
class _Open:
    """segment: being made. entered: rows of its prompt. launched: frames. serial: which of the stream's segments."""

    stream: int
    left: deque[RowStream]
    heard: int
    segment: RowStream | None = None
    entered: int = 0
    launched: int = 0
    made: list[Tensor] = field(default_factory=list)
    serial: int = 0


class Player:
    """`play` runs all streams, each a list of segments; `made` then has the codes of each segment, by stream.
    Ticks are drawn at random: streams come one after the other, prompts are cut, some skip a tick. cancelled: stream ->
    frames after which it leaves. cut, kept: pieces that did not end their prompt, and prefixes found kept. wasted:
    lanes that were launched behind the end of a segment."""

    def __init__(
        self, lanes: Lanes, streams: list[list[RowStream]], cancelled=None, sounds=True, seed=0, size=None, plain=False,
        each: Callable[[int, int, int, Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """sounds: the lanes have a CountingCodec. seed: of the ticks. size: lanes of a tick's bucket, where lanes have
        buckets, and the most streams that are open at once. plain: no tick is launched ahead, and no stream goes on
        from a reference. each: called with the lane, the stream, the frame's number and its codes (16,)."""
        self.lanes, self.streams, self.cancelled, self._sounds = lanes, streams, cancelled or {}, sounds
        self._size, self._plain, self._each = size or lanes.slots, plain, each
        self._coming = 1 - 4 / (4 + self._size) if plain else 0.6  # the chance that one more comes
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(lanes.slots).tolist()[: self._size]
        self._open: dict[int, _Open] = {}
        self.made: dict[int, list[list[Tensor]]] = {}
        self.cut = self.kept = self.wasted = 0
        self._flying: deque = deque()

    def play(self) -> None:
        todo = deque(enumerate(self.streams))
        while todo or self._open or self._flying:
            while todo and self._free and self._rng.random() < self._coming:
                self._come(*todo.popleft())
            tick = self._tick() if len(self._flying) < (1 if self._plain else 2) else Tick()
            if (len(tick.lanes) or tick.pieces) and (not self._flying or self._rng.random() < 0.7):
                self._launch(tick)
            elif self._flying:
                self._collect()

    def _come(self, stream: int, segments: list[RowStream]) -> None:
        slot, reference = self._free.pop(), None
        if stream % 2 and not self._plain:
            reference = torch.full((stream % 4, NUM_CODEBOOKS), 1)
        self._open[slot] = _Open(stream, deque(segments), 0 if reference is None else len(reference))
        self.made[stream] = []
        self._begin(slot, reference)

    def _begin(self, slot: int, reference: Tensor | None = None) -> None:
        state = self._open[slot]
        state.segment = segment = state.left.popleft()
        state.entered = self.lanes.pages.open(slot, segment.positions, segment.key)
        self.kept += state.entered > 0
        begun = Segment(PromptRows(segment.embeds), segment.sampling, segment.seed)
        begun.reference = reference
        self.lanes.begin(slot, begun, anew=not state.serial)
        state.launched, state.made, state.serial = 0, [], state.serial + 1
        self.made[state.stream].append(state.made)

    def _tick(self) -> Tick:
        """Of those that have frames to be launched."""
        settings, pieces, old = self.lanes.settings, [], []
        going = [slot for slot, s in self._open.items() if s.launched < len(s.segment.text)]
        left = int(self._rng.integers(1, settings.max_rows + 1))
        for slot in self._rng.permutation(sorted(going)).tolist():
            state = self._open[slot]
            prompt = len(state.segment.embeds)
            missing = prompt - state.entered
            if not missing:
                old += [slot] if self._rng.random() < _IN_TICK else []
            elif settings.whole_prompts:
                pieces.append(Piece(slot, 0, prompt, True))
            elif left:
                rows = min(missing, left)
                if self._rng.random() < _CUT:
                    rows = int(self._rng.integers(1, rows + 1))
                pieces.append(Piece(slot, state.entered, rows, rows == missing))
                self.cut += rows < missing
                left -= rows
        new = [piece.slot for piece in pieces if piece.last]
        lanes, rows = len(new) + len(old), sum(piece.rows for piece in pieces)
        fitting = [bucket for bucket in settings.buckets if bucket[0] == self._size and bucket[1] >= rows]
        bucket = min(fitting) if fitting else settings.bucket(self.lanes.model, lanes, rows)
        return Tick(bucket, np.array([*new, *old], np.int32), len(new), pieces=tuple(pieces))

    def _launch(self, tick: Tick) -> None:
        slots = tick.lanes.tolist()
        states = [self._open[slot] for slot in slots]
        rows = [s.segment.row(s.launched - 1) if s.launched else None for s in states]
        launched = self.lanes.launch(tick, rows)
        for piece in tick.pieces:
            self._open[piece.slot].entered += piece.rows
        for state in states:
            state.launched += 1
        for slot, state in zip(slots[: tick.new_lanes], states, strict=False):
            if state.segment.key is not None:
                self.lanes.pages.keep(slot, state.segment.key, state.segment.prefix)
        self._flying.append((launched, [(slot, self._open[slot], self._open[slot].serial) for slot in slots]))

    def _collect(self) -> None:
        launched, lanes = self._flying.popleft()
        made = self.lanes.collect(launched)
        assert len(made.codes) == len(made.ended) == len(made.pcm) == len(lanes) and made.took_s >= 0
        each_made = zip(lanes, made.codes, made.ended, made.pcm, strict=True)
        for lane, ((slot, state, serial), codes, ended, pcm) in enumerate(each_made):
            if self._open.get(slot) is not state:
                continue
            if serial != state.serial:  # launched before the segment's end was known
                assert ended
                self.wasted += 1
                continue
            if codes[0] < 0 and not ended:  # no numbers: the stream is over
                self._leave(slot)
                continue
            if not ended:
                state.made.append(torch.from_numpy(codes))
                state.heard += 1
                if self._each is not None:
                    self._each(lane, state.stream, len(state.made) - 1, state.made[-1])
                if self._sounds:
                    assert pcm[:NUM_CODEBOOKS].tolist() == codes.tolist() and pcm[NUM_CODEBOOKS] == state.heard
            over = ended or len(state.made) == len(state.segment.text)
            if len(state.made) == self.cancelled.get(state.stream) or (over and not state.left):
                self._leave(slot)
            elif over:
                self.lanes.pages.close(slot)
                self._begin(slot)

    def _leave(self, slot: int) -> None:
        self.lanes.pages.close(slot)
        self.lanes.leave(slot)
        del self._open[slot]
        self._free.append(slot)


def expected_codes(segment: RowStream, oracle) -> Tensor:
    return our_codes(oracle, segment, segment.sampling, segment.seed, len(segment.text))


def differences(player: Player, oracle) -> list[str]:
    """What is not the oracle's, up to where a stream was cancelled."""
    wrong = []
    for stream, segments in player.made.items():
        for i, found in enumerate(segments):
            expected = expected_codes(player.streams[stream][i], oracle)
            expected = expected[: len(found)] if stream in player.cancelled else expected
            same = len(found) == len(expected) and all(map(torch.equal, found, expected))
            wrong += [] if same else [f"stream {stream}, segment {i}"]
    return wrong
