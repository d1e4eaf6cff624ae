"""The matrix products of a batched frame: by cuBLAS, whose order of a row's sums changes with the number of rows, and
with it a stream's codes; or by the project's own kernels, which keep one order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mktts.batch.cuda.kernels import products
from mktts.batch.cuda.kernels.launching import launch
from mktts.batch.cuda.tiles import Kind, plan_of
from mktts.kernel import rows

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
        launch(rows.silu_mul, (len(x), -(-inner // _SILU_BLOCK)), gate_up, out, N=inner, BLOCK=_SILU_BLOCK)
        return out

    def add_norm(self, x: Tensor, h: Tensor, weight: Tensor, norm: Tensor, out: Tensor, eps: float) -> None:
        """x (R, N) += h (R, K) @ weight (N, K).T, then out (R, N) = RMSNorm(x) * norm (N,)."""
        delta = F.linear(h, weight)
        launch(rows.add_norm, (len(x),), x, delta, norm, out, eps, N=x.shape[1], ADDS=True, num_warps=4)


class FixedOrderProducts(CublasProducts):
    """The same by the project's kernels, see `mktts.batch.cuda.kernels.products`. A row's results do not depend on the
    other rows or on their number."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._limit, self._described = properties.shared_memory_per_block_optin, properties.major >= 9

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), weight.shape[0])
        self._product(Kind.LINEAR, x, weight, out, bias)
        return out

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(len(x), weight.shape[0] // 2)
        self._product(Kind.GATED, x, weight, out)
        return out

    def add_norm(self, x: Tensor, h: Tensor, weight: Tensor, norm: Tensor, out: Tensor, eps: float) -> None:
        plan = plan_of(Kind.JOINED, *weight.shape, x.element_size(), self._limit)
        parts = plan.parts if plan.tile(len(x)).split else 1
        delta = x.new_empty(parts, *x.shape, dtype=torch.float32)
        self._product(Kind.JOINED, h, weight, delta)
        launch(
            products.add_parts_norm,
            (len(x),),
            x,
            delta,
            norm,
            out,
            eps,
            len(x),
            parts,
            N=x.shape[1],
            PARTS=plan.parts,
            num_warps=4,
        )

    def _product(self, kind: Kind, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """`out`: (..., R, N) contiguous, with each part by itself where the tile is split."""
        count, columns, depth = x.shape[0], out.shape[-1], x.shape[1]
        plan = plan_of(kind, columns, depth, x.element_size(), self._limit)
        tile = plan.tile(count).fitted(kind, x.element_size(), self._limit)
        grid = (-(-count // tile.rows), -(-columns // tile.columns), plan.parts if tile.split else 1)
        launch(products.product, grid,
            self._operand(x, tile.rows, tile.depth), self._operand(weight, tile.columns, tile.depth),
            out if bias is None else bias, out, count, columns, depth, x.stride(0),
            BM=tile.rows, BN=tile.columns, BK=tile.depth, PARTS=plan.parts, SPLIT=tile.split,
            GATED=kind is Kind.GATED, TURNED=tile.turned, BIASED=bias is not None, DESCRIBED=self._described,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _operand(self, matrix: Tensor, rows: int, depth: int) -> TensorDescriptor | Tensor:
        """The matrix as the kernel reads it, by blocks of (rows, depth)."""
        return TensorDescriptor.from_tensor(matrix, [rows, depth]) if self._described else matrix
