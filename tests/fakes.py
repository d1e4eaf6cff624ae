"""Stand-ins for the model's parts: every step is counted, can be held up, and gives codes that can be told apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from fake_lanes import FakeLanes
from torch import Tensor

from mktts.batch.admission import AdmissionSettings
from mktts.batch.executor import Together
from mktts.batch.model import LaneModel
from mktts.codec.decoder import PendingPcm
from mktts.errors import PromptError
from mktts.model.backend import Frame, PromptRows
from mktts.model.prompt import Request
from mktts.spec import CODEBOOK_SIZE, MODEL_TYPES, NUM_CODEBOOKS, SAMPLES_PER_FRAME
from mktts.speech.guard import Guard
from mktts.speech.options import SCHEDULE, StreamOptions
from mktts.speech.stream import Stream
from mktts.synth import Synthesizer
from mktts.synth.one_by_one import StepModel

WAIT_S = 60.0  # before a test that hangs fails
_OF_BOOKS = 17 * torch.arange(NUM_CODEBOOKS)
_SLIDE = torch.linspace(0, 1, SAMPLES_PER_FRAME + 1, dtype=torch.float64)[1:]


class FakeState(SimpleNamespace):
    """Like a key-value cache: what must be free once a stream is gone (can be weakly referenced)."""


@dataclass
class FakeBackend:
    """Codes follow from the seed, the prompt, the text rows and the frame index.

    eos_after: frames a segment has. fail_at: the frame at which the segment whose seed is `failing_seed` fails.
    code0: makes code 0 of a frame index. held: `step` waits for a permit of `let`.
    """

    eos_after: int | None = None
    fail_at: int | None = None
    failing_seed: int | None = None
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
            assert self._changed.wait_for(lambda: self.entered >= steps, WAIT_S), (
                f"{self.entered} steps after {WAIT_S} s"
            )

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
        if self.fail_at == state.frames and self.failing_seed in (None, state.seed):
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
class FakeCodecState:
    level: float = 0.0
    frames: int = 0

    def copy(self) -> FakeCodecState:
        return replace(self)


@dataclass
class FakeCodec:
    """Slides from where the last frame ended to a level that the frame's codes set: restarting it would be a jump.

    silent_frames: so many at the start are silence.
    """

    silent_frames: int = 0
    starts: int = 0
    decoded: list[int] = field(default_factory=list)  # frames of each call

    def start(self) -> FakeCodecState:
        self.starts += 1
        return FakeCodecState()

    def decode(self, codes: Tensor, state: FakeCodecState) -> Tensor:
        self.decoded.append(len(codes))
        pieces = []
        for frame in codes.tolist():
            level = 0.0 if state.frames < self.silent_frames else 0.2 + 0.7 * (sum(frame) % 97) / 97
            pieces.append(state.level + (level - state.level) * _SLIDE)
            state.level = level
            state.frames += 1
        return torch.cat(pieces).float()

    def submit(self, codes: Tensor, state: FakeCodecState) -> PendingPcm:
        return PendingPcm(self.decode(codes, state))


class FakeFedPrompt:
    """A character is a token."""

    prefix_rows, prefix_key = 0, None

    def __init__(self) -> None:
        self.text = ""
        self.text_ended = False

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
    """Knows the speaker "vivian" and the language "english".

    prefix: of every known text's prompt, a character a row; lanes may keep it.
    """

    prefix: str = ""
    built: list[str] = field(default_factory=list)
    opened: list[FakeFedPrompt] = field(default_factory=list)
    config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(type=MODEL_TYPES["custom_voice"], speakers={"vivian": 1})
    )

    def check(self, request: Request) -> Request:
        if request.speaker not in (None, "vivian"):
            raise PromptError(f"speaker must be 'vivian', got {request.speaker!r}")
        if request.language not in ("auto", "english"):
            raise PromptError(f"language must be 'english', got {request.language!r}")
        return request

    def of_checked(self, request: Request) -> SimpleNamespace:
        self.built.append(request.text)
        return SimpleNamespace(
            embeds=_rows(self.prefix + request.text),
            row=lambda frame: torch.zeros(1),
            text_tokens=len(request.text),
            text_ended=True,
            prefix_rows=len(self.prefix),
            prefix_key=self.prefix or None,
        )

    def open(self, request: Request) -> FakeFedPrompt:
        self.opened.append(FakeFedPrompt())
        self.opened[-1].push(request.text)
        return self.opened[-1]


def fake_model(
    backend: FakeBackend | None = None, codec: FakeCodec | None = None, positions: int = 10_000, prefix: str = ""
) -> StepModel:
    return StepModel(
        prompts=FakePrompts(prefix),
        positions=positions,
        fed_prompt=FakePrompts.open,
        backend=backend or FakeBackend(),
        codec=codec or FakeCodec(),
    )


# Fake ticks take next to no time, and a listener who falls behind because the machine is busy keeps nobody out.
ROOMY = AdmissionSettings(margin=1.0, lead_s=0.0, first_pcm_s=60.0)


def fake_together(lanes: FakeLanes, admission: AdmissionSettings | None = None, prefix: str = "") -> Together:
    """prefix: see FakePrompts."""
    model = LaneModel(
        prompts=FakePrompts(prefix), positions=lanes.pages.rows_per_slot, fed_prompt=FakePrompts.open, lanes=lanes
    )
    return Together(model, admission or ROOMY)


FAKE_ENGINES = ("single", "batch", "batch-ahead")  # the last one launches a tick before it reads the last


def fake_synthesizer(
    backend: FakeBackend | None = None,
    codec: FakeCodec | None = None,
    engine: str = "single",
    prefix: str = "",
    **of_the_lanes: Any,
) -> Synthesizer:
    """engine: one of FAKE_ENGINES, or "auto" for single and batch. prefix: see FakePrompts."""
    backend, codec = backend or FakeBackend(), codec or FakeCodec()
    single = fake_model(backend, codec, prefix=prefix) if engine in ("single", "auto") else None
    if engine == "single":
        return Synthesizer(single)
    lanes = FakeLanes(backend, codec, overlaps=engine == "batch-ahead", **of_the_lanes)
    return Synthesizer(single, together=fake_together(lanes, prefix=prefix))


def launched_ahead(synth: Synthesizer) -> int:
    """Frames of a stream that may be on their way while an earlier one is being made."""
    lanes = getattr(synth._models.any(), "lanes", None)
    return int(lanes is not None and lanes.overlaps)


OFF = StreamOptions(guard=Guard.off(), schedule=SCHEDULE)
ONE = replace(OFF, schedule=(1,))


def speak(synth: Synthesizer, seed: int, frames: int | None = 6, options: StreamOptions = ONE) -> Stream:
    return synth.stream("Hello.", seed=seed, max_frames=frames, options=options)


def settle(synth: Synthesizer) -> None:
    """Returns once the worker has dealt with everything before, and sleeps."""
    stream = synth.stream("Settle.", seed=999, max_frames=1, options=ONE)
    assert len(list(stream)) == 1
    engine, until_s = synth._engine, time.monotonic() + WAIT_S
    while not (engine._worker.sleeps and engine._inbox.empty()):
        assert time.monotonic() < until_s, "the worker found no rest"
        time.sleep(1e-4)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(WAIT_S)
    assert not thread.is_alive()


def _rows(text: str) -> Tensor:
    return torch.tensor([[float(ord(char))] for char in text]).reshape(-1, 1)
