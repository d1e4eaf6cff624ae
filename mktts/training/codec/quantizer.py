"""Residual vector quantisation, 1 + 15 books: each book quantises what the books before it left over.

As in the released codec, the first book has its own output projection, and the other fifteen share one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROUNDS = 12  # of k-means: the error falls by less than a hundredth a round after that


class Chain(nn.Module):
    """Codebooks of vectors as the decoder takes them, and the projection of their sum."""

    def __init__(self, books: int, size: int, width: int, outer: int) -> None:
        super().__init__()
        self.output_proj = nn.Conv1d(width, outer, 1, bias=False)
        self.register_buffer("books", torch.zeros(books, size, width))

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, T, books) -> (B, outer, T)."""
        vectors = sum(F.embedding(codes[..., i], book) for i, book in enumerate(self.books))
        return self.output_proj(vectors.transpose(1, 2))


class SplitQuantizer(nn.Module):
    """The first book beside a chain of the others; their outputs are added.

    Distances are measured among the analysis' components, whose errors count equally. The decoder is given the same
    vectors with smaller differences between large and small components (`gain`).
    """

    def __init__(self, books: int, size: int, width: int) -> None:
        super().__init__()
        self.first = Chain(1, size, width, 2 * width)
        self.rest = Chain(books - 1, size, width, 2 * width)
        self.register_buffer("gain", torch.ones(width))

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, T, all books) -> (B, outer, T)."""
        return self.first(codes[..., :1]) + self.rest(codes[..., 1:])

    def encode(self, rows: Tensor) -> Tensor:
        """Components (..., width) -> codes (..., all books)."""
        left, codes = rows.flatten(0, -2), []
        for book in torch.cat((self.first.books, self.rest.books)) / self.gain:
            codes.append(_nearest(left, book))
            left = left - book[codes[-1]]
        return torch.stack(codes, -1).unflatten(0, rows.shape[:-1])

    @torch.no_grad()
    def fit(self, rows: Tensor, generator: torch.Generator) -> list[float]:
        """Sets all books by k-means on components (N, width) of mean zero; the share of variance left after each."""
        deviation = rows.std(0).clamp(min=1e-6)
        self.gain = (deviation * deviation.mean()).rsqrt()
        left, books, shares = rows - rows.mean(0), [], []
        whole = left.square().mean()
        for _ in range(1 + len(self.rest.books)):
            books.append(k_means(left, self.first.books.shape[1], generator))
            left = left - books[-1][_nearest(left, books[-1])]
            shares.append(float(left.square().mean() / whole))
        vectors = torch.stack(books) * self.gain
        self.first.books, self.rest.books = vectors[:1].clone(), vectors[1:].clone()
        return shares


def k_means(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Centres (size, D) of rows (N, D), from random rows; a centre that wins nothing starts again from another row."""
    centres = _random_rows(rows, size, generator)
    for _ in range(_ROUNDS):
        index = _nearest(rows, centres)
        counts = torch.bincount(index, minlength=size)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, index, rows)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), _random_rows(rows, size, generator))
    return centres


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    """(N, D), (K, D) -> (N,), a block at a time: the distances of all would not fit."""
    squares = centres.square().sum(1)
    return torch.cat([(squares - 2 * block @ centres.T).argmin(1) for block in rows.split(65_536)])


def _random_rows(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randint(len(rows), (count,), generator=generator).to(rows.device)].clone()
