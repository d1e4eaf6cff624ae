"""The small voice as a checkpoint in the Hub's layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mktts.checkpoint.open import CODEC_FOLDER
from mktts.checkpoint.random.make import whole_folder, write_weights
from mktts.checkpoint.tensors import TensorSpec, check, expected_tensors
from mktts.common import read_object, write_json
from mktts.errors import CheckpointError
from mktts.spec import ModelConfig
from mktts.training.talker.sizes import SPEAKERS, TalkerSizes, config_files
from mktts.training.talker.tokenizer import taken_tokenizer, train_tokenizer

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def prepare(
    folder: Path,
    sentences: Iterable[str],
    sizes: TalkerSizes,
    speakers: Sequence[str] = SPEAKERS,
    begun: Path | None = None,
) -> ModelConfig:
    """Everything of a checkpoint that is known before training: tokenizer (trained on `sentences`) and JSON files.

    begun: a voice's folder, whose tokenizer is taken instead.
    """
    ids = train_tokenizer(folder, sentences, sizes.merges) if begun is None else taken_tokenizer(folder, begun)
    for name, content in config_files(sizes, ids, speakers).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, content, sort_keys=False)
    return ModelConfig.load(folder)


def write_checkpoint(
    folder: Path,
    prepared: Path,
    tensors: Mapping[str, Tensor],
    codec: Path,
    card: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes `folder`, whole or not at all: the Hub layout with a model card (README.md) if there is text for one.

    prepared: what `prepare` made. tensors: by Hub name, any float dtype. codec: a speech_tokenizer folder.
    Raises CheckpointError where tensors do not fit the configuration or `folder` has content already.
    """
    config = ModelConfig.load(prepared)
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    found = {name: TensorSpec(tuple(t.shape), (_DTYPE_NAMES[dtype],)) for name, t in stored.items()}
    check(found, expected_tensors(config), "trained tensors")
    codes = read_object(codec / "config.json")["decoder_config"]["codebook_size"]
    if codes != config.predictor.vocab_size:
        raise CheckpointError(
            f"{codec}: expected codebooks of {config.predictor.vocab_size}, as the talker has, found {codes}: "
            "train the talker on this codec's codes"
        )
    with whole_folder(folder) as work:
        shutil.copytree(prepared, work, dirs_exist_ok=True)
        shutil.copytree(codec, work / CODEC_FOLDER, dirs_exist_ok=True)
        write_weights(work, stored)
        if card:
            (work / "README.md").write_text(card, encoding="utf-8")
    return folder
