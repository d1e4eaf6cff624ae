"""Constants of Qwen3-TTS 12 Hz (from its model card and `speech_tokenizer/config.json`), defined here only, and the
configuration of one checkpoint, read from its `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from mktts.common import one_of, read_object
from mktts.errors import CheckpointError

SAMPLE_RATE_HZ = 24_000
FRAME_RATE_HZ = 12.5
SAMPLES_PER_FRAME = 1_920
NUM_CODEBOOKS = 16
CODEBOOK_SIZE = 2_048
FRAME_MS = 1_000 / FRAME_RATE_HZ
AUDIBLE_DBFS = -45.0  # 10 ms of audio are "audible" if their RMS exceeds this, relative to 1.0; see mktts.audio
AUDIBLE_WINDOW_MS = 10
AUDIBLE_WINDOW_SAMPLES = SAMPLE_RATE_HZ * AUDIBLE_WINDOW_MS // 1_000

assert SAMPLE_RATE_HZ / SAMPLES_PER_FRAME == FRAME_RATE_HZ

TOP_FOLDER = "; pass the checkpoint's top folder"
SUPPRESSED_TAIL = 1_024  # the last 1,024 talker ids are control ids, of which only end-of-speech may be sampled
MIN_NEW_FRAMES = 2  # upstream's min_new_tokens: end-of-speech is suppressed in the first two frames


@dataclass(frozen=True)
class ModelType:
    """The capabilities of one type of checkpoint; MODEL_TYPES lists all types.

    name: `tts_model_type` in config.json. upstream_name: Qwen's spelling.
    upstream_method: the method of qwen_tts.Qwen3TTSModel that speaks with such a checkpoint.
    speakers: has built-in speakers, the first of which is the default.
    clones: speaks with the voice of a reference, which every request must provide.
    designs: `instruct` describes the voice. instruct_sizes: the model sizes that follow `instruct`.
    layout: the default prompt layout."""

    name: str
    upstream_name: str
    upstream_method: str
    speakers: bool = False
    clones: bool = False
    designs: bool = False
    instruct_sizes: tuple[str, ...] = ()
    layout: Literal["whole", "streaming"] = "whole"


MODEL_TYPES = {
    kind.name: kind
    for kind in (
        ModelType("base", "Base", "generate_voice_clone", clones=True, layout="streaming"),
        # upstream drops `instruct` for the 0.6B CustomVoice checkpoint
        ModelType("custom_voice", "CustomVoice", "generate_custom_voice", speakers=True, instruct_sizes=("1b7",)),
        ModelType("voice_design", "VoiceDesign", "generate_voice_design", designs=True, instruct_sizes=("0b6", "1b7")),
    )
}


@dataclass(frozen=True)
class StackConfig:
    """Dimensions of one Qwen3 decoder stack (talker or code predictor)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of bf16 keys and values for one position."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 2


@dataclass(frozen=True)
class TextIds:
    """Ids on the text side (Qwen byte-pair vocabulary) that frame a prompt."""

    im_start: int
    im_end: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclass(frozen=True)
