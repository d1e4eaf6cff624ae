"""Residual vector quantisation, 1 + 15 books: each book quantises what the books before it left over.

As in the released codec, the first book has its own output projection, and the other fifteen share one.

The last books may carry noise instead. A decoder is a function of its codes: while they stay what they are, so do its
latents, and every breath and hiss becomes one pattern, repeated with each of its steps. Codes that are drawn at random
give it something to make noise of. Their entries are fixed random vectors in dimensions of their own, and a model that
predicts codes learns that nothing foretells them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROUNDS = 12  # of k-means: the error falls by less than a hundredth a round after that
_PATHS = 8  # through the codebooks: they leave a quarter less of the error than one, twice as many 3 % less again
_BLOCK = 65_536  # rows, of one path each, whose distances are in memory at once
_JOINT_ROUNDS = 4  # of all books' entries together: a later one gains less than a hundredth
_HELD = 1.0  # rows that an entry's old place weighs as much as


class Chain(nn.Module):
    """Codebooks of vectors as the decoder takes them, and the projection of their sum."""

    def __init__(self, books: int, size: int, width: int, outer: int) -> None:
        super().__init__()
        self.output_proj = nn.Conv1d(width, outer, 1, bias=False)
        self.register_buffer("books", torch.zeros(books, size, width))

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, T, books) -> (B, outer, T)."""
        return self.output_proj(summed(codes, self.books).transpose(1, 2))


class SplitQuantizer(nn.Module):
    """The first book beside a chain of the others; their outputs are added.

    Distances are measured among the analysis' components, whose errors count equally. The decoder is given the same
    vectors with smaller differences between large and small components (`gain`).
    """

    def __init__(self, books: int, size: int, components: int, noise_books: int = 0, noise: int = 0) -> None:
        """noise_books: the last of all, whose entries fill `noise` dimensions behind the components."""
        super().__init__()
        self.components, self.noise_books = components, noise_books
        width = components + noise
        self.first = Chain(1, size, width, 2 * width)
        self.rest = Chain(books - 1, size, width, 2 * width)
        self.register_buffer("gain", torch.ones(components))

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, T, all books) -> (B, outer, T)."""
        return self.first(codes[..., :1]) + self.rest(codes[..., 1:])

    def encode(self, rows: Tensor) -> Tensor:
        """Components (..., width) -> codes (..., all books); those of the noise books by `scattered`."""
        books = self.measured() / self.gain
        measured = nearest_path(rows.flatten(0, -2), books)
        noise = scattered(measured, self.noise_books, self.first.books.shape[1])
        return torch.cat((measured, noise), -1).unflatten(0, rows.shape[:-1])

    def redrawn(self, codes: Tensor) -> Tensor:
        """Codes (..., all books) with those of the noise books drawn anew by torch's generator of their device."""
        return redrawn(codes, self.noise_books, self.first.books.shape[1])

    @torch.no_grad()
    def fit(self, rows: Tensor, generator: torch.Generator) -> list[float]:
        """Sets all books, by k-means on components (N, width) of mean zero, each of what the books before it leave,
        then all together; the share of variance left after each, and last after what followed.

        Noise books take no share, and are not in the list.
        """
        deviation = rows.std(0).clamp(min=1e-6)
        self.gain = (deviation * deviation.mean()).rsqrt()
        rows = rows - rows.mean(0)
        left, books, shares, whole = rows, [], [], rows.square().mean()
        for _ in range(1 + len(self.rest.books) - self.noise_books):
            books.append(k_means(left, self.first.books.shape[1], generator))
            left = left - books[-1][_nearest(left, books[-1])]
            shares.append(float(left.square().mean() / whole))
        found = torch.stack(books)
        for _ in range(_JOINT_ROUNDS):
            found = moved_together(rows, found)
        self.set_books(found * self.gain, generator)
        return [*shares, float((rows - summed(nearest_path(rows, found), found)).square().mean() / whole)]

    @torch.no_grad()
    def set_books(self, vectors: Tensor, generator: torch.Generator) -> None:
        """Takes the measured books' entries (books, size, components); draws those of the noise books.

        The sum of the noise books' entries has a standard deviation of 1 in each of its dimensions; that of the others
        has about 1 on average.
        """
        books = torch.cat((self.first.books, self.rest.books))
        count = len(books) - self.noise_books
        books.zero_()
        books[:count, :, : self.components] = vectors
        if self.noise_books:
            drawn = torch.randn(books[count:, :, self.components :].shape, generator=generator)
            books[count:, :, self.components :] = drawn.to(books) / self.noise_books**0.5
        self.first.books, self.rest.books = books[:1].clone(), books[1:].clone()

    def measured(self) -> Tensor:
        """Entries of the books that carry no noise, without the dimensions for it: (books, size, components)."""
        books = torch.cat((self.first.books, self.rest.books))
        return books[: len(books) - self.noise_books, :, : self.components]


