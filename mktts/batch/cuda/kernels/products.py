"""The matrix products of a batched frame: by cuBLAS, where the order of a row's sums, and with it a stream's codes,
depends on the number of rows; or by Triton kernels that keep one order, whatever other rows there are.

An element of x @ weight.T is a sum over k in PARTS parts of equal length. Within a part fp32 accumulates over ascending
k; the parts are added in their order, ((p0 + p1) + p2) + ... . Tiles of any size, and parts made by one program or by
several, give the same bits: the number of rows may choose among them, and does not change the sum."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mktts.batch.cuda.tiles import Kind, plan_of
from mktts.kernel.rows import add_norm, rms, silu_mul
from mktts.kernel.triton_kernels import launch


@triton.jit
def _block(source, row, k, rows, stride, depth, SIZE: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr):
    """(SIZE, BK) at (row, k) of the matrix `source` (rows, depth), zeros outside of it. DESCRIBED: `source` is a tensor
    descriptor, for the copy engine of compute capability 9.0 and above; otherwise a pointer."""
    if DESCRIBED:
        return source.load([row, k])
    else:
        r = row + tl.arange(0, SIZE)
        c = k + tl.arange(0, BK)
        inside = (r < rows)[:, None] & (c < depth)[None, :]
        return tl.load(source + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0)


@triton.jit
def _dot(a, w, sums, TURNED: tl.constexpr):
    """sums + a @ w.T, or its transpose where TURNED: then the weights are the operand that needs 64 rows."""
    if TURNED:
        return tl.dot(w, a.T, sums, input_precision="ieee")
    else:
        return tl.dot(a, w.T, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, bias, out, rows, columns, depth, stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
    GATED: tl.constexpr, TURNED: tl.constexpr, BIASED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Program (row block, column block, part where SPLIT): out (rows, columns) = x @ weight.T + bias where BIASED.

    x (rows, depth), rows at a `stride`, is read by blocks of (BM, BK), weight (columns, depth) by blocks of (BN, BK).
    SPLIT: a program makes one part, and out (PARTS, rows, columns) keeps them apart. GATED: weight has 2 columns rows,
    out = silu(first half) * second half, rounded as `mktts.kernel.rows.silu_mul` rounds; PARTS is 1.
    TURNED: the tile is (BN, BM).
    """
    T: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0) * BM
    column = tl.program_id(1) * BN
    length = depth // PARTS
    if TURNED:
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    if GATED:
        ups = sums
        for k in range(0, depth, BK):
            a = _block(x, row, k, rows, stride, depth, BM, BK, DESCRIBED)
            w = _block(weight, column, k, 2 * columns, depth, depth, BN, BK, DESCRIBED)
            sums = _dot(a, w, sums, TURNED)
            w = _block(weight, columns + column, k, 2 * columns, depth, depth, BN, BK, DESCRIBED)
            ups = _dot(a, w, ups, TURNED)
        gate = sums.to(T).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(T).to(tl.float32)
        sums = gate * ups.to(T).to(tl.float32)
    else:
        start = tl.program_id(2) * length  # program_id(2) is 0 unless SPLIT
        for k in range(start, start + length, BK):
            a = _block(x, row, k, rows, stride, depth, BM, BK, DESCRIBED)
            w = _block(weight, column, k, columns, depth, depth, BN, BK, DESCRIBED)
            sums = _dot(a, w, sums, TURNED)
        if not SPLIT:
            for part in range(1, PARTS):
                more = tl.zeros_like(sums)
                for k in range(part * length, (part + 1) * length, BK):
                    a = _block(x, row, k, rows, stride, depth, BM, BK, DESCRIBED)
                    w = _block(weight, column, k, columns, depth, depth, BN, BK, DESCRIBED)
                    more = _dot(a, w, more, TURNED)
                sums += more
    if TURNED:
        sums = sums.T
    c = column + tl.arange(0, BN)
    r = row + tl.arange(0, BM)
    inside = c < columns
    if BIASED:
        sums += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SPLIT:
        out += tl.program_id(2).to(tl.int64) * rows * columns
    places = r[:, None].to(tl.int64) * columns + c[None, :]
    tl.store(out + places, sums.to(T), mask=(r < rows)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "parts"])
