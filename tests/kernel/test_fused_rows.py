"""Prompt rows by kernels between products: against operators, against their stand-ins, and where they do not fit.

With TRITON_INTERPRET=1 the kernels themselves run on the CPU, for a minute.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import row_stand_ins
import torch
from seeded import SMALL, prompt, stack
from torch import Tensor

import mktts.kernel
from mktts.kernel.prefill import FusedRows, Prefill, row_kernels
from mktts.model.qwen3 import Qwen3Stack
from mktts.spec import StackConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of the root mean square: a few roundings a layer differ where sums are ordered otherwise.
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}  # fp16: 2.2e-3 seen on an H200
WIDE = replace(SMALL, hidden_size=64)  # of widths that the kernels take
MHA = replace(WIDE, num_attention_heads=3, num_key_value_heads=3, head_dim=32)
MANY = replace(WIDE, num_attention_heads=8, num_key_value_heads=8, head_dim=8, intermediate_size=1_100)


class OneRoom(Qwen3Stack):
    """Its layers' matrices overwrite each other, as those of a TapeStack."""

    room: dict[str, Tensor] | None = None

    def layer_weights(self, index):
        w = super().layer_weights(index)
        matrices = {name: getattr(w, name) for name in ("qkv", "o", "gate_up", "down")}
        if self.room is None:
            self.room = {name: matrix.clone() for name, matrix in matrices.items()}
        for name, matrix in matrices.items():
            self.room[name].copy_(matrix)
        return replace(w, **self.room)


def fused_and_plain(config: StackConfig, dtype: torch.dtype, kernels, device: str = "cpu") -> tuple[Prefill, Prefill]:
    fused, plain = (
        Prefill(of, capacity=512, buckets=(4, 16, 64), graphs=False)
        for of in (stack(dtype, config, device, OneRoom), stack(dtype, config, device))
    )
    fused._fused = FusedRows(fused.stack, fused._rotary, kernels)
    return fused, plain


def results(prefill: Prefill, x: Tensor) -> tuple[Tensor, ...]:
    """Of rows in two pieces, behind an earlier prompt that left nothing of use."""
    prefill.run(torch.full_like(x, torch.nan))
    prefill.run(x[:9])
    return prefill.run(x[9:], 9), prefill.keys, prefill.values


def error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest of root mean squares, as a part of what was expected."""
    assert [f.shape for f in found] == [e.shape for e in expected]
    pairs = zip(found, expected, strict=True)
    return max(float((f.double() - e.double()).norm() / e.double().norm()) for f, e in pairs)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("config", [WIDE, MHA, MANY], ids=["gqa", "mha", "many"])
def test_rows_between_kernels_are_those_of_the_operators(config, dtype):
    fused, plain = fused_and_plain(config, dtype, row_stand_ins)
    for rows in (10, 40, 150):
        x = prompt(rows, dtype=dtype, width=64)
        assert error(results(fused, x), results(plain, x)) < LIMITS[dtype]


@pytest.mark.parametrize(
    "change, device, dtype",
    [
        ({}, "cpu", torch.float32),
        ({}, "meta", torch.float32),
        ({}, "cuda", torch.float64),
        ({"hidden_size": 48}, "cuda", torch.bfloat16),
        ({"head_dim": 48}, "cuda", torch.bfloat16),
    ],
)
def test_what_the_kernels_do_not_take_goes_through_operators(change, device, dtype, caplog):
    assert row_kernels(replace(WIDE, **change), torch.device(device), dtype) is None and not caplog.records


@pytest.mark.parametrize("what", ["missing", "no compiler"])
def test_without_triton_or_what_it_needs_prompts_go_through_operators_with_a_warning(what, monkeypatch, caplog):
    if what == "missing":
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "mktts.kernel.rows", raising=False)
        monkeypatch.delattr(mktts.kernel, "rows", raising=False)
    else:  # on a machine without CUDA it fails a line earlier
        monkeypatch.setattr(mktts.kernel, "rows", SimpleNamespace(silu_mul={}), raising=False)
    assert row_kernels(WIDE, torch.device("cuda"), torch.bfloat16) is None
    (record,) = caplog.records
    said = "need triton" if what == "missing" else "cannot build"
    assert "prompt rows take plain operators" in record.getMessage() and said in record.getMessage()


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("config", [WIDE, MHA, MANY], ids=["gqa", "mha", "many"])
def test_the_kernels_give_what_their_stand_ins_give(config, dtype):
    from mktts.kernel import rows as kernels

    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("triton's interpreter cuts to bfloat16, it does not round")
    device = "cpu" if INTERPRETED else "cuda"
    x = prompt(40, dtype=dtype, width=64).to(device)
    ours, theirs = (fused_and_plain(config, dtype, of, device)[0] for of in (kernels, row_stand_ins))
    assert error(results(ours, x), results(theirs, x)) < LIMITS[dtype]
