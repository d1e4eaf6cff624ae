"""Matrix products and attention with one order of sums: their error, and rows that do not feel their company."""

import pytest
import torch
import torch.nn.functional as F

from mktts.batch.cuda.tiles import _MEASURED, Kind, plan_of

pytestmark = pytest.mark.gpu
SHAPES = [*_MEASURED, (Kind.LINEAR, 120, 96), (Kind.GATED, 72, 64)]
ROWS = (1, 7, 8, 16, 33, 64, 130, 256, 512, 1_024)
MOST = 2_048
EPS = 1e-6


class Case:
    """Operands of one matrix, and the results of some of their rows by `products`."""

    def __init__(self, kind: Kind, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> None:
        g = torch.Generator("cuda").manual_seed(columns + depth)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=g, device="cuda") * scale).to(dtype)

        self.kind, self.columns = kind, columns
        self.x = normal(MOST, depth)
        self.weight = normal((2 if kind is Kind.GATED else 1) * columns, depth, scale=depth**-0.5)
        self.residual, self.norm = normal(MOST, columns), normal(columns)

    def of(self, products, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the rows of x at the places `rows` give."""
        x = self.x[rows]
        if self.kind is Kind.LINEAR:
            return (products.linear(x, self.weight),)
        if self.kind is Kind.GATED:
            return (products.gated(x, self.weight),)
        residual = self.residual[rows]
        out = torch.full_like(residual, torch.nan)
        products.add_norm(residual, x, self.weight, self.norm, out, EPS)
        return residual, out

    def truth(self, rows: torch.Tensor) -> torch.Tensor:
        """The first result in float64."""
        product = self.x[rows].double() @ self.weight.double().T
        if self.kind is Kind.GATED:
            return F.silu(product[:, : self.columns]) * product[:, self.columns :]
        return product + self.residual[rows].double() if self.kind is Kind.JOINED else product


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.fixture
def own():
    from mktts.batch.cuda.kernels.products import FixedOrderProducts

    return FixedOrderProducts(torch.device("cuda"))


@pytest.mark.parametrize(("kind", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("count", [8, 64, 300, 1_024])
def test_the_error_is_that_of_cublas(own, kind, columns, depth, count):
    from mktts.batch.cuda.kernels.products import CublasProducts

    case, rows = Case(kind, columns, depth), torch.arange(count, device="cuda")
    truth, theirs = case.truth(rows), case.of(CublasProducts(), rows)
    mine = case.of(own, rows)
    assert error(mine[0], truth) <= 1.1 * error(theirs[0], truth)
    assert all(torch.isfinite(t).all() for t in mine)
    if kind is Kind.JOINED:
        norm = torch.rsqrt(truth.square().mean(1, keepdim=True) + EPS) * truth * case.norm.double()
        assert error(mine[1], norm) <= 1.1 * error(theirs[1], norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "columns", "depth"), SHAPES)
def test_rows_are_equal_bit_for_bit_in_any_number_and_place(own, kind, columns, depth, dtype):
    """In each of the matrix's tiles."""
    case = Case(kind, columns, depth, dtype)
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    most_rows = [min(most, MOST) for most, _ in plan_of(kind, columns, depth, dtype.itemsize, limit).tiles]
    wanted = case.of(own, torch.arange(MOST, device="cuda"))
    generator = torch.Generator().manual_seed(0)
    for count in (*ROWS, *most_rows):
        rows = torch.randperm(MOST, generator=generator)[:count].cuda()
        for mine, all_of_them in zip(case.of(own, rows), wanted, strict=True):
            assert torch.equal(mine, all_of_them[rows]), count


def test_a_bias_is_added_before_rounding_and_rows_may_lie_apart(own):
    case = Case(Kind.LINEAR, 1_024, 2_048)
    x, bias = case.x.view(-1, 2, 2_048)[:, 1], case.norm
    truth = x.double() @ case.weight.double().T + bias.double()
    found = own.linear(x, case.weight, bias)
    assert error(found, truth) <= 1.1 * error(F.linear(x, case.weight, bias), truth)
    assert torch.equal(own.linear(x.contiguous(), case.weight, bias), found)
