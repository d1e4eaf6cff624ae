"""What the code predictor says of codebooks that carry noise (`mktts.training.codec.quantizer`): nothing.

Their codes are drawn anew in every batch and no loss looks at them. In a checkpoint their heads are fixed random rows,
so small that sampling draws nearly evenly among the likeliest, and of another order for every hidden state, so that
greedy codes are not the same in every frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS
from mktts.training.codec.model import noise_books

LOGIT_DEVIATION = 0.3  # of a flat head's logits
_SEED = 0
_NORM = "talker.code_predictor.model.norm.weight"
_HEAD = "talker.code_predictor.lm_head.{}.weight"


def with_flat_heads(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Tensors by Hub name, with the heads (codebook, H) of the last `count` codebooks made anew.

    A head's input is a vector of mean square 1 times the norm's weights, so rows of deviation d give logits of
    deviation d times the length of those weights, if what goes in has no preferred direction.
    """
    found = dict(tensors)
    generator = torch.Generator().manual_seed(_SEED)
    for book in range(NUM_CODEBOOKS - 1 - count, NUM_CODEBOOKS - 1):
        name = _HEAD.format(book)
        drawn = torch.randn(found[name].shape, generator=generator)
        found[name] = (drawn * LOGIT_DEVIATION / found[_NORM].float().norm().cpu()).to(found[name])
    return found


def check_noise_books(codec: Path, count: int) -> None:
    """Raises CheckpointError where a speech_tokenizer folder has not `count` noise books."""
    path = codec / "model.safetensors"
    try:
        found = noise_books(load_file(path))
    except (OSError, KeyError) as error:
        raise CheckpointError(f"{path}: expected the weights of a codec, but: {error}") from None
    if found != count:
        raise CheckpointError(
            f"{codec}: expected a codec of {count} noise books, as the talker was trained for, found {found}: "
            f"train the talker with --noise-books {found}"
        )