class CodecIds:
    """Control ids on the codec side (talker vocabulary)."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


# ISO 639 codes -> the names of the languages in the released checkpoints.
LANGUAGE_CODES = {
    "zh": "chinese", "cmn": "chinese", "en": "english", "fr": "french", "de": "german", "it": "italian",
    "ja": "japanese", "ko": "korean", "pt": "portuguese", "ru": "russian", "es": "spanish",
}  # fmt: skip


def language_named(word: str) -> str:
    """The checkpoints' name of a language: "English", "en", "en-US" -> "english"; any other word in lower case."""
    word = word.strip().lower()
    return LANGUAGE_CODES.get(word.replace("_", "-").split("-")[0], word)


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a checkpoint's talker and code predictor; read it with `ModelConfig.load(folder)`."""

    type: ModelType
    model_size: str
    talker: StackConfig
    predictor: StackConfig
    text_vocab_size: int
    text_hidden_size: int
    text_ids: TextIds
    codec_ids: CodecIds
    languages: dict[str, int]
    speakers: dict[str, int]
    dialects: dict[str, str | bool]
    speaker_embedding_size: int | None

    @cached_property
    def default_speaker(self) -> str | None:
        """The speaker of a request that names none: the checkpoint's first, or None without built-in speakers."""
        return next(iter(self.speakers), None)

    @cached_property
    def spoken_languages(self) -> list[str]:
        """Languages a request may name, "auto" first; no dialects: upstream takes those from the speaker only."""
        return ["auto", *sorted(name for name in self.languages if "dialect" not in name)]

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Reads `folder/config.json`. Raises CheckpointError naming the missing or wrong key."""
        path = folder / "config.json"
        return cls.of(read_object(path, hint=TOP_FOLDER), str(path))

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> ModelConfig:
        """Builds the configuration from the content of the config.json at `where`. Raises CheckpointError as `load`."""
        talker = _get(raw, "talker_config", dict, where)
        name = _get(raw, "tts_model_type", str, where)
        one_of(f"{where}: tts_model_type", name, MODEL_TYPES, CheckpointError)
        model_type = MODEL_TYPES[name]
        groups = _get(talker, "num_code_groups", int, where)
        if groups != NUM_CODEBOOKS:
            wrong = f"num_code_groups must be {NUM_CODEBOOKS}, found {groups}"
            raise CheckpointError(f"{where}: {wrong}: not a 12 Hz checkpoint")
        encoder = raw.get("speaker_encoder_config") if model_type.clones else None
        codec_keys = {f.name: f"codec_{f.name}_id" for f in fields(CodecIds)} | {"eos": "codec_eos_token_id"}
        return cls(
            type=model_type,
            model_size=_get(raw, "tts_model_size", str, where),
            talker=stack_config(talker, where),
            predictor=stack_config(_get(talker, "code_predictor_config", dict, where), where),
            text_vocab_size=_get(talker, "text_vocab_size", int, where),
            text_hidden_size=_get(talker, "text_hidden_size", int, where),
            text_ids=TextIds(**{f.name: _get(raw, f"{f.name}_token_id", int, where) for f in fields(TextIds)}),
            codec_ids=CodecIds(**{name: _get(talker, key, int, where) for name, key in codec_keys.items()}),
            languages=dict(_get(talker, "codec_language_id", dict, where)),
            speakers=dict(_get(talker, "spk_id", dict, where)),
            dialects=dict(_get(talker, "spk_is_dialect", dict, where)),
            speaker_embedding_size=_get(encoder, "enc_dim", int, where) if encoder else None,
        )

    @property
    def takes_instruct(self) -> bool:
        """Whether this checkpoint follows `instruct`."""
        return self.model_size in self.type.instruct_sizes


@dataclass(frozen=True)
class CodecConfig:
    """Dimensions of the codec decoder: `speech_tokenizer/config.json`, key `decoder_config`."""

    codebook_dim: int
    codebook_size: int
    hidden_size: int
    intermediate_size: int
    head_dim: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    num_quantizers: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    dilations: ClassVar[tuple[int, ...]] = (1, 3, 9)  # of residual units; fixed in upstream's decoder block

    @classmethod
    def of(cls, decoder: dict[str, Any], where: str) -> CodecConfig:
        """Builds it from the `decoder_config` of the file `where`. Raises CheckpointError naming a missing key."""
        found = {f.name: _get(decoder, f.name, object, where) for f in fields(cls)}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

    @classmethod
    def load(cls, folder: Path) -> CodecConfig:
        """Reads `folder/speech_tokenizer/config.json`. Raises CheckpointError naming the value that does not fit."""
        path = folder / "speech_tokenizer" / "config.json"
        raw, where = read_object(path, hint=TOP_FOLDER), str(path)
        config = cls.of(_get(raw, "decoder_config", dict, where), where)
        upsampling = math.prod((*config.upsample_rates, *config.upsampling_ratios))
        for name, expected, found in (
            ("output_sample_rate", SAMPLE_RATE_HZ, _get(raw, "output_sample_rate", int, where)),
            ("decode_upsample_rate", SAMPLES_PER_FRAME, _get(raw, "decode_upsample_rate", int, where)),
            ("product of the up-sampling rates", SAMPLES_PER_FRAME, upsampling),
            ("num_quantizers", NUM_CODEBOOKS, config.num_quantizers),
        ):
            if found != expected:
                wrong = f"{name} must be {expected}, found {found}"
                raise CheckpointError(f"{where}: {wrong}: not a 12 Hz speech tokenizer")
        return config


def stack_config(raw: dict[str, Any], where: str) -> StackConfig:
    """Reads one stack's keys. Raises CheckpointError naming a key that is missing or not a number above 0."""
    for f in fields(StackConfig):
        value, whole = _get(raw, f.name, object, where), f.type == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < math.inf:
            kind = "whole number" if whole else "number"
            raise CheckpointError(f"{where}: {f.name} must be a {kind} above 0, found {value!r}")
    return StackConfig(**{f.name: raw[f.name] for f in fields(StackConfig)})


def _get(raw: dict[str, Any], key: str, kind: Any, where: str) -> Any:
    if key not in raw:
        raise CheckpointError(f"{where}: expected key {key!r}, found only {sorted(raw)}")
    if not isinstance(raw[key], kind):
        raise CheckpointError(f"{where}: {key} must be {kind}, found {raw[key]!r}")
    return raw[key]
