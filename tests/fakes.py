"""Stand-ins for the model's parts: every step is counted, can be held up, and gives codes that can be told apart."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.codec.decoder import PendingPcm, PrimedStates
from mktts.engine.admission import Admission, AdmissionLimits
from mktts.engine.engine import Engine
from mktts.engine.lanes import Made, SingleLanes
from mktts.engine.options import SCHEDULE, Guard, StreamOptions
from mktts.engine.pages import NO_OWNER, Pages
from mktts.engine.runner import Runner
from mktts.engine.scheduler import Tick, TickModel, TickSettings
from mktts.engine.stream import Segment, Stream
from mktts.errors import PromptError
from mktts.model.backend import Frame, PromptRows
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import CODEBOOK_SIZE, MODEL_TYPES, NUM_CODEBOOKS, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer

WAIT_S = 60.0  # before a test that hangs fails
_OF_BOOKS = 17 * torch.arange(NUM_CODEBOOKS)
_SLIDE = torch.linspace(0, 1, SAMPLES_PER_FRAME + 1, dtype=torch.float64)[1:]


class FakeState(SimpleNamespace):
    """What must be free once a stream is gone: unlike its base it can be weakly referenced."""

    def copy(self) -> FakeState:
        return FakeState(**vars(self))


@dataclass
class FakeBackend:
    """Codes follow from the seed, the prompt, the text rows and the frame index.
    eos_after: frames a segment has. fail_at: the frame at which segments fail whose seed is in `failing`, or all.
    code0: makes code 0 of a frame index. held: `step` waits for a permit of `let`."""

    eos_after: int | None = None
    fail_at: int | None = None
    failing: Collection[int] | None = None
    code0: Callable[[int], int] = lambda frame: frame % CODEBOOK_SIZE
    held: bool = False
    name: str = "fake"
    states: list[FakeState] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # the seed of each step, in order

    def __post_init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._changed = threading.Condition()
        self.entered = 0  # steps begun

    def let(self, steps: int) -> None:
        """Permits this many held steps."""
        self._permits.release(steps)

    def hold(self) -> None:
        """From now on, also after `release`. Call it while no step is held."""
        self._permits, self.held = threading.Semaphore(0), True

    def release(self) -> None:
        """Holds nothing any more."""
        self.held = False
        self._permits.release(1_000)

    def wait_entered(self, steps: int) -> None:
        """Waits until so many steps have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.entered >= steps, WAIT_S), f"only {self.entered} steps"

    def start(self, prompt: PromptRows, sampling: object, seed: int, max_frames: int) -> FakeState:
        state = FakeState(prompt=int(prompt.embeds.sum()), seed=seed, frames=0, max_frames=max_frames, rows=0)
        self.states.append(state)
        return state

    def step(self, state: FakeState, row: Tensor | None) -> Frame:
        with self._changed:
            self.entered += 1
            self._changed.notify_all()
        if self.held:
            assert self._permits.acquire(timeout=WAIT_S)
        assert (row is None) == (state.frames == 0), "the row must be None on the first step and on no other"
        assert state.frames < state.max_frames, "stepped past max_frames"
        self.order.append(state.seed)
        if self.fail_at == state.frames and (self.failing is None or state.seed in self.failing):
            raise RuntimeError(f"made to fail at frame {state.frames}")
        if self.eos_after is not None and state.frames >= self.eos_after:
            return Frame(None, 1.0, 0.0)
        state.rows += 0 if row is None else int(row.sum())
        mixed = 31 * state.seed + 7 * state.prompt + 3 * state.rows + 131 * state.frames
        codes = (mixed + _OF_BOOKS) % CODEBOOK_SIZE
        codes[0] = self.code0(state.frames)
        state.frames += 1
        return Frame(codes, 1.0, 2.0)

    def frames(self, state: FakeState, rows: Sequence[Tensor | None]) -> Iterator[Frame]:
        for row in rows:
            yield self.step(state, row)


@dataclass
class FakeCodec:
    """Slides from where the last frame ended to a level that the frame's codes set: restarting it would be a jump.
    silent_frames: so many at the start are silence."""

    silent_frames: int = 0
    decoded: list[int] = field(default_factory=list)  # frames of each call

    def start(self) -> FakeState:
        return FakeState(level=0.0, frames=0)

    def decode(self, codes: Tensor, state: FakeState) -> Tensor:
        self.decoded.append(len(codes))
        pieces = []
        for frame in codes.tolist():
            level = 0.0 if state.frames < self.silent_frames else 0.2 + 0.7 * (sum(frame) % 97) / 97
            pieces.append(state.level + (level - state.level) * _SLIDE)
            state.level = level
            state.frames += 1
        return torch.cat(pieces).float()

    def submit(self, codes: Tensor, state: FakeState) -> PendingPcm:
        return PendingPcm(self.decode(codes, state))


