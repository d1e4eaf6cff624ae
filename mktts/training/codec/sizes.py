"""Dimensions of the small trained codec, and the speech_tokenizer/config.json that says them in the Hub's words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mktts.checkpoint.random.make import Json, small_files
from mktts.spec import NUM_CODEBOOKS, CodecConfig


@dataclass(frozen=True)
class CodecSizes:
    """Widths and depths of the decoder. Strides, kernels and layer kinds are those of the released codec."""

    codebook_size: int = 256
    components: int = 64  # of the analysis, dimensions of one codebook entry
    latent: int = 96
    hidden: int = 128  # decoder transformer
    feed_forward: int = 256
    heads: int = 4
    head_dim: int = 32
    layers: int = 2
    window: int = 24  # frames; shorter than a training crop, so that no distance is first met at inference
    decoder: int = 192  # channels at 50 Hz, halved by each of the four up-sampling blocks
    filters: int = 2  # channels of an encoder that is neither trained nor written, but upstream builds one
    noise_books: int = 0  # the last ones: their codes are drawn, not measured
    noise: int = 0  # dimensions of an entry that only those books fill

    @property
    def vector(self) -> int:
        """Dimensions of one codebook entry."""
        return self.components + self.noise

    @property
    def encoded(self) -> int:
        """Channels of the decoder's input."""
        return 2 * self.vector


VOICE = CodecSizes(noise_books=2, noise=64)
WIDE = replace(VOICE, latent=128, hidden=192, feed_forward=384, heads=6, layers=3)  # 6 % slower by frame, on a CPU
TINY = CodecSizes(32, 8, 16, 16, 32, 2, 8, 1, 6, 32, 2, noise_books=2, noise=8)  # for tests


def config_json(sizes: CodecSizes) -> Json:
    """speech_tokenizer/config.json: the released one with these sizes.

    Codes are made by the analysis (`mktts.training.codec.analysis`), so that there is no encoder; upstream's class
    needs the sizes of one, and builds it. They are as small as they can be beside the decoder's.
    """
    released = small_files("0.6b", "custom_voice", full_codec=True)["speech_tokenizer/config.json"]
    released["decoder_config"] |= {
        "codebook_size": sizes.codebook_size,
        "codebook_dim": sizes.encoded,
        "vector_quantization_hidden_dimension": sizes.encoded,
        "latent_dim": sizes.latent,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": sizes.layers,
        "sliding_window": sizes.window,
        "decoder_dim": sizes.decoder,
    }
    released["encoder_config"] |= {
        "codebook_size": sizes.codebook_size,
        "codebook_dim": sizes.vector,
        "vector_quantization_hidden_dimension": sizes.vector,
        "hidden_size": sizes.encoded,
        "intermediate_size": sizes.encoded,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": sizes.encoded,
        "num_filters": sizes.filters,
        "num_hidden_layers": 0,
        "num_quantizers": NUM_CODEBOOKS,
        "upsample_groups": sizes.encoded,
    }
    return released


def decoder_config(sizes: CodecSizes) -> CodecConfig:
    """The decoder's dimensions as inference reads them from the file."""
    raw = config_json(sizes)["decoder_config"]
    names = CodecConfig.__dataclass_fields__.keys() - {"dilations"}
    return CodecConfig(**{n: tuple(raw[n]) if isinstance(raw[n], list) else raw[n] for n in names})
