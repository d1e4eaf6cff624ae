"""What the CUDA driver is given for a launch, without one: a stand-in reads it as the driver would."""

from __future__ import annotations

import ctypes
import gc
import struct
from types import SimpleNamespace

import pytest
import torch
from driver_on_cpu import ELSEWHERE, HERE, kernel_without_a_card, launcher_without_a_card, put_stand_in

from mktts.errors import EngineError
from mktts.kernel import driver
from mktts.kernel.launch import _TAG_LIMIT, Params

STREAM = SimpleNamespace(cuda_stream=5)


def test_the_driver_reads_the_parameters_of_each_launch(monkeypatch):
    kernel, seen = kernel_without_a_card(), put_stand_in(monkeypatch).launched
    params = Params()
    for frames in (3, 8):
        params.frames, params.tag = frames, 17
        kernel.launch(params, STREAM)
        assert seen[-1] == ((128, 1, 1), (384, 1, 1), 200_000, 5, bytes(params))
    assert seen[0][-1] != seen[1][-1]


def test_a_launch_leaves_nothing_to_the_garbage_collector(monkeypatch):
    """ctypes makes an array type anew where nobody holds it, and only the collector frees a type."""
    kernel = kernel_without_a_card()
    put_stand_in(monkeypatch)
    params = Params()
    kernel.launch(params, STREAM)
    gc.collect()
    for _ in range(20):
        kernel.launch(params, STREAM)
    assert gc.collect() == 0


def test_a_refused_launch_is_told_in_the_drivers_words(monkeypatch):
    put_stand_in(monkeypatch, status=720)
    with pytest.raises(EngineError, match="cuLaunchCooperativeKernel failed: too many blocks"):
        kernel_without_a_card().launch(Params(), STREAM)


def test_an_early_launch_is_laid_out_as_in_cuda_h_and_asks_to_come_before_the_last_one_ends(monkeypatch):
    """CUlaunchConfig: seven unsigned int, the stream, attributes and their number; CUlaunchAttribute: its name, four
    bytes of padding, 64 bytes of value."""
    seen = []

    def launch(config, function, arguments, extra):
        *sizes, stream, attributes, count = struct.unpack("7I4xQQI", ctypes.string_at(ctypes.byref(config._obj), 52))
        seen.append((sizes, stream, count, struct.unpack("i4xi", ctypes.string_at(attributes, 12)), function.value))
        seen.append(ctypes.string_at(arguments[0], ctypes.sizeof(Params)))
        return status

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch, cuGetErrorString=print))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: STREAM)
    kernel, params, status = kernel_without_a_card(), Params(frames=3), 0
    kernel.launch_early((16, 4), 256, params)
    assert seen == [([16, 4, 1, 256, 1, 1, 0], 5, 1, (6, 1), 7), bytes(params)]
    status = 801
    with pytest.raises(EngineError, match="cuLaunchKernelEx failed: 801"):
        kernel.launch_early((16, 4), 256, params)


def test_launches_are_on_the_models_device_and_torchs_current_stream_of_it(monkeypatch):
    stand_in = put_stand_in(monkeypatch)
    launcher = launcher_without_a_card(monkeypatch)
    asked = []
    streams = SimpleNamespace(cuda_stream=11), SimpleNamespace(cuda_stream=12), SimpleNamespace(cuda_stream=13)
    turns = iter(streams)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: asked.append(index) or next(turns))
    for current in (ELSEWHERE, HERE, ELSEWHERE):
        stand_in.current = current
        done = launcher.launch(Params(), 1)
        assert stand_in.current == current
    assert stand_in.devices == [HERE] * 3 and asked == [launcher._exchange.device.index] * 3
    assert [launched[3] for launched in stand_in.launched] == [11, 12, 13] and done.recorded == [13]


def test_a_refused_launch_leaves_the_callers_device_current(monkeypatch):
    stand_in = put_stand_in(monkeypatch, status=720)
    launcher = launcher_without_a_card(monkeypatch)
    with pytest.raises(EngineError):
        launcher.launch(Params(), 1)
    assert stand_in.devices == [HERE] and stand_in.current == ELSEWHERE


def test_an_event_is_made_for_a_launch_or_used_again_where_the_caller_has_one(monkeypatch):
    put_stand_in(monkeypatch)
    launcher = launcher_without_a_card(monkeypatch)
    first = launcher.launch(Params(), 1)
    other = launcher.launch(Params(), 1)
    assert launcher.launch(Params(), 1, first) is first and other is not first
    assert (len(first.recorded), len(other.recorded)) == (2, 1)


def test_tags_go_on_from_launch_to_launch_and_begin_anew_over_a_cleared_exchange(monkeypatch):
    stand_in = put_stand_in(monkeypatch)
    launcher, params = launcher_without_a_card(monkeypatch), Params()
    launcher._exchange.fill_(9)
    tags = _TAG_LIMIT // 3 - 1
    for _ in range(3):
        launcher.launch(params, tags)
    assert [launched.tag for launched in stand_in.params] == [1, 1 + tags, 1 + 2 * tags]
    assert launcher._exchange.eq(9).all()
    launcher.launch(params, tags)
    assert stand_in.params[-1].tag == 1 and not launcher._exchange.any()


def test_parameters_that_were_another_launchers_get_this_ones_exchange_status_and_time(monkeypatch):
    stand_in, params = put_stand_in(monkeypatch), Params()
    launchers = [launcher_without_a_card(monkeypatch) for _ in range(2)]
    for nanoseconds, launcher in zip((3, 4, 5), (*launchers, launchers[0]), strict=True):
        monkeypatch.setattr("mktts.kernel.launch._TIMEOUT_NS", nanoseconds)
        launcher.launch(params, 1)
        seen = stand_in.params[-1]
        assert (seen.exchange, seen.status) == (launcher._exchange.data_ptr(), launcher._status.data_ptr())
        assert seen.timeout_ns == nanoseconds
