"""Begins a codec with what a trained one has learnt: noise books, and other widths, without starting anew."""

from __future__ import annotations

import torch

from mktts.errors import CheckpointError
from mktts.training.codec.model import Codec
from mktts.training.codec.sizes import CodecSizes


@torch.no_grad()
def grown(old: Codec, sizes: CodecSizes, seed: int = 0) -> Codec:
    """A codec of `sizes` with the analysis, the measured books and the weights of `old`.

    A tensor that is larger now holds the old one in its first rows and columns. The rest is as at the start of a
    training: noise must be heard at once, for where it is silent nothing pulls at it.
    Raises CheckpointError where `sizes` has fewer of anything but books that are measured.
    """
    torch.manual_seed(seed)
    new = Codec(sizes)
    if sizes.components != old.sizes.components or sizes.codebook_size != old.sizes.codebook_size:
        raise CheckpointError(f"expected a codec of the components and codebook size of {sizes}, found {old.sizes}")
    for name, part in old.analysis.named_buffers():
        new.analysis.get_buffer(name).copy_(part)
    new.quantizer.gain.copy_(old.quantizer.gain)
    books = torch.cat((old.quantizer.first.books, old.quantizer.rest.books))[..., : sizes.components]
    new.quantizer.set_books(books[: len(books) - sizes.noise_books], torch.Generator().manual_seed(seed))
    for name, part in old.named_parameters():
        target = new.get_parameter(name)
        if any(a > b for a, b in zip(part.shape, target.shape, strict=True)):
            raise CheckpointError(f"{name}: expected at most {tuple(target.shape)}, found {tuple(part.shape)}")
        target[tuple(slice(n) for n in part.shape)] = part
    return new
