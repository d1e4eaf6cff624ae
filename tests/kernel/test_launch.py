"""What the CUDA driver is given for a launch, as a stand-in reads it, and what a frame leaves behind for the next. Then
the frame kernel's own source, run on the CPU in grids that do not divide: codes and errors are the oracles'."""

import ctypes
import gc
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from csrc_on_cpu import COMPILER, RINGS, compiled
from other_cards import FORCED_FRAMES, Model, error_ratio

from mktts.errors import EngineError
from mktts.kernel import backend as backend_module
from mktts.kernel import grid, launch
from mktts.kernel.backend import Debug, MegakernelBackend, MegakernelStream
from mktts.kernel.build import source
from mktts.kernel.grid import MOST_ROWS, Shape, choose_shape
from mktts.kernel.launch import FRAME_WORDS, STATUS_WORDS, STOP, Launcher, Params, StreamParams
from mktts.kernel.tape import model_weights
from mktts.llm.backend import TextKernelBackend, TextKernelState
from mktts.measure.parity.kernel import Observed, vocabularies
from mktts.model.backend import PromptRows
from mktts.model.prompt import Prompt
from mktts.model.sampling import Choice, Sampling
from mktts.spec import NUM_CODEBOOKS, ModelConfig

HERE, ELSEWHERE = torch.device("cpu"), torch.device("meta")  # in the place of the model's GPU and of another
TAGS = 100  # a frame's
model_of = cache(lambda name: Model.make(name, "cpu", FORCED_FRAMES))


@dataclass
class StandIn:
    """The driver: notes (grid, block, shared bytes, stream, parameters' bytes) and writes what a kernel would."""

    status: int = 0
    makes: int | None = None  # frames that a launch makes; None: all that are asked for
    ends: bool = False  # whether speech ends after them
    current: torch.device = ELSEWHERE
    launched: list[tuple] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)  # the current one, a launch each

    @property
    def params(self) -> list[Params]:
        """What every launch was given, as it was then."""
        return [Params.from_buffer_copy(launched[-1]) for launched in self.launched]

    def cuLaunchCooperativeKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments):
        parameters = ctypes.string_at(arguments[0], ctypes.sizeof(Params))
        self.launched.append(((gx, gy, gz), (bx, by, bz), shared, stream.value, parameters))
        self.devices.append(self.current)
        params = Params.from_buffer_copy(parameters)
        if not self.status and not params.prefill and params.stream.out:
            self._make(params)
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"too many blocks"

    def _make(self, params: Params) -> None:
        made = params.frames if self.makes is None else self.makes
        words = (ctypes.c_int * (STATUS_WORDS + params.frames * FRAME_WORDS)).from_address(params.stream.out)
        for index in range(made):
            first = STATUS_WORDS + index * FRAME_WORDS
            words[first : first + 18] = [*range(params.stream.frame + index, params.stream.frame + index + 16), 2, 1]
        words[launch.MADE], words[launch.ENDED] = made, self.ends


