"""speech_tokenizer/config.json of a checkpoint in the Hub layout, full size or tiny.

Values are those of the released Qwen3-TTS-12Hz checkpoints (Apache-2.0); the tiny one changes widths and depths only.
"""

from __future__ import annotations

from typing import Any

from mktts.spec import CODEBOOK_SIZE, FRAME_RATE_HZ, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

Json = dict[str, Any]

_TINY_DECODER: Json = {
    "latent_dim": 64,
    "codebook_dim": 32,
    "decoder_dim": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "sliding_window": 12,
    "vector_quantization_hidden_dimension": 32,
}
_TINY_ENCODER: Json = {
    "codebook_dim": 16,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_filters": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "upsample_groups": 64,
    "vector_quantization_hidden_dimension": 16,
}


def codec_config(full: bool) -> Json:
    """The released configuration (`full`), or one with the same structure and a fraction of its width and depth."""
    decoder: Json = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "latent_dim": 1024,
        "codebook_dim": 512,
        "codebook_size": CODEBOOK_SIZE,
        "decoder_dim": 1536,
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 16,
        "num_quantizers": NUM_CODEBOOKS,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "semantic_codebook_size": 4096,  # published, and ignored by upstream: every codebook has codebook_size entries
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512,
    }
    encoder: Json = {
        "_frame_rate": FRAME_RATE_HZ,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_channels": 1,
        "codebook_dim": 256,
        "codebook_size": CODEBOOK_SIZE,
        "compress": 2,
        "dilation_growth_rate": 2,
        "dtype": "float32",
        "head_dim": 64,
        "hidden_act": "gelu",
        "hidden_size": 512,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "norm_eps": 1e-05,
        "normalize": False,
        "num_attention_heads": 8,
        "num_filters": 64,
        "num_hidden_layers": 8,
        "num_key_value_heads": 8,
        "num_quantizers": 32,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "pad_mode": "constant",
        "residual_kernel_size": 3,
        "rope_theta": 10000.0,
        "sampling_rate": SAMPLE_RATE_HZ,
        "sliding_window": 250,
        "transformers_version": "4.57.0.dev0",
        "trim_right_ratio": 1.0,
        "upsample_groups": 512,
        "upsampling_ratios": [8, 6, 5, 4],
        "use_cache": False,
        "use_causal_conv": True,
        "use_conv_shortcut": False,
        "use_streaming": False,
        "vector_quantization_hidden_dimension": 256,
    }
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": NUM_CODEBOOKS,
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "decoder_config": decoder if full else decoder | _TINY_DECODER,
        "encoder_config": encoder if full else encoder | _TINY_ENCODER,
        "transformers_version": "4.57.3",
    }
