"""Residual vector quantisation, 1 + 15 books: codebooks follow the data by exponential averages, unused entries move.

As in the released codec, the first book quantises a projection of its own, and the other fifteen quantise another
projection, each what the books before it left over.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DECAY = 0.95  # short: with thousands of rows a step, entries must keep up with a moving encoder
_REVIVE_BELOW = 0.1  # of the average use of an entry
_NORM_SHARE = 0.02  # of a batch in the running mean and deviation
_FIRST_ROUNDS = 8  # of k-means on the first batch


class Codebook(nn.Module):
    """`size` vectors: the running sum of the rows each entry won, over how many it won."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("usage", torch.ones(size))
        self.register_buffer("sums", torch.zeros(size, width))

    @property
    def vectors(self) -> Tensor:
        return self.sums / self.usage.clamp(min=1e-5)[:, None]

    def nearest(self, rows: Tensor) -> Tensor:
        """Index of the entry nearest to each row: (N, D) -> (N,)."""
        vectors = self.vectors
        return (vectors.square().sum(1) - 2 * rows @ vectors.T).argmin(1)

    @torch.no_grad()
    def start(self, rows: Tensor) -> None:
        """k-means from random rows."""
        self._set(self._random_rows(rows))
        for _ in range(_FIRST_ROUNDS):
            counts, sums = self._won(rows, self.nearest(rows))
            self._set(torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], self._random_rows(rows)))
        self.usage.fill_(len(rows) / len(self.usage))
        self.sums.mul_(self.usage[:, None])

    @torch.no_grad()
    def follow(self, rows: Tensor, index: Tensor) -> None:
        """One step of the averages; entries that win too rarely move to rows of this batch."""
        counts, sums = self._won(rows, index)
        usage = self.usage.lerp(counts, 1 - _DECAY)
        sums = self.sums.lerp(sums, 1 - _DECAY)
        average = len(rows) / len(usage)
        dead = usage < _REVIVE_BELOW * average
        # a revived entry starts with some use, or it would be moved again before it can win anything
        self.usage.copy_(torch.where(dead, 0.5 * average, usage))
        self.sums.copy_(torch.where(dead[:, None], 0.5 * average * self._random_rows(rows), sums))

    def _set(self, vectors: Tensor) -> None:
        self.usage.fill_(1.0)
        self.sums.copy_(vectors)

    def _won(self, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows won by each entry, and their sums; a product, because scattered sums are not deterministic on CUDA."""
        hits = F.one_hot(index, len(self.usage)).to(rows.dtype)
        return hits.sum(0), hits.T @ rows

    def _random_rows(self, rows: Tensor) -> Tensor:
        picked = torch.randint(len(rows), (len(self.usage),), device=rows.device)
        noise = torch.randn_like(self.sums) * (0.01 * rows.std())  # two entries may get the same row
        return rows[picked] + noise


class Chain(nn.Module):
    """Projection, `books` codebooks on what is left over, projection back."""

    def __init__(self, books: int, size: int, width: int, outer: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(outer, width, 1, bias=False)
        self.output_proj = nn.Conv1d(width, outer, 1, bias=False)
        self.books = nn.ModuleList(Codebook(size, width) for _ in range(books))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(()))
        self.register_buffer("batches", torch.zeros(()))

    def normed(self, z: Tensor) -> Tensor:
        """(B, outer, T) -> projected rows (B, T, width) of mean 0 and a mean variance of 1 over the batch.

        Without it the commitment loss is lowest where all latents are one point, and that is where they go. One
        deviation for all dimensions: their differences tell the codebooks where precision pays. In evaluation mode the
        training's running averages serve, as constants (`codec_model.hub_tensors` puts them into the weights).
        """
        x = self.input_proj(z).transpose(1, 2)
        if not self.training:
            return (x - self.mean) / self.deviation
        mean = x.mean((0, 1))
        deviation = x.var((0, 1)).mean().clamp(min=1e-12).sqrt()
        with torch.no_grad():
            self.batches += 1
            share = (1 / self.batches).clamp(min=_NORM_SHARE)
            self.mean.lerp_(mean, share)
            self.deviation.lerp_(deviation, share)
        return (x - mean) / deviation

    def forward(self, z: Tensor, kept: Tensor | None = None, start: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(B, outer, T) -> the same shape quantised, codes (B, T, books), commitment loss () per book.

        kept (B,): how many books each example uses; all where None. Only in training mode do books follow the data.
        """
        x = self.normed(z)
        left, total, codes, commitment = x.flatten(0, 1), torch.zeros_like(x), [], x.new_zeros(())
        for i, book in enumerate(self.books):
            if start:
                book.start(left.detach())
            index = book.nearest(left.detach())
            quantised = F.embedding(index, book.vectors)
            if self.training:
                book.follow(left.detach(), index)
            commitment = commitment + (left - quantised).square().mean()
            left = left - quantised
            part = quantised.view_as(x)
            total = total + (part if kept is None else part * (kept > i)[:, None, None])
            codes.append(index.view(x.shape[:2]))
        through = x + (total - x).detach()
        if kept is not None:
            through = through * (kept > 0)[:, None, None]
        return self.output_proj(through.transpose(1, 2)), torch.stack(codes, -1), commitment / len(self.books)

    def bypass(self, z: Tensor) -> Tensor:
        """What `forward` would give with perfect codebooks."""
        return self.output_proj(self.normed(z).transpose(1, 2))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, T, books) -> (B, outer, T)."""
        vectors = sum(F.embedding(codes[..., i], book.vectors) for i, book in enumerate(self.books))
        return self.output_proj(vectors.transpose(1, 2))


class SplitQuantizer(nn.Module):
    """The first book beside a chain of the others; their outputs are added."""

    def __init__(self, books: int, size: int, width: int) -> None:
        super().__init__()
        self.first = Chain(1, size, width, 2 * width)
        self.rest = Chain(books - 1, size, width, 2 * width)

    def forward(self, z: Tensor, kept: Tensor | None = None, start: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """As `Chain`, `kept` counting books of the rest; codes (B, T, all books)."""
        a, first_codes, first_loss = self.first(z, None, start)
        b, rest_codes, rest_loss = self.rest(z, kept, start)
        return a + b, torch.cat((first_codes, rest_codes), -1), first_loss + rest_loss

    def bypass(self, z: Tensor) -> Tensor:
        """As `Chain`."""
        return self.first.bypass(z) + self.rest.bypass(z)

    def decode(self, codes: Tensor) -> Tensor:
        return self.first.decode(codes[..., :1]) + self.rest.decode(codes[..., 1:])