def add_parts_norm(x, delta, weight, out, eps, rows, parts, N: tl.constexpr, PARTS: tl.constexpr):
    """Program (row): x += the sum of delta's parts, then out = rms(x) * weight. x, out (rows, N).

    delta (parts, rows, N) fp32, 1 <= parts <= PARTS. `parts` is not compiled in: one binary makes the sum of squares,
    whose order must not change with it."""
    T: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, N)
    total = tl.load(delta + row * N + c)
    for part in tl.static_range(1, PARTS):
        here = part < parts
        more = tl.load(delta + (part * rows + row) * N + c, mask=here, other=0.0)
        total = tl.where(here, total + more, total)
    value = tl.load(x + row * N + c).to(tl.float32)
    value = (value + total.to(T).to(tl.float32)).to(T).to(tl.float32)
    tl.store(x + row * N + c, value.to(T))
    tl.store(out + row * N + c, rms(value, tl.load(weight + c).to(tl.float32), eps, T, N))


# ---- launches

_SILU_BLOCK = 1024


class CublasProducts:
    """Products of rows (R, K), of any stride, with weights as (out, in), rounded to the rows' dtype."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (R, K) @ weight (N, K).T + bias (N,) -> (R, N)."""
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(x @ gate.T) * (x @ up.T) -> (R, I). weight (2 I, K): gate, then up."""
        gate_up = F.linear(x, weight)
        inner = weight.shape[0] // 2
        out = gate_up.new_empty(len(x), inner)
        launch(silu_mul, (len(x), -(-inner // _SILU_BLOCK)), gate_up, out, N=inner, BLOCK=_SILU_BLOCK)
        return out

    def add_norm(self, x: Tensor, h: Tensor, weight: Tensor, norm: Tensor, out: Tensor, eps: float) -> None:
        """x (R, N) += h (R, K) @ weight (N, K).T, then out (R, N) = RMSNorm(x) * norm (N,)."""
        delta = F.linear(h, weight)
        launch(add_norm, (len(x),), x, delta, norm, out, eps, N=x.shape[1], ADDS=True, num_warps=4)


class FixedOrderProducts(CublasProducts):
    """The same by the project's kernels. A row's results do not depend on the other rows or on their number."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._limit, self._described = properties.shared_memory_per_block_optin, properties.major >= 9

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._product(Kind.LINEAR, x, weight, x.new_empty(len(x), weight.shape[0]), bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._product(Kind.GATED, x, weight, x.new_empty(len(x), weight.shape[0] // 2))

    def add_norm(self, x: Tensor, h: Tensor, weight: Tensor, norm: Tensor, out: Tensor, eps: float) -> None:
        plan = plan_of(Kind.JOINED, *weight.shape, x.element_size(), self._limit)
        parts = plan.parts if plan.tile(len(x)).split else 1
        delta = self._product(Kind.JOINED, h, weight, x.new_empty(parts, *x.shape, dtype=torch.float32))
        sizes = {"N": x.shape[1], "PARTS": plan.parts, "num_warps": 4}
        launch(add_parts_norm, (len(x),), x, delta, norm, out, eps, len(x), parts, **sizes)

    def _product(self, kind: Kind, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """Makes the product in `out` (..., R, N), contiguous, each part by itself if the tile is split. Returns it."""
        count, columns, depth = x.shape[0], out.shape[-1], x.shape[1]
        plan = plan_of(kind, columns, depth, x.element_size(), self._limit)
        tile = plan.tile(count).fitted(kind, x.element_size(), self._limit)
        grid = (-(-count // tile.rows), -(-columns // tile.columns), plan.parts if tile.split else 1)
        launch(product, grid,
            self._operand(x, tile.rows, tile.depth), self._operand(weight, tile.columns, tile.depth),
            out if bias is None else bias, out, count, columns, depth, x.stride(0),
            BM=tile.rows, BN=tile.columns, BK=tile.depth, PARTS=plan.parts, SPLIT=tile.split,
            GATED=kind is Kind.GATED, TURNED=tile.turned, BIASED=bias is not None, DESCRIBED=self._described,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    def _operand(self, matrix: Tensor, rows: int, depth: int) -> TensorDescriptor | Tensor:
        """The matrix as the kernel reads it, by blocks of (rows, depth)."""
        return TensorDescriptor.from_tensor(matrix, [rows, depth]) if self._described else matrix
