"""The talker's attention over pages: its parts, by one program or by several, are joined to the same bits."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, KV_HEADS, WIDTH, PAGE, LAYERS, LAYER, PARTS, PAGES = 16, 8, 128, 64, 2, 1, 8, 32
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 500, 1_024, 1_025, 1_500, 2_048)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_do_not_feel_the_number_of_programs_nor_their_place(dtype):
    g = torch.Generator("cuda").manual_seed(0)
    slots = len(LENGTHS)
    pages = torch.randn(slots * PAGES, LAYERS, KV_HEADS, 2, PAGE, WIDTH, generator=g, device="cuda").to(dtype)
    table = torch.randperm(slots * PAGES, generator=g, device="cuda").int().view(slots, PAGES)
    for row, length in enumerate(LENGTHS):  # what lies behind the newest position may be anything
        for page in range(length // PAGE, PAGES):
            pages[table[row, page].long(), :, :, :, max(0, length - page * PAGE) :] = torch.nan
    queries = torch.randn(slots, HEADS * WIDTH, generator=g, device="cuda").to(dtype)
    last = torch.tensor(LENGTHS, device="cuda").int() - 1
    slot = torch.arange(slots, device="cuda").int()
    alone = attended(queries, slot, last, table, pages, 1)
    apart = attended(queries, slot, last, table, pages, PARTS)
    assert torch.equal(alone, apart)
    order = torch.randperm(slots, generator=g, device="cuda").repeat(5)
    many = attended(queries[order], slot[order], last[order], table, pages, 1)
    assert torch.equal(many, alone[order])
    for row, length in enumerate(LENGTHS):
        keys, values = pages[table[row].long(), LAYER].double().permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (keys, values))
        scores = torch.einsum("hd,hnd->hn", queries[row].double().view(HEADS, WIDTH), keys) * WIDTH**-0.5
        truth = torch.einsum("hn,hnd->hd", scores.softmax(1), values).flatten()
        limit = 2e-6 if dtype == torch.float32 else 5e-3
        assert (alone[row].double() - truth).norm() / truth.norm() < limit, length


def attended(queries, slot, last, table, pages, programs):
    from mktts.batch.cuda.kernels import attention

    count = len(queries)
    out = torch.full_like(queries, torch.nan)
    part = torch.full((count, HEADS, PARTS, WIDTH), torch.nan, device="cuda")
    bounds = torch.full((count, HEADS, PARTS, 2), torch.nan, device="cuda")
    shape = {"HEADS": HEADS, "D": WIDTH, "PAGE": PAGE, "PARTS": PARTS}
    attention.attend[(KV_HEADS, count, programs)](
        queries, slot, last, table, pages, out, part, bounds, PAGES, LAYER, LAYERS, WIDTH**-0.5, programs,
        **shape, KV_HEADS=KV_HEADS, QUERIES=8, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    if programs > 1:
        attention.combine[(count, HEADS)](last, part, bounds, out, **shape, num_warps=1, enable_fp_fusion=False)
    return out
