"""Prefill in padded pieces against the oracle's one pass, by operators and by kernels between products; its keys and
values in the frame kernel's layout. With TRITON_INTERPRET=1 the kernels run on the CPU, for a minute."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from seeded import SMALL, close, in_two_pieces, prompt, rms_error, stack
from torch import Tensor

import mktts.kernel
from mktts.kernel.prefill import Prefill, copy_into_cache, kept_of_cache, row_kernels
from mktts.measure.inspection import config_at
from mktts.model.qwen3 import Qwen3Stack

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of the root mean square: a few roundings a layer differ where sums are ordered otherwise.
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}  # fp16: 2.2e-3 seen on an H200
WIDE = replace(SMALL, hidden_size=64)  # of widths that the kernels take
MHA = replace(WIDE, num_attention_heads=3, num_key_value_heads=3, head_dim=32)
MANY = replace(WIDE, num_attention_heads=8, num_key_value_heads=8, head_dim=8, intermediate_size=1_100)


def small(dtype: torch.dtype = torch.float32) -> Prefill:
    return Prefill(stack(dtype))


@torch.inference_mode()
def oracle(rows: Tensor, of: Qwen3Stack) -> tuple[Tensor, Tensor]:
    """Hidden state of the last row; keys and values."""
    cache = of.new_cache(len(rows))
    hidden = of.advance(rows, [cache], [len(rows)])[-1]
    return hidden, cache.memory[:, :, 0].transpose(0, 1)


LENGTHS = (1, 2, 16, 17, 64, 65, 127, 129, 256, 300, 512, 513, 1024)


@pytest.mark.parametrize(
    ("past", "rows"),
    [*((0, rows) for rows in LENGTHS), *((past, rows) for past in (1, 9, 63, 64, 130) for rows in (1, 2, 70))],
)
def test_a_prompt_of_any_length_and_one_in_two_pieces_give_the_oracles_single_pass(past, rows):
    prefill, x = small(), prompt(past + rows)
    if past:
        prefill.run(x[:past])
    hidden = prefill.run(x[past:], past)
    assert close((hidden, prefill.keys_values), oracle(x, stack())) and prefill.length == past + rows


def test_in_bf16_it_is_no_further_from_fp64_than_the_oracle():
    errors = []
    for rows in (12, 40, 90):
        x = prompt(rows, dtype=torch.bfloat16)
        exact = oracle(x.double(), stack(torch.float64))
        prefill = small(torch.bfloat16)
        ours = (prefill.run(x), prefill.keys_values)
        theirs = oracle(x, stack(torch.bfloat16))
        errors.append(
            [[(a.double() - e).square().mean() for a, e in zip(f, exact, strict=True)] for f in (ours, theirs)]
        )
    ours, theirs = torch.tensor(errors).mean(0).sqrt()
    assert theirs.min() > 1e-4 and (ours <= 1.1 * theirs).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [1, 2, 25, 200])
def test_a_restored_prefix_gives_the_bits_of_one_just_made_whatever_was_prefilled_before(dtype, rest):
    # oneDNN with AMX multiplies what lies behind a row of 80 by zero, so that NaN of padding reaches its result
    before = torch.full((333, SMALL.hidden_size), torch.nan if dtype == torch.float32 else 1e4, dtype=dtype)
    x, prefill = prompt(9 + rest, dtype=dtype), small(dtype)
    prefill.run(x[:9])
    kept = prefill.keys_values.clone()
    expected = (prefill.run(x[9:], 9), prefill.keys_values.clone())
    prefill.run(before)
    assert expected[0].isfinite().all()  # a result is the caller's
    prefill._kv[:, :, :, :9].copy_(kept)
    found = (prefill.run(x[9:], 9), prefill.keys_values)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    prefill.run(before)
    assert torch.equal(prefill.run(x), small(dtype).run(x))


def test_warm_up_makes_every_pass_that_a_prompt_needs():
    prefill = small()
    assert prefill.length == 0
    made = set(prefill._passes)
    for past in (0, 1, 63, 64, 112, 127, 128, 129, 300, 511, 512, 1023):
        for rows in (1, 16, 17, 63, 64, 65, 128, 129, 200, 512, 1024):
            if past + rows <= 1024:
                prefill.run(prompt(rows), past)
    assert set(prefill._passes) == made


def test_a_fused_stack_shares_its_weights_and_gives_the_same_results():
    plain, fused = stack(), stack()
    layers = [fused.layer_weights(index) for index in range(len(fused.layers))]
    assert all(fused.layer_weights(index) is layer for index, layer in enumerate(layers))
    for w, old in zip(fused.layers, plain.layers, strict=True):
        assert w.q.data_ptr() == w.qkv.data_ptr() and w.gate.data_ptr() == w.gate_up.data_ptr()
        assert w.v.untyped_storage().data_ptr() == w.qkv.untyped_storage().data_ptr()
        assert all(torch.equal(getattr(w, name), getattr(old, name)) for name in ("q", "k", "v", "gate", "up"))
    assert close(oracle(prompt(20), fused), oracle(prompt(20), plain))


@pytest.mark.parametrize("count", [1, 3, 4, 10, 19, 20, 0])
def test_dealt_positions_lie_where_the_kernel_looks_for_them(count):
    layers, heads, group, slots, head_dim = 2, 3, 4, 5, 8
    kv = torch.full((layers, heads, group, slots, 2, head_dim), -1.0)
    keys, values = torch.rand(2, layers, heads, count, head_dim)
    copy_into_cache(torch.stack((keys, values)), kv)
    assert torch.equal(kept_of_cache(kv, count), torch.stack((keys, values)))
    for position in range(group * slots):
        found = kv[:, :, position % group, position // group]
        if position < count:
            assert torch.equal(found[:, :, 0], keys[:, :, position])
            assert torch.equal(found[:, :, 1], values[:, :, position])
        else:
            assert (found == -1).all()


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


@pytest.mark.parametrize("missing", [True, False], ids=["triton", "compiler"])
def test_without_triton_or_what_it_needs_prompts_go_through_operators_with_a_warning(missing, monkeypatch, caplog):
    if missing:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "mktts.kernel.rows", raising=False)
        monkeypatch.delattr(mktts.kernel, "rows", raising=False)
    else:  # on a machine without CUDA it fails a line earlier
        monkeypatch.setattr(mktts.kernel, "rows", SimpleNamespace(silu_mul={}), raising=False)
    assert row_kernels(WIDE, torch.device("cuda"), torch.bfloat16) is None
    (record,) = caplog.records
    assert "prompt rows take plain operators: prefill needs triton" in record.getMessage()


def released(dtype: torch.dtype = torch.bfloat16) -> Prefill:
    config = replace(config_at("0.6b").talker, num_hidden_layers=4)
    return Prefill(stack(dtype, config, "cuda"))


def on_gpu(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return prompt(rows, dtype=dtype, width=config_at("0.6b").talker.hidden_size).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [10, 70, 300])
def test_in_bf16_on_a_gpu_it_is_no_further_from_fp32_than_the_oracle(rows):
    x, prefill, exact = on_gpu(rows), released(), released(torch.float32).stack
    expected = oracle(x.float(), exact)
    ours = (prefill.run(x), prefill.keys_values)
    theirs = oracle(x, prefill.stack)
    for place in (0, 1):  # keys, values: many numbers, so the figures are steady
        errors = [(found[1][place].float() - expected[1][place]).square().mean().sqrt() for found in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("config", [WIDE, MHA, MANY], ids=["gqa", "mha", "many"])
def test_the_kernels_give_what_operators_give(config, dtype):
    from mktts.kernel import rows as kernels

    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("triton's interpreter cuts to bfloat16, it does not round")
    device, found = "cpu" if INTERPRETED else "cuda", []
    for used in (kernels, None):
        prefill = Prefill(stack(dtype, config, device))
        prefill._kernels, prefill.graphs = used, False
        prefill._passes.clear()
        x = prompt(40, dtype=dtype, width=64).to(device)
        prefill.run(torch.full_like(x, torch.nan))  # an earlier prompt that left nothing of use
        found.append(in_two_pieces(prefill, x))
    assert rms_error(*found) < LIMITS[dtype]
