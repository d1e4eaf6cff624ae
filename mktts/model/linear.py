"""Linear layers on a CPU in fp32 whose rows do not depend on how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Below, MKL sums in another order: one row on all processors, two and three on some (AMD, with AVX-512).
LEAST_ROWS = 4
_LONGEST_SUM = 768  # terms
_LARGE = 1 << 20  # values of a matrix that stays in no core's cache


def filled_up(x: Tensor) -> Tensor:
    """Rows (R, ...), and the first one again up to `LEAST_ROWS`, so that a BLAS makes the same of each of them."""
    missing = LEAST_ROWS - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x[:1].expand(missing, *x.shape[1:])))


@dataclass(frozen=True)
class Linear:
    """x @ weight + bias.

    A BLAS cuts long sums by the number of rows and treats a single row in its own way, so a row's last bits depend
    on its company, and what comes behind amplifies them. On CPU, sums are therefore cut here, short enough for MKL to
    leave alone, and few rows are filled up to `LEAST_ROWS`.
    """

    weight: Tensor  # (in, out), or as oneDNN has packed it
    bias: Tensor | None = None

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], name: str, bias: bool = True) -> Linear:
        """From a linear layer or a convolution of kernel 1."""
        weight = tensors[f"{name}.weight"]
        return cls(weight.flatten(1).t().contiguous(), tensors[f"{name}.bias"] if bias else None)

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """From `weight` (out, in) in fp32, which is not read again: a large matrix is packed.

        Few rows are then made as fast as the matrix can be read, where MKL copies it first: a row at a time in half the
        time, and no number of rows changes another's bits.
        """
        known = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
        if known and weight.numel() >= _LARGE:
            return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LEAST_ROWS), bias)
        return cls(weight.t().contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` (..., in) -> (..., out)."""
        if x.dim() > 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if not self.weight.is_mkldnn:
            if x.device.type != "cpu" or x.dtype == torch.bfloat16:
                return self._product(x, self.weight, None, None)
            if x.shape[0] < LEAST_ROWS:
                return self.of_rows(filled_up(x))[: x.shape[0]]
        return self.of_rows(x)

    def of_rows(self, x: Tensor, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`x` (R, in) -> (R, out): added to `onto` without the bias, or written to `out`, where those are given.

        R is at least LEAST_ROWS where the matrix is not packed.
        """
        if self.weight.is_mkldnn:
            if onto is not None:
                return torch.ops.mkldnn._linear_pointwise.binary(x, onto, self.weight, None, "add")
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y if out is None else out.copy_(y)
        if x.shape[1] <= _LONGEST_SUM:
            return self._product(x, self.weight, onto, out)
        for piece, weight in zip(x.split(_LONGEST_SUM, 1), self.weight.split(_LONGEST_SUM), strict=True):
            onto = self._product(piece, weight, onto, out)
        return onto

    def _product(self, x: Tensor, weight: Tensor, onto: Tensor | None, out: Tensor | None) -> Tensor:
        if onto is not None:
            return onto.addmm_(x, weight)
        return torch.mm(x, weight, out=out) if self.bias is None else torch.addmm(self.bias, x, weight, out=out)