class Event:
    """torch.cuda.Event as far as launches use it; what it waits for is always over."""

    def __init__(self) -> None:
        self.recorded, self.waits = [], 0

    def record(self, stream) -> None:
        self.recorded.append(stream.cuda_stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def driver(monkeypatch) -> StandIn:
    """In the place of the driver, and of what launching takes of torch.cuda."""
    stand_in = StandIn()
    monkeypatch.setattr(launch, "_driver", lambda: stand_in)
    monkeypatch.setattr("mktts.kernel.backend.pinned_words", lambda frames: torch.zeros(1_000, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "device", lambda device: patch.object(stand_in, "current", device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=5))
    return stand_in


@pytest.fixture
def launcher(monkeypatch, driver) -> Launcher:
    """128 blocks of 384 threads, 200 000 bytes shared."""
    constants = {"layer_exchanges": 5, "threads": 384, "shared_bytes": 200_000, "exchange_bytes": 256}
    monkeypatch.setattr(launch, "build_for", lambda *_: SimpleNamespace(image=b"", constants=constants))
    monkeypatch.setattr(launch.Kernel, "__init__", lambda kernel, image, name: setattr(kernel, "_function", None))
    monkeypatch.setattr(Launcher, "_check_residence", lambda launcher: None)
    return Launcher("frame.cu", "mktts_frames", {"CTAS": 128}, HERE, None)


def backend_of(
    config: ModelConfig, shape: Shape, launcher: Launcher, weights: dict[str, torch.Tensor], tags_per_frame: int
) -> MegakernelBackend:
    backend = object.__new__(MegakernelBackend)
    backend.config, backend.device, backend.dtype = config, HERE, torch.bfloat16
    backend._launcher, backend._tags_per_frame, backend.shape = launcher, tags_per_frame, shape
    backend._weights = weights
    backend._fixed = backend._fixed_params()
    return backend


@pytest.fixture
def backend(tiny, launcher) -> MegakernelBackend:
    return backend_of(tiny.config, choose_shape(tiny.config, 132), launcher, {"talker_tape": torch.zeros(8)}, TAGS)


def test_the_driver_reads_each_launchs_parameters_and_none_of_it_is_left_to_the_garbage_collector(driver, launcher):
    """ctypes makes an array type anew where nobody holds it, and only the collector frees a type."""
    params, seen = Params(), driver.launched
    for frames in (3, 8):
        params.frames = frames
        launcher.launch(params, 1)
        assert seen[-1] == ((128, 1, 1), (384, 1, 1), 200_000, 5, bytes(params))
    assert seen[0][-1] != seen[1][-1]
    gc.collect()
    for _ in range(20):
        launcher.launch(params, 1)
    assert gc.collect() == 0


def test_launches_are_on_the_models_device_and_torchs_stream_of_it_and_a_refused_one_is_told_in_the_drivers_words(
    driver, launcher, monkeypatch
):
    asked, streams = [], iter(SimpleNamespace(cuda_stream=number) for number in (11, 12, 13, 14))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: asked.append(index) or next(streams))
    for current in (ELSEWHERE, HERE, ELSEWHERE):
        driver.current = current
        done = launcher.launch(Params(), 1)
        assert driver.current == current
    assert driver.devices == [HERE] * 3 and asked == [launcher._exchange.device.index] * 3
    assert [launched[3] for launched in driver.launched] == [11, 12, 13] and done.recorded == [13]
    driver.status = 720
    with pytest.raises(EngineError, match="cuLaunchCooperativeKernel failed: too many blocks"):
        launcher.launch(Params(), 1)
    assert driver.current == ELSEWHERE


def test_tags_go_on_from_launch_to_launch_and_begin_anew_over_a_cleared_exchange(driver, launcher, monkeypatch):
    monkeypatch.setattr("mktts.kernel.launch._TIMEOUT_NS", 3)
    params, tags = (
        Params(exchange=1, status=1, timeout_ns=1),
        launch._TAG_LIMIT // 3 - 1,
    )  # as another launcher left them
    launcher._exchange.fill_(9)
    for _ in range(3):
        launcher.launch(params, tags)
    assert [launched.tag for launched in driver.params] == [1, 1 + tags, 1 + 2 * tags]
    assert launcher._exchange.eq(9).all()
    launcher.launch(params, tags)
    seen = driver.params[-1]
    assert seen.tag == 1 and not launcher._exchange.any()
    own = launcher._exchange.data_ptr(), launcher._status.data_ptr(), 3
    assert (seen.exchange, seen.status, seen.timeout_ns) == own


def stream(backend: MegakernelBackend, seed: int = 3, prompt_rows: int = 10) -> MegakernelStream:
    return backend._new_stream(Sampling(talker=Choice(top_k=4)), seed, prompt_rows, 100)


def row_of(backend: MegakernelBackend) -> torch.Tensor:
    return torch.zeros(backend.config.talker.hidden_size, dtype=torch.bfloat16)


def test_debug_pointers_and_prefill_are_those_of_their_own_launch_alone(backend, driver):
    state, row, debug = stream(backend), row_of(backend), Debug(torch.zeros(4), torch.zeros(4))
    backend.put_rows(state, torch.zeros(3, len(row)), 7)
    backend.step(state, None, debug)
    backend.step(state, row)
    backend.put_rows(state, row[None], 12)
    list(backend.frames(state, [row, row]))
    ours = debug.logits.data_ptr(), debug.hidden.data_ptr()
    seen = driver.params
    assert [(p.debug_logits, p.debug_hidden) for p in seen] == [(None, None), ours, *[(None, None)] * 3]
    expected = [(1, 3, 7), (0, 1, 9), (0, 1, 10), (1, 1, 12), (0, 2, 11)]
    assert [(p.prefill, p.frames, p.stream.position) for p in seen] == expected
    assert [p.stream.frame for p in seen] == [0, 0, 1, 2, 2] and seen[2].stream.rows == row.data_ptr()


def test_streams_that_take_turns_keep_their_own_parameters_and_their_own_events(backend, driver):
    seeds, row = (5 + (6 << 32), 7), row_of(backend)
    states = [stream(backend, seed, rows) for seed, rows in zip(seeds, (10, 20), strict=True)]
    put = backend.put_rows(states[0], row[None], 9)
    events = []
    for frame in range(3):
        for state in states:
            made = backend.step(state, row if frame else None)
            assert made.codes.tolist() == list(range(frame, frame + 16)) and made.codes.dtype == torch.int64
            assert (made.talker_ms >= 2e-6, made.predictor_ms) == (True, 1e-6)
            events.append(state.done)
    assert events == [state.done for state in states] * 3 and len({id(event) for event in (put, *events)}) == 3
    assert [len(event.recorded) for event in (put, *events[:2])] == [1, 3, 3]
    for turn, params in enumerate(driver.params[1:]):
        state, own = states[turn % 2], params.stream
        assert own.seed_lo + (own.seed_hi << 32) == seeds[turn % 2]
        assert (own.kv, own.seen, own.out) == (state.kv.data_ptr(), state.seen.data_ptr(), state.out.data_ptr())
        assert (own.hidden, own.sum, own.slots) == (state.hidden.data_ptr(), state.sum.data_ptr(), state.kv.shape[3])
        assert (own.frame, own.position) == (turn // 2, state.prompt_rows + turn // 2 - 1)
        assert (own.top_k0, own.top_k) == (4, Sampling().predictor.top_k)
        assert params.talker_tape == backend._weights["talker_tape"].data_ptr()
        assert params.ends[0] == backend.config.codec_ids.eos and params.min_frames == backend._fixed.min_frames
        assert params.tag == driver.params[0].tag + 5 * backend.config.talker.num_hidden_layers + turn * TAGS


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_launch_that_is_closed_is_stopped_and_waited_for_unless_it_is_over(backend, taken):
    """Once either way: the host waits for the last of a launch's frames, or else when it is closed."""
    state, row = stream(backend), row_of(backend)
    frames = backend.frames(state, [None, row, row])
    for _ in range(taken):
        next(frames)
    assert state.done.waits == (taken == 3)
    frames.close()
    assert (state.words[STOP], state.done.waits) == (taken < 3, 1)
    assert state.frames == 3 and not state.ended
    backend.step(state, row)
    assert (state.words[STOP], state.done.waits) == (0, 2)


def test_a_launch_whose_waiting_is_interrupted_is_stopped_and_waited_for(backend, monkeypatch):
    state, waits = stream(backend), []

    def interrupted(event) -> None:
        waits.append(event)
        if len(waits) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda.Event, "synchronize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.step(state, None)
    assert state.words[STOP] and waits == [state.done] * 2


def test_a_stream_that_speech_ended_and_one_that_failed_say_so(backend, driver):
    driver.makes, driver.ends = 1, True
    state, row = stream(backend), row_of(backend)
    assert [frame.codes is None for frame in backend.frames(state, [None, row, row])] == [False, True]
    assert state.ended and state.frames == 1
    driver.makes, driver.ends = 0, True
    assert backend.step(stream(backend), None).codes is None
    driver.makes, driver.ends = 0, False
    state = stream(backend)
    with pytest.raises(EngineError, match="the kernel stopped"):
        backend.step(state, None)
    assert state.ended and state.frames == 0


def test_a_texts_launches_go_on_by_a_token_and_its_debug_memory_is_that_of_its_own_launch_alone(driver, launcher):
    backend = object.__new__(TextKernelBackend)
    backend._launcher, backend._tags_per_token = launcher, TAGS
    kv, out = torch.zeros(2, 2, 2, 4, 2, 8), torch.zeros(STATUS_WORDS + FRAME_WORDS, dtype=torch.int32)
    state = TextKernelState(
        kv, torch.zeros(8), out, launch.params_of(Params(frames=1), 5, kv, out=out), prompt_tokens=10
    )
    debug = torch.zeros(8, dtype=torch.bfloat16)
    assert [backend.step(state, asked) for asked in (None, debug, None)] == [0, 1, 2]
    seen = [(p.debug_logits, p.tag, p.stream.frame, p.stream.position, p.stream.token) for p in driver.params]
    assert seen == [(None, 1, 0, 9, 0), (debug.data_ptr(), 1 + TAGS, 1, 10, 0), (None, 1 + 2 * TAGS, 2, 11, 1)]
    assert len(state.done.recorded) == 3


@pytest.mark.parametrize(("name", "structure"), [("Params", Params), ("Stream", StreamParams)])
def test_launch_parameters_stand_in_the_order_of_the_kernels_struct(name, structure):
    struct = re.search(rf"struct {name} \{{(.*?)\n\}};", source(), re.DOTALL)[1]
    declared = re.findall(r"(\w+)(?:\[\w+\])?\s*(?=[,;])", re.sub(r"//.*", "", struct))
    assert [field for field, _ in structure._fields_] == declared


# ---- the frame kernel's source, on the CPU


def on_a_cpu(test: Callable) -> Callable:
    return pytest.mark.slow(pytest.mark.skipif(COMPILER is None, reason="needs g++")(test))


def build(shape: Shape, folder: Path, most_rows: int = MOST_ROWS, ring: int = 4, talker_copies: int = 1) -> ctypes.CDLL:
    """Compiles so that a small shape meets what a large one has: `most_rows` that a block multiplies at once, with
    fewer of which small shares come in several matrices; stages of the ring; copies at once before they bound them."""
    changes = [
        (r"Talker::LAYER_BYTES \* CTAS > 50 << 20 \? 2 : 1", str(talker_copies)),
        (r"MOST_NAPS = 1 << 23", "MOST_NAPS = 1 << 10"),
        (r"extern __shared__ .* dynamic\[\];", "u8* dynamic = now->block->shared.data();"),
        (r'(#define EXPORT\(.*\) extern "C") __device__', r"\1"),
    ]
    return compiled("frame.cu", "launch.h", folder, most_rows, changes, {**shape.defines, "RING": ring})


def run(library: ctypes.CDLL, params: Params, seed: int) -> None:
    """Fails with what the kernel's watchdog left, or where a loop that it does not reach did not end."""
    library.host_launch.restype = ctypes.c_char_p
    why = library.host_launch(ctypes.byref(params), ctypes.c_ulonglong(seed))
    error, block, thread, wait, _ = (ctypes.c_int * 5).from_address(params.status)
    named = f"block {block}, thread {thread} waited too long for {launch.WAITS.get(wait, wait)}" if error else ""
    assert not (why or error), "; ".join(filter(None, (named, why and why.decode())))


@pytest.fixture
def on_cpu(driver, launcher, monkeypatch, tmp_path) -> Callable[..., MegakernelBackend]:
    """A backend whose launches run to their end on the CPU, in an order of chance, all rows of a prompt one by one."""

    def make(name: str, group: int, **changed: int) -> MegakernelBackend:
        """group: blocks of one. changed: as of `build`."""
        model, seeds = model_of(name), itertools.count(group)
        talker = model.config.talker
        shape = Shape(talker, model.config.predictor, group * talker.num_key_value_heads)
        library = launcher.library = build(shape, tmp_path, **changed)
        driver.cuLaunchCooperativeKernel = lambda *given: run(library, Params.from_address(given[-1][0]), next(seeds))
        monkeypatch.setattr(launch, "_TIMEOUT_NS", 10**6)  # the clock here counts turns of warps
        monkeypatch.setattr(backend_module, "_KERNEL_ROWS", 10**6)
        launcher.layer_exchanges = ctypes.c_uint32.in_dll(library, "mktts_layer_exchanges").value
        words = torch.zeros(library.host_exchange_bytes() // 4 + 32, dtype=torch.int32)
        launcher._exchange = words[-words.data_ptr() % 128 // 4 :]
        weights = model_weights(shape, lambda name: model.tensors[name].bfloat16())
        return backend_of(model.config, shape, launcher, weights, tags_per_frame=1_000)

    return make


def observed(backend: MegakernelBackend, prompt: Prompt, frames: int = FORCED_FRAMES) -> list[Observed]:
    """The first frames, greedy, of one launch."""
    talker, sizes = backend.config.talker, vocabularies(backend.config)
    state = backend.start(PromptRows(prompt.embeds), Sampling().greedy(), 0, frames)
    logits = torch.zeros(frames, NUM_CODEBOOKS, talker.vocab_size, dtype=torch.bfloat16)
    hidden = torch.zeros(frames, talker.num_hidden_layers, talker.hidden_size, dtype=torch.bfloat16)
    rows = [None, *(prompt.row(index) for index in range(frames - 1))]
    made = list(backend.frames(state, rows, Debug(logits, hidden)))
    heads = [[head[:size].float() for head, size in zip(frame, sizes, strict=True)] for frame in logits]
    return [Observed(frame.codes, heads[i], hidden[i].float() if i else None) for i, frame in enumerate(made)]


# Blocks of a group; rows that come at once. A share in several matrices; a remainder.
@on_a_cpu
@pytest.mark.parametrize(("name", "group", "most_rows"), [("small", 3, 32), ("tiny-projected", 7, 128)])
def test_blocks_in_an_order_of_chance_make_the_oracles_frames(name, group, most_rows, monkeypatch, on_cpu):
    monkeypatch.setattr(grid, "MOST_ROWS", most_rows)
    model = model_of(name)
    found = observed(on_cpu(name, group, most_rows=most_rows), model.prompt)
    assert torch.equal(torch.stack([frame.codes for frame in found]), model.codes[:FORCED_FRAMES])
    assert error_ratio(model, found) <= 1.25


@on_a_cpu
@pytest.mark.parametrize(("ring", "talker_copies", "group"), RINGS)
def test_every_cards_ring_takes_the_copies_of_every_size(ring, talker_copies, group, on_cpu):
    model = model_of("tiny-projected")
    backend = on_cpu("tiny-projected", group, ring=ring, talker_copies=talker_copies)
    (found,) = observed(backend, model.prompt, frames=1)
    assert torch.equal(found.codes, model.codes[0])


@on_a_cpu
def test_a_copy_that_never_ends_ends_the_launch_by_name(on_cpu):
    backend = on_cpu("tiny-projected", 6, ring=2)
    backend._launcher.library.host_lose_copy(ctypes.c_ulonglong(1000))
    with pytest.raises(AssertionError, match="thread 2.. waited too long for the end of an earlier copy"):
        observed(backend, model_of("tiny-projected").prompt, frames=1)


@on_a_cpu
@pytest.mark.parametrize(("tape", "at"), [("talker_head_tape", slice(None)), ("predictor_head_tape", 14)])
def test_logits_of_no_numbers_end_their_stream_by_name(tape, at, on_cpu):
    backend = on_cpu("tiny-projected", 6)
    backend._weights[tape][at] = torch.nan
    with pytest.raises(EngineError, match="gave no number"):
        observed(backend, model_of("tiny-projected").prompt, frames=1)
