"""The codec: fixed analysis, quantiser, a decoder that learns, and its tensors under the Hub's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mktts.checkpoint.open import CODEC_FOLDER
from mktts.checkpoint.random.make import small_files, write_weights
from mktts.common import write_json
from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS
from mktts.training.codec.analysis import Analysis
from mktts.training.codec.decoder import Decoder
from mktts.training.codec.quantizer import SplitQuantizer
from mktts.training.codec.sizes import VOICE, CodecSizes, config_json, decoder_config


class Codec(nn.Module):
    """Audio to 16 codes per frame by a fixed analysis, and back by the decoder, which learns."""

    def __init__(self, sizes: CodecSizes = VOICE) -> None:
        super().__init__()
        self.sizes = sizes
        self.analysis = Analysis(sizes.components)
        self.quantizer = SplitQuantizer(
            NUM_CODEBOOKS, sizes.codebook_size, sizes.components, sizes.noise_books, sizes.noise
        )
        self.decoder = Decoder(decoder_config(sizes))

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, T, 16) -> PCM (B, T * samples per frame), not clamped."""
        return self.decoder(self.quantizer(codes))

    def fitted_parts(self) -> dict[str, Tensor]:
        """What `mktts.training.codec.fit` sets and no training step changes, by its name in the state."""
        return {
            name: part
            for whole in ("analysis", "quantizer")
            for name, part in getattr(self, whole).named_buffers(whole)
        }

    @torch.inference_mode()
    def encode(self, pcm: Tensor) -> Tensor:
        """PCM (B, T * samples per frame) -> codes (B, T, 16)."""
        return self.quantizer.encode(self.analysis(pcm))

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, T, 16) -> PCM (B, T * samples per frame), clamped to [-1, 1] as in inference."""
        return self(codes).clamp(-1.0, 1.0)


def hub_tensors(codec: Codec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The decoder's half of speech_tokenizer/model.safetensors: CPU tensors by Hub name.

    Codebooks are written as vectors with a usage of 1, which is the same codebook, and exact in any dtype. The layout's
    input projections serve encoding only: they are zero, and there is no encoder.
    """
    tensors = {f"decoder.{name}": tensor for name, tensor in codec.decoder.state_dict().items()}
    for chain, name in ((codec.quantizer.first, "rvq_first"), (codec.quantizer.rest, "rvq_rest")):
        prefix = f"decoder.quantizer.{name}."
        tensors[prefix + "output_proj.weight"] = chain.output_proj.weight
        tensors[prefix + "input_proj.weight"] = torch.zeros(chain.output_proj.weight.transpose(0, 1).shape)
        for i, book in enumerate(chain.books):
            tensors[f"{prefix}vq.layers.{i}._codebook.cluster_usage"] = torch.ones(len(book))
            tensors[f"{prefix}vq.layers.{i}._codebook.embedding_sum"] = book
    return {name: tensor.detach().to("cpu", dtype).clone() for name, tensor in sorted(tensors.items())}


def noise_books(tensors: Mapping[str, Tensor]) -> int:
    """How many of the last codebooks carry noise: they fill other dimensions than the first one. Tensors by Hub name.

    0 for a codec that was not trained here.
    """
    first = tensors["decoder.quantizer.rvq_first.vq.layers.0._codebook.embedding_sum"].float().abs().sum(0) > 0
    count = 0
    for i in reversed(range(NUM_CODEBOOKS - 1)):
        entries = tensors[f"decoder.quantizer.rvq_rest.vq.layers.{i}._codebook.embedding_sum"].float()
        if entries[:, first].any() or not entries.any():
            break
        count += 1
    return count


def write_codec(folder: Path, codec: Codec, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `folder` as a checkpoint's speech_tokenizer/: configuration, preprocessor and weights.

    Raises CheckpointError where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in small_files("tiny", "custom_voice", False).items():
            if name.startswith(f"{CODEC_FOLDER}/"):  # what is beside the configuration has no sizes in it
                write_json(folder / Path(name).name, content, sort_keys=False)
        write_json(folder / "config.json", config_json(codec.sizes), sort_keys=False)
        write_weights(folder, hub_tensors(codec, dtype))
    except OSError as error:
        raise CheckpointError(f"{folder}: expected to write a speech tokenizer there, but: {error}") from None