def nearest_path(rows: Tensor, books: Tensor, paths: int = _PATHS) -> Tensor:
    """Rows (N, D), books (Q, K, D) -> codes (N, Q) whose entries' sum is near a row, by a beam search.

    Book by book, of all entries behind each of the `paths` nearest sums the nearest sums go on (Babenko and Lempitsky
    2014). The first book's entry is the one nearest to the row: a talker draws it with its own head, by what is said.
    """
    return torch.cat([_searched(block, books, paths) for block in rows.split(max(1, _BLOCK // paths))])


def _searched(rows: Tensor, books: Tensor, paths: int) -> Tensor:
    left, codes = rows[:, None], rows.new_empty(len(rows), 1, 0, dtype=torch.int64)
    every = torch.arange(len(rows), device=rows.device)[:, None]
    for number, book in enumerate(books):
        distances = left.square().sum(-1, keepdim=True) - 2 * left @ book.T + book.square().sum(1)
        most = 1 if number == 0 else min(paths, distances[0].numel())
        chosen = distances.flatten(1).topk(most, largest=False).indices
        path, code = chosen // len(book), chosen % len(book)
        left = left[every, path] - book[code]
        codes = torch.cat((codes[every, path], code[..., None]), -1)
    return codes[:, 0]


def moved_together(rows: Tensor, books: Tensor) -> Tensor:
    """Books (Q, K, D) whose entries' sums, along the codes that `rows` (N, D) have now, are nearest to the rows.

    Least squares of all entries at once (as in additive quantisation, Babenko and Lempitsky 2014): each book was made
    without those behind it. The old places weigh a little, for what the rows leave open.
    """
    count, size, width = books.shape
    codes = nearest_path(rows, books)
    index = codes + size * torch.arange(count, device=codes.device)
    pairs = torch.zeros((count * size) ** 2, dtype=torch.float64, device=rows.device)
    for block in index.split(_BLOCK // _PATHS):
        together = block[:, :, None] * (count * size) + block[:, None, :]
        pairs += torch.bincount(together.flatten(), minlength=len(pairs))
    pairs = pairs.view(count * size, -1)
    pairs.diagonal().add_(_HELD)
    missed = (rows - summed(codes, books)).double()
    wanted = torch.zeros(count * size, width, dtype=torch.float64, device=rows.device)
    for column in index.unbind(-1):
        wanted.index_add_(0, column, missed)
    return books + torch.linalg.solve(pairs, wanted).to(books).view_as(books)


def summed(codes: Tensor, books: Tensor) -> Tensor:
    """Sums (..., D) of the entries of books (Q, K, D) that codes (..., Q) name."""
    return sum(F.embedding(code, book) for code, book in zip(codes.unbind(-1), books, strict=True))


def scattered(codes: Tensor, count: int, size: int) -> Tensor:
    """`count` codes below `size` for each row of `codes` (..., books) int64: (..., count).

    They look drawn at random and follow from the row alone, so that encoding repeats itself whatever comes in a batch:
    the row's polynomial in an odd number and then the finalizer of MurmurHash3 (Appleby 2011), modulo 2^64.
    """
    mixed = torch.zeros_like(codes[..., 0])
    for code in codes.unbind(-1):
        mixed = mixed * 6364136223846793005 + code + 1442695040888963407  # Knuth's MMIX generator
    found = []
    for book in range(count):
        x = mixed + book * 0x1E3779B97F4A7C15
        for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):  # 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53 as signed
            x = (x ^ (x >> 33 & 0x7FFFFFFF)) * factor
        found.append((x ^ (x >> 33 & 0x7FFFFFFF)) % size)
    return torch.stack(found, -1) if found else codes[..., :0]


def redrawn(codes: Tensor, noise_books: int, size: int) -> Tensor:
    """Codes (..., books) with the last `noise_books` drawn anew below `size`, by torch's generator of their device.

    What learns from codes should see other noise each time: there is nothing in it to remember.
    """
    if not noise_books:
        return codes
    noise = torch.randint_like(codes[..., -noise_books:], size)
    return torch.cat((codes[..., :-noise_books], noise), -1)


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
    return torch.cat([(squares - 2 * block @ centres.T).argmin(1) for block in rows.split(_BLOCK)])


def _random_rows(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randint(len(rows), (count,), generator=generator).to(rows.device)].clone()
