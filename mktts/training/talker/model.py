"""Talker and code predictor to train, on complete sequences, with the same logits as `mktts.model.oracle` gives row by
row; and the voice's folder in the Hub layout."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.checkpoint.open import CODEC_FOLDER, SMALL_FOLDER
from mktts.checkpoint.random.make import Json, whole_folder, write_weights
from mktts.checkpoint.tensors import expected_tensors
from mktts.common import read_object, write_json
from mktts.model.backend import CODE_EMBEDDINGS
from mktts.spec import NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig, StackConfig
from mktts.training.codec.model import Codec, write_codec
from mktts.training.weights import Weights

_MADE_ANEW = ("README.md", "*.safetensors")  # files of the included voice that are not copied; sizes are changed


@dataclass(frozen=True)
class TalkerSizes:
    """Values in config.json not fixed by the architecture or the tokenizer; those of the stacks by their names."""

    talker: dict[str, int]
    predictor: dict[str, int]
    codebook_size: int
    text_hidden: int
    speakers: tuple[str, ...] = ()  # the first one is the default


def _stack(*sizes: int) -> dict[str, int]:
    """The first fields of `StackConfig`, which determine the sizes of its matrices."""
    return {field.name: size for field, size in zip(fields(StackConfig), sizes, strict=False)}


# 8.5 million parameters. Another layer, or a wider predictor, would cost two CPU cores more than 0.30 of real time: a
# frame took 13.8 ms of one core's time, and of a smaller voice 11.9 ms (torch 2.13, one thread, medians).
VOICE = TalkerSizes(_stack(256, 768, 6, 4, 2, 64), _stack(256, 384, 2, 4, 2, 64), 256, 128)
TINY = TalkerSizes(_stack(64, 128, 2, 4, 2, 32), _stack(64, 64, 1, 4, 2, 32), 32, 32)  # for tests
SIZES = {"voice": VOICE, "tiny": TINY}


def config_json(sizes: TalkerSizes) -> Json:
    """config.json of a voice of these sizes, with the tokenizer of the included voice."""
    config = read_object(SMALL_FOLDER / "config.json")
    talker = config["talker_config"]
    shift = talker["code_predictor_config"]["vocab_size"] - sizes.codebook_size  # control ids follow the codes
    for key, value in talker.items():
        if key.startswith("codec_") and isinstance(value, int):
            talker[key] = value - shift
    vocabulary = sizes.codebook_size + SUPPRESSED_TAIL
    half = sizes.talker["head_dim"] // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]  # equal positions: any split is ordinary rotary embedding
    ids = {name: vocabulary - 1 - i for i, name in enumerate(sizes.speakers)}
    talker |= sizes.talker | {
        "vocab_size": vocabulary,
        "text_hidden_size": sizes.text_hidden,
        "codec_language_id": {name: value - shift for name, value in talker["codec_language_id"].items()},
        "spk_id": ids,
        "spk_is_dialect": dict.fromkeys(ids, False),
        "rope_scaling": talker["rope_scaling"] | {"mrope_section": sections},
    }
    talker["code_predictor_config"] |= sizes.predictor | {
        "vocab_size": sizes.codebook_size,
        "layer_types": ["full_attention"] * sizes.predictor["num_hidden_layers"],
    }
    return config


def model_config(sizes: TalkerSizes) -> ModelConfig:
    """The dimensions, as inference reads them from the file."""
    return ModelConfig.of(config_json(sizes), "the talker's sizes")


def write_checkpoint(
    folder: Path, sizes: TalkerSizes, tensors: Mapping[str, Tensor], codec: Codec, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Writes a checkpoint in the Hub layout to `folder`, completely or not at all. tensors: by Hub name. Raises
    CheckpointError if `folder` already has content."""
    with whole_folder(folder) as work:
        shutil.copytree(SMALL_FOLDER, work, ignore=shutil.ignore_patterns(*_MADE_ANEW), dirs_exist_ok=True)
        write_json(work / "config.json", config_json(sizes), sort_keys=False)
        write_codec(work / CODEC_FOLDER, codec, dtype)
        write_weights(work, {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()})
    return folder


_INIT_STD = 0.02
_PREDICTOR = "talker.code_predictor"


class TalkerModel(nn.Module):
    """Talker and code predictor; `w` holds exactly the tensors of model.safetensors."""

    def __init__(self, config: ModelConfig, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.dropout, self.codebook_size = config, dropout, config.predictor.vocab_size
        generator = torch.Generator().manual_seed(seed)

        def initial(name: str, p: Tensor) -> None:
            if p.dim() == 1:
                p.fill_(1.0) if "norm" in name else p.zero_()
                return
            std = _INIT_STD  # text passes through two more layers than codes and would start 1,000 times smaller
            if "text_embedding" in name:
                std = 1.0
            elif "text_projection" in name:
                std = p.shape[1] ** -0.5 * (0.2 if "fc2" in name else 1.0)
            nn.init.normal_(p, 0, std, generator=generator)

        self.w = Weights({name: spec.shape for name, spec in expected_tensors(config).items()}, initial)

    def hidden(self, text: Tensor, control: Tensor, previous: Tensor) -> Tensor:
        """Normed hidden states (B, T, H) of complete sequences. text, control, previous: as in `Batch`."""
        x = F.embedding(text, self.w["talker.model.text_embedding.weight"])
        x = F.silu(self.w.linear("talker.text_projection.linear_fc1", x))
        x = self.w.linear("talker.text_projection.linear_fc2", x)
        control_rows = F.embedding(control.clamp(min=0), self.w["talker.model.codec_embedding.weight"])
        x = x + control_rows * (control >= 0).unsqueeze(-1)
        x = x + self.code_rows(previous.flatten(0, 1)).view_as(x)
        return self.w.stack("talker.model", self.config.talker, x, dropout=self.dropout)

    def predictor_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Logits (N, 15, codebook) of codes 1 to 15, given the talker's hidden state (N, H) and codes (N, 16)."""
        books = NUM_CODEBOOKS - 1
        known = F.embedding(codes[:, :books] + self._offsets(codes)[:books], torch.cat(self._tables()[:books]))
        x = torch.cat((hidden.unsqueeze(1), known.to(hidden.dtype)), 1)
        if f"{_PREDICTOR}.small_to_mtp_projection.weight" in self.w:
            x = self.w.linear(f"{_PREDICTOR}.small_to_mtp_projection", x)
        rows = self.w.stack(f"{_PREDICTOR}.model", self.config.predictor, x, dropout=self.dropout)[:, 1:]
        heads = torch.stack([self.w[f"{_PREDICTOR}.lm_head.{i}.weight"] for i in range(books)])
        return torch.bmm(rows.transpose(0, 1), heads.transpose(1, 2).to(rows.dtype)).transpose(0, 1)

    def code_rows(self, codes: Tensor) -> Tensor:
        """Sum of the sixteen embeddings: codes (N, 16), -1 for none, -> (N, H). Computed as one product with rows of
        zeros and ones, because the gradients of sixteen look-ups would need sixteen sorts."""
        tables = torch.cat(self._tables())
        index = torch.where(codes >= 0, codes + self._offsets(codes), len(tables))
        chosen = torch.zeros(len(codes), len(tables) + 1, dtype=tables.dtype, device=codes.device)
        return chosen.scatter_(1, index, 1.0)[:, :-1] @ tables

    def _tables(self) -> list[Tensor]:
        return [self.w[name][: self.codebook_size] for name in CODE_EMBEDDINGS]

    def _offsets(self, codes: Tensor) -> Tensor:
        return torch.arange(NUM_CODEBOOKS, device=codes.device) * self.codebook_size
