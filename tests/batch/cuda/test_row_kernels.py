"""Kernels between the products: the predictor's attention over a frame's passes, heads that go to their pages, and the
talker's attention over pages, whose parts are joined to the same bits by one program and by several."""

import pytest
import torch

from mktts.model.qwen3 import rms_norm, rotate

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
HEADS, KV_HEADS, WIDTH, POSITIONS, EPS = 16, 8, 128, 16, 1e-6
GROUP, COLUMNS = HEADS // KV_HEADS, (HEADS + 2 * KV_HEADS) * WIDTH
SHAPE = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "D": WIDTH}
PAGE, LAYERS, LAYER, PARTS, PAGES = 64, 2, 1, 8, 32
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 500, 1_024, 1_025, 1_500, 2_048)
PASSES = [(0, 2)] + [(start, 1) for start in range(2, POSITIONS)]  # the first position of each, and how many are new


class Given:
    """Random norms, angles and projections `qkv` (positions, rows, COLUMNS)."""

    def __init__(self, dtype: torch.dtype, positions: int, rows: int) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(DEVICE, dtype)

        self.q_norm, self.k_norm, self.qkv = normal(WIDTH), normal(WIDTH), normal(positions, rows, COLUMNS)
        angle = torch.outer(torch.arange(positions).float(), torch.rand(WIDTH // 2, generator=g)).to(DEVICE)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (rows, HEADS, positions, WIDTH), keys and values as the oracle makes them."""
        q, k, v = self.qkv.transpose(0, 1).unflatten(2, (-1, WIDTH)).split((HEADS, KV_HEADS, KV_HEADS), 2)
        cos, sin = (torch.cat((t, t), 1) for t in (self.cos, self.sin))
        q, k = rms_norm(q, self.q_norm, EPS).transpose(1, 2), rms_norm(k, self.k_norm, EPS).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2)


def predicted(given: Given, lanes: torch.Tensor, least_old: int = 0) -> torch.Tensor:
    """What the predictor's attention gives lanes (N,) -> (N, positions, HEADS, WIDTH)."""
    from mktts.batch.cuda.kernels import rows

    count, made = len(lanes), []
    cache = torch.full((count, KV_HEADS, 2, POSITIONS, WIDTH), torch.nan, device=DEVICE, dtype=given.qkv.dtype)
    for start, new in PASSES:
        qkv = given.qkv[start : start + new, lanes].transpose(0, 1).contiguous()
        out = torch.full((count, new, HEADS, WIDTH), torch.nan, device=DEVICE, dtype=qkv.dtype)
        rows.attend_predictor[(count, KV_HEADS // 2)](
            qkv, given.q_norm, given.k_norm, given.cos, given.sin, cache, out, EPS, WIDTH**-0.5, start,
            **SHAPE, POSITIONS=POSITIONS, TILE=2, OLD=max(least_old, -(-start // 4) * 4), NEW=new, num_warps=1,
        )  # fmt: skip
        made.append(out)
    return torch.cat(made, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_predictors_attention_is_that_of_float64(dtype):
    given = Given(dtype, POSITIONS, 5)
    found = predicted(given, torch.arange(5))
    q, k, v = (t.double() for t in given.heads())
    k, v = (t.repeat_interleave(GROUP, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(~torch.ones(16, 16).bool().tril().to(DEVICE), -torch.inf)
    truth = (scores.softmax(3) @ v).transpose(1, 2)
    assert (found.double() - truth).norm() / truth.norm() < (2e-6 if dtype == torch.float32 else 3e-3)


def test_a_lane_does_not_feel_the_others_nor_the_room_for_older_positions():
    given = Given(torch.bfloat16, POSITIONS, 300)
    alone = predicted(given, torch.arange(300))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:7]
    assert torch.equal(predicted(given, order), alone[order])
    assert torch.equal(predicted(given, order, least_old=16), alone[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_go_to_their_pages(dtype):
    from mktts.batch.cuda.kernels import rows

    page, layers, layer, count = 64, 2, 1, 5
    given = Given(dtype, 3 * page, count)
    position = torch.tensor([0, 1, 63, 64, 191], device=DEVICE).int()
    slot = torch.arange(count, device=DEVICE).flip(0).int()
    table = torch.randperm(3 * count, generator=torch.Generator().manual_seed(0)).int().view(count, 3).to(DEVICE)
    pages = torch.full((3 * count, layers, KV_HEADS, 2, page, WIDTH), torch.nan, device=DEVICE, dtype=dtype)
    queries = torch.full((count, HEADS, WIDTH), torch.nan, device=DEVICE, dtype=dtype)
    own = torch.arange(count, device=DEVICE)
    rows.place_heads[(count, KV_HEADS // 4)](
        given.qkv[position.long(), own].contiguous(), given.q_norm, given.k_norm, given.cos, given.sin, slot, position,
        table, pages, queries, EPS, table.shape[1], layer, layers, **SHAPE, PAGE=page, TILE=4, num_warps=1,
    )  # fmt: skip
    q, k, v = (t[own, :, position.long()] for t in given.heads())
    held = table[slot.long(), (position // page).long()].long()
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(queries, q, **close)
    torch.testing.assert_close(pages[held, layer, :, 0, (position % page).long()], k, **close)
    assert torch.equal(pages[held, layer, :, 1, (position % page).long()], v)
    assert pages.isfinite().sum() == 2 * count * KV_HEADS * WIDTH


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
