"""What the CUDA driver is given for a launch, without one, and what one frame's hand-over leaves behind for the next: a
stand-in reads a launch as the driver would. Parameters and events are held by their stream."""

import ctypes
import gc
import re
import struct
from types import SimpleNamespace

import pytest
import torch
from driver_on_cpu import (
    ELSEWHERE,
    FUNCTION,
    HERE,
    StandIn,
    backend_without_a_card,
    launcher_without_a_card,
    put_stand_in,
)

from mktts.errors import BackendUnavailable, EngineError
from mktts.kernel.backend import Debug, MegakernelBackend, MegakernelStream
from mktts.kernel.build import source
from mktts.kernel.grid import choose_shape
from mktts.kernel.launch import (
    _TAG_LIMIT,
    FRAME_WORDS,
    STATUS_WORDS,
    STOP,
    Kernel,
    Launcher,
    Params,
    StreamParams,
    params_of,
)
from mktts.llm.backend import TextKernelBackend, TextKernelState
from mktts.model.sampling import Choice, Sampling


@pytest.fixture
def driver(monkeypatch) -> StandIn:
    return put_stand_in(monkeypatch)


@pytest.fixture
def launcher(monkeypatch, driver) -> Launcher:
    return launcher_without_a_card(monkeypatch)


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


def test_an_early_launch_is_laid_out_as_in_cuda_h_and_asks_to_come_before_the_last_one_ends(monkeypatch):
    """CUlaunchConfig: seven unsigned int, the stream, attributes and their number; CUlaunchAttribute: its name, four
    bytes of padding, 64 bytes of value."""
    seen = []

    def launch(config, function, arguments, extra):
        *sizes, stream, attributes, count = struct.unpack("7I4xQQI", ctypes.string_at(ctypes.byref(config._obj), 52))
        seen.append((sizes, stream, count, struct.unpack("i4xi", ctypes.string_at(attributes, 12)), function.value))
        seen.append(ctypes.string_at(arguments[0], ctypes.sizeof(Params)))
        return status

    monkeypatch.setattr(
        "mktts.kernel.launch._driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch, cuGetErrorString=print)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    kernel, params, status = Kernel.__new__(Kernel), Params(frames=3), 0
    kernel._function = FUNCTION
    for early in (True, False):
        kernel.launch_grid((16, 4), 256, params, early)
        assert seen[-2:] == [([16, 4, 1, 256, 1, 1, 0], 5, early, (6, 1), 7), bytes(params)]
    status = 801
    with pytest.raises(EngineError, match="cuLaunchKernelEx failed: 801"):
        kernel.launch_grid((16, 4), 256, params)


def test_launches_are_on_the_models_device_and_torchs_current_stream_of_it(driver, launcher, monkeypatch):
    asked, streams = [], iter(SimpleNamespace(cuda_stream=number) for number in (11, 12, 13))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: asked.append(index) or next(streams))
    for current in (ELSEWHERE, HERE, ELSEWHERE):
        driver.current = current
        done = launcher.launch(Params(), 1)
        assert driver.current == current
    assert driver.devices == [HERE] * 3 and asked == [launcher._exchange.device.index] * 3
    assert [launched[3] for launched in driver.launched] == [11, 12, 13] and done.recorded == [13]


def test_a_refused_launch_is_told_in_the_drivers_words_and_leaves_the_callers_device_current(driver, launcher):
    driver.status = 720
    with pytest.raises(EngineError, match="cuLaunchCooperativeKernel failed: too many blocks"):
        launcher.launch(Params(), 1)
    assert driver.devices == [HERE] and driver.current == ELSEWHERE


def test_tags_go_on_from_launch_to_launch_and_begin_anew_over_a_cleared_exchange(driver, launcher, monkeypatch):
    monkeypatch.setattr("mktts.kernel.launch._TIMEOUT_NS", 3)
    params, tags = Params(exchange=1, status=1, timeout_ns=1), _TAG_LIMIT // 3 - 1  # as another launcher left them
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


TAGS = 100  # a frame's


@pytest.fixture
def backend(tiny, launcher) -> MegakernelBackend:
    shape, weights = choose_shape(tiny.config, 132), {"talker_tape": torch.zeros(8)}
    return backend_without_a_card(tiny.config, shape, launcher, weights, TAGS)


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
    assert [(p.prefill, p.frames, p.stream.position) for p in seen] == [
        (1, 3, 7),
        (0, 1, 9),
        (0, 1, 10),
        (1, 1, 12),
        (0, 2, 11),
    ]
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


def test_debug_memory_of_a_text_is_that_of_its_own_launch_alone(driver, launcher):
    backend = object.__new__(TextKernelBackend)
    backend._fixed, backend._tags_per_token = Params(frames=1), TAGS
    backend._launcher = launcher
    backend._fixed.embeddings0 = torch.zeros(8).data_ptr()
    kv, out = torch.zeros(2, 2, 2, 4, 2, 8), torch.zeros(STATUS_WORDS + FRAME_WORDS, dtype=torch.int32)
    params = params_of(backend._fixed, 5, kv, out=out)
    state = TextKernelState(kv, torch.zeros(8), out, params, prompt_tokens=10)
    debug = torch.zeros(8, dtype=torch.bfloat16)
    for before, asked in enumerate((None, debug, None)):
        assert backend.step(state, asked) == before
        params, own = driver.params[-1], driver.params[-1].stream
        assert params.debug_logits == (None if asked is None else debug.data_ptr())
        assert (own.slots, own.seed_lo, own.out) == (4, 5, state.out.data_ptr())
        assert (own.frame, own.position, own.token) == (before, 9 + before, max(0, before - 1))
        assert (params.frames, params.tag, params.embeddings0) == (1, 1 + before * TAGS, backend._fixed.embeddings0)
    assert len(state.done.recorded) == 3


def test_without_a_device_it_says_so(tiny):
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        MegakernelBackend(tiny.config, tiny.tensors(), "cpu")


@pytest.mark.parametrize(("name", "structure"), [("Params", Params), ("Stream", StreamParams)])
def test_launch_parameters_stand_in_the_order_of_the_kernels_struct(name, structure):
    struct = re.search(rf"struct {name} \{{(.*?)\n\}};", source(), re.DOTALL)[1]
    declared = re.findall(r"(\w+)(?:\[\w+\])?\s*(?=[,;])", re.sub(r"//.*", "", struct))
    assert [field for field, _ in structure._fields_] == declared
