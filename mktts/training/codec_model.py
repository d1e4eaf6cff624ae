"""The trainable codec: encoder, quantiser, decoder, and their tensors under the Hub's names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mktts.checkpoint import CODEC_FOLDER
from mktts.errors import CheckpointError
from mktts.random_checkpoint import write_json, write_weights
from mktts.random_configs import small_files
from mktts.spec import NUM_CODEBOOKS
from mktts.training.codec_decoder import Decoder
from mktts.training.codec_encoder import Encoder
from mktts.training.codec_quantizer import SplitQuantizer
from mktts.training.codec_sizes import VOICE, CodecSizes, config_json, decoder_config

_LAST_BIAS = "encoder.encoder.layers.{}.conv.bias"


class Codec(nn.Module):
    """Audio to 16 codes per frame and back."""

    def __init__(self, sizes: CodecSizes = VOICE) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder = Encoder(config_json(sizes)["encoder_config"])
        self.quantizer = SplitQuantizer(NUM_CODEBOOKS, sizes.codebook_size, sizes.vector)
        self.decoder = Decoder(decoder_config(sizes))

    def forward(self, pcm: Tensor, kept: Tensor | None = None, start: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """PCM (B, T * samples per frame) in [-1, 1] -> PCM, codes (B, T, 16), commitment loss ().

        kept (B,): how many of the fifteen later books each example may use (quantiser dropout); all where None.
        start: set the codebooks from this batch first.
        """
        with torch.autocast(pcm.device.type, enabled=False):
            latent, codes, commitment = self.quantizer(self.encoder(pcm).float(), kept, start)
        return self.decoder(latent), codes, commitment

    @torch.inference_mode()
    def encode(self, pcm: Tensor) -> Tensor:
        """PCM (B, T * samples per frame) -> codes (B, T, 16)."""
        return self.quantizer(self.encoder(pcm))[1]

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, T, 16) -> PCM (B, T * samples per frame), clamped to [-1, 1] as in inference."""
        return self.decoder(self.quantizer.decode(codes)).clamp(-1.0, 1.0)


def hub_tensors(codec: Codec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """speech_tokenizer/model.safetensors of this codec: CPU tensors by Hub name.

    Codebooks are written as vectors with a usage of 1, which is the same codebook, and exact in any dtype. Encoder
    and decoder each hold the codebooks, as on the Hub; projections that a side never uses are the other side's.
    """
    tensors = {f"encoder.{name}": tensor for name, tensor in codec.encoder.state_dict().items()}
    tensors[_LAST_BIAS.format(len(codec.encoder.encoder.layers) - 1)] = _centred_bias(codec)
    tensors |= {f"decoder.{name}": tensor for name, tensor in codec.decoder.state_dict().items()}
    for chain, decoder_name, encoder_name in (
        (codec.quantizer.first, "rvq_first", "semantic"),
        (codec.quantizer.rest, "rvq_rest", "acoustic"),
    ):
        ours = f"decoder.quantizer.{decoder_name}."
        mimi = f"encoder.quantizer.{encoder_name}_residual_vector_quantizer."
        for prefix in (ours, mimi):
            tensors[prefix + "input_proj.weight"] = chain.input_proj.weight / chain.deviation
            tensors[prefix + "output_proj.weight"] = chain.output_proj.weight
        for i, book in enumerate(chain.books):
            one = torch.ones_like(book.usage)
            tensors[f"{ours}vq.layers.{i}._codebook.cluster_usage"] = one
            tensors[f"{ours}vq.layers.{i}._codebook.embedding_sum"] = book.vectors
            tensors[f"{mimi}layers.{i}.codebook.initialized"] = one[:1]
            tensors[f"{mimi}layers.{i}.codebook.cluster_usage"] = one
            tensors[f"{mimi}layers.{i}.codebook.embed_sum"] = book.vectors
    return {name: tensor.detach().to("cpu", dtype).clone() for name, tensor in sorted(tensors.items())}


def _centred_bias(codec: Codec) -> Tensor:
    """Bias of the encoder's last convolution that makes up for the means which `Chain.normed` takes away.

    Constants pass the down-sampling as the sum of its taps, so this is one linear system; the Hub's projections have no
    bias of their own.
    """
    chains = (codec.quantizer.first, codec.quantizer.rest)
    taps = codec.encoder.downsample.conv.weight.detach().double().sum(2)
    projections = torch.cat([chain.input_proj.weight.detach()[..., 0] for chain in chains]).double()
    means = torch.cat([chain.mean for chain in chains]).double()
    bias = codec.encoder.encoder.layers[-1].conv.bias.detach()
    return bias - torch.linalg.solve(projections @ taps, means).to(bias.dtype)


def write_codec(folder: Path, codec: Codec, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `folder` as a checkpoint's speech_tokenizer/: configuration, preprocessor and weights.

    Raises CheckpointError where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in small_files("tiny", "custom_voice", False).items():
            if name.startswith(f"{CODEC_FOLDER}/"):  # what is beside the configuration has no sizes in it
                write_json(folder / Path(name).name, content)
        write_json(folder / "config.json", config_json(codec.sizes))
        write_weights(folder, hub_tensors(codec, dtype), 1)
    except OSError as error:
        raise CheckpointError(f"{folder}: expected to write a speech tokenizer there, but: {error}") from None
