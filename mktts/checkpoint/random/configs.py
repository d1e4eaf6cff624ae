"""The small JSON files of a checkpoint in the Hub layout, at any size.

Values are those of the released Qwen3-TTS-12Hz checkpoints (Apache-2.0); the tiny sizes change widths and depths only.
"""

from __future__ import annotations

from mktts.checkpoint.random.codec_config import Json, codec_config
from mktts.errors import CheckpointError
from mktts.spec import CODEBOOK_SIZE, MODEL_TYPES, NUM_CODEBOOKS, SAMPLE_RATE_HZ

SIZES = ("tiny", "tiny-projected", "0.6b", "1.7b")

LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
}
DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
SPEAKERS = {
    "serena": 3066,
    "vivian": 3065,
    "uncle_fu": 3010,
    "ryan": 3061,
    "aiden": 2861,
    "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875,
    "dylan": 2878,
}
SPEAKER_DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}

_TINY_TALKER: Json = {
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "text_hidden_size": 48,
    "mrope_section": [6, 5, 5],  # sums to head_dim / 2
}
_TALKER: dict[str, Json] = {
    "tiny": {"hidden_size": 64, **_TINY_TALKER},
    "tiny-projected": {"hidden_size": 128, **_TINY_TALKER},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144},
}
_TINY_PREDICTOR: Json = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def small_files(size: str, model_type: str, full_codec: bool) -> dict[str, Json]:
    """Relative path -> content of every JSON file but the tokenizer's.

    Raises CheckpointError listing the allowed words for an unknown `size` or `model_type`.
    """
    if size not in SIZES:
        raise CheckpointError(f"size must be one of {', '.join(SIZES)}, found {size!r}")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(f"type must be one of {', '.join(MODEL_TYPES)}, found {model_type!r}")
    return {
        "config.json": _model(size, model_type),
        "configuration.json": {"framework": "Pytorch", "task": "text-to-speech"},
        "generation_config.json": {
            "do_sample": True,
            "repetition_penalty": 1.05,
            "temperature": 0.9,
            "top_p": 1.0,
            "top_k": 50,
            "subtalker_dosample": True,
            "subtalker_temperature": 0.9,
            "subtalker_top_p": 1.0,
            "subtalker_top_k": 50,
            "max_new_tokens": 8192,
        },
        "preprocessor_config.json": {
            "padding_side": "left",
            "padding_value": 0.0,
            "processor_class": "Qwen3TTSProcessor",
            "return_attention_mask": True,
        },
        "speech_tokenizer/config.json": codec_config(full_codec),
        "speech_tokenizer/configuration.json": {
            "framework": "pytorch",
            "task": "feature-extraction",
            "allow_remote": True,
        },
        "speech_tokenizer/preprocessor_config.json": {
            "chunk_length_s": None,
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "overlap": None,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "sampling_rate": SAMPLE_RATE_HZ,
        },
    }


def _model(size: str, model_type: str) -> Json:
    talker = _talker(size, model_type)
    speaker_encoder = {"enc_dim": talker["hidden_size"], "sample_rate": SAMPLE_RATE_HZ}
    projected = talker["hidden_size"] != talker["code_predictor_config"]["hidden_size"]
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "assistant_token_id": 77091,
        "im_end_token_id": 151645,
        "im_start_token_id": 151644,
        "tts_bos_token_id": 151672,
        "tts_eos_token_id": 151673,
        "tts_pad_token_id": 151671,
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7" if projected else "0b6",  # upstream drops `instruct` for "0b6"
        "tts_model_type": model_type,
        **({"speaker_encoder_config": speaker_encoder} if MODEL_TYPES[model_type].clones else {}),
        "talker_config": talker,
        "transformers_version": "4.57.3",
    }


def _talker(size: str, model_type: str) -> Json:
    widths = dict(_TALKER[size])
    mrope_section = widths.pop("mrope_section", [24, 20, 20])
    named = MODEL_TYPES[model_type].speakers
    return {
        "model_type": "qwen3_tts_talker",
        "attention_bias": False,
        "attention_dropout": 0,
        "code_predictor_config": _predictor(size),
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_language_id": LANGUAGES | DIALECTS if named else dict(LANGUAGES),
        "codec_nothink_id": 2155,
        "codec_pad_id": 2148,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "spk_id": dict(SPEAKERS) if named else {},
        "spk_is_dialect": {name: SPEAKER_DIALECTS.get(name, False) for name in SPEAKERS} if named else {},
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "num_attention_heads": 16,
        "num_code_groups": NUM_CODEBOOKS,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "position_id_per_seconds": 13,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": mrope_section,
            "rope_type": "default",
            "type": "default",
        },
        "rope_theta": 1000000,
        "sliding_window": None,
        "text_hidden_size": 2048,
        "text_vocab_size": 151936,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 3072,
        **widths,
    }


def _predictor(size: str) -> Json:
    config: Json = {
        "model_type": "qwen3_tts_talker_code_predictor",
        "attention_bias": False,
        "attention_dropout": 0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_code_groups": NUM_CODEBOOKS,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": CODEBOOK_SIZE,
        **(_TINY_PREDICTOR if size.startswith("tiny") else {}),
    }
    return config | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
