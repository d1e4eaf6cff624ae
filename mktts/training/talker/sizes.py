"""The voice's folder in the Hub's layout: dimensions, what is known before training, and what is written after it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.checkpoint.open import CODEC_FOLDER
from mktts.checkpoint.random.make import whole_folder, write_weights
from mktts.checkpoint.tensors import TensorSpec, check, expected_tensors
from mktts.common import read_object, write_json
from mktts.errors import CheckpointError
from mktts.spec import SUPPRESSED_TAIL, ModelConfig
from mktts.training.codec.model import Codec, write_codec

LANGUAGE = "english"
_TAKEN = ("vocab.json", "merges.txt", "tokenizer_config.json", "configuration.json", "preprocessor_config.json")


@dataclass(frozen=True)
class StackSizes:
    """One decoder stack, by the names of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class TalkerSizes:
    """What config.json needs that is not fixed by the architecture or the tokenizer."""

    talker: StackSizes
    predictor: StackSizes
    codebook_size: int
    text_hidden: int


# 8.5 million parameters. A layer more, or a wider predictor, costs two CPU cores more than its share of 0.30 of real
# time: a frame took 13.8 ms of one core's time where the smaller voice took 11.9 (torch 2.13, one thread, medians).
VOICE = TalkerSizes(StackSizes(256, 768, 6, 4, 2, 64), StackSizes(256, 384, 2, 4, 2, 64), 256, 128)
TINY = TalkerSizes(StackSizes(64, 128, 2, 4, 2, 32), StackSizes(64, 64, 1, 4, 2, 32), 32, 32)  # for tests
SIZES = {"voice": VOICE, "tiny": TINY}


def prepare(folder: Path, begun: Checkpoint, sizes: TalkerSizes, speakers: Sequence[str]) -> ModelConfig:
    """Everything of a checkpoint that is known before training: the tokenizer of `begun`, and JSON files.

    speakers: their ids count down from the vocabulary's end; programs take the first where none is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TAKEN:
        shutil.copyfile(begun.folder / name, folder / name)
    config, generation = (read_object(begun.folder / name) for name in ("config.json", "generation_config.json"))
    talker = config["talker_config"]
    shift = talker["code_predictor_config"]["vocab_size"] - sizes.codebook_size  # control ids follow the codes
    for key, value in talker.items():
        if key.startswith("codec_") and isinstance(value, int):
            talker[key] = value - shift
    vocabulary = sizes.codebook_size + SUPPRESSED_TAIL
    half = sizes.talker.head_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]  # equal positions: any split is ordinary rotary embedding
    ids = {name: vocabulary - 1 - i for i, name in enumerate(speakers)}
    talker |= asdict(sizes.talker) | {
        "vocab_size": vocabulary,
        "text_hidden_size": sizes.text_hidden,
        "codec_language_id": {name: value - shift for name, value in talker["codec_language_id"].items()},
        "spk_id": ids,
        "spk_is_dialect": dict.fromkeys(ids, False),
        "rope_scaling": talker["rope_scaling"] | {"mrope_section": sections},
    }
    talker["code_predictor_config"] |= asdict(sizes.predictor) | {
        "vocab_size": sizes.codebook_size,
        "layer_types": ["full_attention"] * sizes.predictor.num_hidden_layers,
    }
    write_json(folder / "config.json", config, sort_keys=False)
    write_json(folder / "generation_config.json", generation, sort_keys=False)
    return ModelConfig.load(folder)


def write_checkpoint(
    folder: Path,
    prepared: Path,
    tensors: Mapping[str, Tensor],
    codec: Codec,
    sampling: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes `folder`, whole or not at all: a checkpoint in the Hub's layout.

    prepared: what `prepare` made. tensors: by Hub name. sampling: what is to differ in generation_config.json. Raises
    CheckpointError where parts do not fit or `folder` has content already.
    """
    config = ModelConfig.load(prepared)
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    dtype_name = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    found = {name: TensorSpec(tuple(t.shape), (dtype_name,)) for name, t in stored.items()}
    check(found, expected_tensors(config), "trained tensors")
    if codec.sizes.codebook_size != config.predictor.vocab_size:
        raise CheckpointError(
            f"expected a codec of {config.predictor.vocab_size} entries a book, as the talker has, found "
            f"{codec.sizes.codebook_size}: train the talker on this codec's codes"
        )
    with whole_folder(folder) as work:
        shutil.copytree(prepared, work, dirs_exist_ok=True)
        write_codec(work / CODEC_FOLDER, codec, dtype)
        generation = read_object(prepared / "generation_config.json") | dict(sampling or {})
        write_json(work / "generation_config.json", generation, sort_keys=False)
        write_weights(work, stored)
    return folder