class FakeFedPrompt:
    """A character is a token."""

    prefix_rows, prefix_key = 0, None
    text, text_ended = "", False

    @property
    def ready(self) -> bool:
        return self.text_ended or len(self.text) > 0

    @property
    def text_tokens(self) -> int:
        return len(self.text)

    @property
    def embeds(self) -> Tensor:
        return _rows(self.text[:1])

    def push(self, text: str) -> None:
        assert not self.text_ended
        self.text += text if self.text else text.lstrip()

    def close(self) -> None:
        self.text_ended = True

    def row(self, frame: int) -> Tensor | None:
        if frame + 1 < len(self.text):
            return _rows(self.text[frame + 1])[0]
        return torch.zeros(1) if self.text_ended else None


@dataclass
class FakePrompts:
    """Knows the speaker "vivian" and the language "english". prefix: of known texts' prompts, a character a row."""

    config = SimpleNamespace(type=MODEL_TYPES["custom_voice"], speakers={"vivian": 1})
    prefix: str = ""
    built: list[str] = field(default_factory=list)
    opened: list[FakeFedPrompt] = field(default_factory=list)

    def check(self, request: Request) -> Request:
        if request.speaker not in (None, "vivian"):
            raise PromptError(f"speaker must be 'vivian', got {request.speaker!r}")
        if request.language not in ("auto", "english"):
            raise PromptError(f"language must be 'english', got {request.language!r}")
        return request

    def of_checked(self, request: Request) -> SimpleNamespace:
        self.built.append(request.text)
        text = {"row": lambda frame: torch.zeros(1), "text_tokens": len(request.text), "text_ended": True}
        kept = {"prefix_rows": len(self.prefix), "prefix_key": self.prefix or None}
        return SimpleNamespace(embeds=_rows(self.prefix + request.text), **text, **kept)

    def open(self, request: Request) -> FakeFedPrompt:
        self.opened.append(FakeFedPrompt())
        self.opened[-1].push(request.text)
        return self.opened[-1]


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
    """behind: what was asked for since."""

    tick: Tick
    rows: Sequence[Tensor | None]
    made: Made
    ends_s: float = 0.0
    behind: list[Callable[[], object]] = field(default_factory=list)


