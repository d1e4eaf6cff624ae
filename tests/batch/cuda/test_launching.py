"""What is compiled before a first pass: every binary, once. Without triton."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from mktts.batch.cuda.kernels.launching import compiling, launch


class Asked:
    """A kernel that is to compile, and must not run. times: so often was it asked to."""

    times = 0

    def warmup(self, *_args: object, grid: tuple[int, ...], **_options: object) -> None:
        self.times += 1


@pytest.fixture
def without_triton(monkeypatch):
    mode = SimpleNamespace(AsyncCompileMode=lambda executor: contextlib.nullcontext())
    for name, module in (("triton", SimpleNamespace()), ("triton.runtime", SimpleNamespace(_async_compile=mode))):
        monkeypatch.setitem(sys.modules, name, module)


def test_a_binary_is_asked_for_once_however_many_buckets_and_layers_launch_it(without_triton):
    kernel, other, rows = Asked(), Asked(), torch.zeros(64)
    with compiling(1):
        for count in (48, 64, 1_024):
            for layer in (rows[:16], rows[16:32], torch.zeros(2, 2)):
                for each in (kernel, other):
                    launch(each, (count,), layer, 1e-6, count, None, N=16, SPLIT=True, num_warps=4)
    assert (kernel.times, other.times) == (1, 1)
    with compiling(1):  # another time, perhaps on another device
        launch(kernel, (1,), rows, 1e-6, 48, None, N=16, SPLIT=True, num_warps=4)
    assert kernel.times == 2


def test_whatever_triton_compiles_apart_is_asked_for_apart(without_triton):
    """Triton's rules: an argument's dtype, 16-byte alignment, 1, divisibility by 16, 64 bits, None, and constants."""
    kernel, rows = Asked(), torch.zeros(64)

    def described(dtype: torch.dtype, *block: int) -> SimpleNamespace:
        return SimpleNamespace(base=torch.zeros(16, dtype=dtype), block_shape=list(block), padding="zero")

    apart = [
        ((rows, 16), {"N": 16}),
        ((rows.half(), 16), {"N": 16}),
        ((rows[1:], 16), {"N": 16}),
        ((None, 16), {"N": 16}),
        ((described(torch.half, 16, 64), 16), {"N": 16}),
        ((described(torch.half, 16, 32), 16), {"N": 16}),
        ((described(torch.bfloat16, 16, 32), 16), {"N": 16}),
        ((rows, 17), {"N": 16}),
        ((rows, 1), {"N": 16}),
        ((rows, True), {"N": 16}),
        ((rows, 2**40), {"N": 16}),
        ((rows, 16), {"N": 32}),
        ((rows, 16), {"N": 1}),
        ((rows, 16), {"N": True}),
        ((rows, 16), {"N": 16, "num_warps": 8}),
    ]
    with compiling(1):
        for times, (args, options) in enumerate(apart, 1):
            for _ in range(2):
                launch(kernel, (1,), *args, **options)
            assert kernel.times == times, (args, options)