class FakeLanes:
    """See `mktts.engine.lanes.Lanes`; what a device must keep to is checked at every call. A launched tick waits, with
    all that is asked for behind it, until it is collected.

    Keys and values are one number a position, in pages: rows that were shared or copied wrongly give other codes. What
    keeps a lane's stream from a frame (`step` raises a RuntimeError, `spoil` is true of its slot) makes its code 0 -1,
    from then on. wasted: lanes of segments that had ended. clock: has `now_s`, by which ticks are launched and take
    what `model` says; None: they take no time."""

    name = "fake lanes"
    alone = decodes_beside = False
    submit = None

    def __init__(
        self, backend, codec, *, overlaps=False, slots=32, pages=2_000, rows_per_slot=10_000, settings=SETTINGS,
        max_kept=None, model=TICK,
    ) -> None:  # fmt: skip
        self.overlaps, self.slots, self.settings, self.model = overlaps, slots, settings, model
        self.pages = Pages(pages, slots, rows_per_slot, max_kept=max_kept)
        self.positions = self.pages.rows_per_slot
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

    def forget(self, voice: Voice) -> None:
        if voice.codes is not None:
            self._primed.forget(voice.codes)

    def begin(self, slot: int, segment: Segment, anew: bool = True) -> None:
        assert 0 <= slot < self.slots
        if anew:
            state = self.codec.start() if segment.reference is None else self._primed.of(segment.reference).copy()
            self._do(partial(self.codecs.__setitem__, slot, state))
        here = _Segment(segment.prompt.embeds, segment.sampling, segment.seed)
        self._do(partial(self.segments.__setitem__, slot, here))

    def leave(self, slot: int) -> None:
        self._do(partial(self.codecs.pop, slot, None))
        self._do(partial(self.segments.pop, slot, None))

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> _Launched:
        assert len(self._launched) < (2 if self.overlaps else 1), "too many ticks wait to be collected"
        assert (len(tick.lanes) or tick.pieces) and len(tick.lanes) <= self.settings.max_lanes
        assert [row is None for row in rows] == [i < tick.new_lanes for i in range(len(tick.lanes))]
        assert len(set(tick.lanes.tolist())) == len(tick.lanes)
        copies, changed = self.pages.changes()
        for source, target, copied in copies:
            self._do(partial(np.copyto, self._cache[target, :copied], self._cache[source, :copied]))
        self._do(partial(self._table.__setitem__, changed, self.pages.table[changed]))
        count, took_s = len(rows), self.model.predict(*tick.bucket, tick.context_rows)
        codes, pcm = np.zeros((count, NUM_CODEBOOKS), np.int64), np.zeros((count, SAMPLES_PER_FRAME), np.float32)
        made = Made(codes, np.zeros(count, bool), pcm, took_s)
        launched = _Launched(tick, list(rows), made)
        self.ticks.append(tick)
        self._launched.append(launched)
        if self.clock is not None:
            self.launched_s.append(self.clock.now_s)
            launched.ends_s = self.clock.now_s + made.took_s
        return launched

    def collect(self, launched: _Launched) -> Made:
        assert self._launched.popleft() is launched, "ticks are collected in their order, once each"
        try:
            self._run(launched)
        finally:
            for work in launched.behind:
                work()
            if self.clock is not None:
                self.clock.now_s = max(self.clock.now_s, launched.ends_s)
        return launched.made

    def _do(self, work: Callable[[], object]) -> None:
        """Behind what was launched."""
        if self._launched:
            self._launched[-1].behind.append(work)
        else:
            work()

    def _run(self, launched: _Launched) -> None:
        tick = launched.tick
        for piece in tick.pieces:
            segment = self.segments[piece.slot]
            end = piece.start + piece.rows
            assert segment.state is None and piece.start >= segment.entered, "rows left out or entered twice"
            assert piece.start == segment.entered or not segment.entered, "only the prefix may be there already"
            for position in range(piece.start, end):
                self._cache[self._place(piece.slot, position)] = float(segment.rows[position].sum())
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
            held = [float(self._cache[self._place(slot, position)]) for position in range(len(segment.rows))]
            embeds = torch.tensor(held)[:, None]
            segment.state = self.backend.start(PromptRows(embeds), segment.sampling, segment.seed, 10**9)
        else:
            self._cache[self._place(slot, len(segment.rows) + segment.made)] = float(row.sum())
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

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        page = self._table[slot, position // self.pages.page_rows]
        assert page != NO_OWNER, f"slot {slot} has no page for position {position}"
        return page, position % self.pages.page_rows


# Fake ticks take next to no time, and a listener who falls behind because the machine is busy keeps no stream out.
PATIENT = AdmissionLimits(max_wait_s=60.0, max_waiting=1_000)


def fake_single(backend=None, codec=None, positions=10_000, prefix="", admission: Admission | None = None) -> Runner:
    """What makes a frame of one stream a tick. prefix: see FakePrompts."""
    return fake_batch(SingleLanes(backend or FakeBackend(), codec or FakeCodec(), positions), admission, prefix)


def fake_batch(lanes: FakeLanes | SingleLanes, admission: Admission | None = None, prefix: str = "") -> Runner:
    """What makes many streams together. prefix: see FakePrompts."""
    prompts = FakePrompts(prefix)
    return Runner(lanes, prompts, admission or Admission(PATIENT), open_prompt=prompts.open)


FAKE_ENGINES = ("single", "batch", "batch-ahead")  # the last one launches a tick before it reads the last


def fake_synthesizer(backend=None, codec=None, engine="single", prefix="", **of_the_lanes: Any) -> Synthesizer:
    """engine: one of FAKE_ENGINES, or "auto" for single and batch. prefix: see FakePrompts."""
    backend, codec, admission = backend or FakeBackend(), codec or FakeCodec(), Admission(PATIENT)
    lanes = FakeLanes(backend, codec, overlaps=engine == "batch-ahead", **of_the_lanes)
    batch = None if engine == "single" else fake_batch(lanes, admission, prefix)
    single = fake_single(backend, codec, 10_000, prefix, admission) if engine in ("single", "auto") else None
    return Synthesizer(Engine(single, batch, admission=admission), (single or batch).prompts)


def launched_ahead(synth: Synthesizer) -> int:
    """Frames of a stream that may be on their way while an earlier one is being made."""
    return int(synth.lanes is not None and synth.lanes.overlaps)


OFF = StreamOptions(guard=Guard.off(), schedule=SCHEDULE)
ONE = replace(OFF, schedule=(1,))


def speak(synth: Synthesizer, seed: int, frames: int | None = 6, options: StreamOptions = ONE) -> Stream:
    return synth.stream("Hello.", seed=seed, max_frames=frames, options=options)


def settle(synth: Synthesizer) -> None:
    """Returns once the worker has dealt with everything before, and sleeps."""
    stream = synth.stream("Settle.", seed=999, max_frames=1, options=ONE)
    assert len(list(stream)) == 1
    engine, until_s = synth.engine, time.monotonic() + WAIT_S
    while not (engine._worker.sleeps and engine._inbox.empty()):
        assert time.monotonic() < until_s, "the worker found no rest"
        time.sleep(1e-4)


def _rows(text: str) -> Tensor:
    return torch.tensor([[float(ord(char))] for char in text]).reshape(-1, 1)
