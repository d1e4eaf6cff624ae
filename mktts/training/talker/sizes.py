"""Dimensions of the small voice's talker and code predictor, and its JSON files in the Hub's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mktts.checkpoint.random.make import Json, small_files
from mktts.spec import CODEBOOK_SIZE, SUPPRESSED_TAIL

SPEAKERS = ("slt", "rms", "awb")  # their ids count down from the vocabulary's end
LISTED = ("rms", "awb", "slt")  # in config.json: programs take the first where none is named, and rms is heard best
LANGUAGE = "english"

# Sampling defaults of the checkpoint: a small model's tails are noise, so both draws are cut closer than the released
# 0.9 / 50. No repetition penalty: silence and sustained vowels repeat codes, and 256 codes a book recur soon anyway.
TEMPERATURE, TOP_K = 0.3, 20
PREDICTOR_TEMPERATURE, PREDICTOR_TOP_K = 0.3, 20
REPETITION_PENALTY = 1.0
MAX_NEW_FRAMES = 512  # 41 s, of `max_new_tokens`
MAX_CHARS_PER_SEGMENT = 120  # hardly a text to learn from is longer, and from 130 on the voice loses its place


@dataclass(frozen=True)
class StackSizes:
    """One decoder stack."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class TalkerSizes:
    """Everything config.json needs that is not fixed by the architecture. Text ids follow the tokenizer."""

    talker: StackSizes
    predictor: StackSizes
    codebook_size: int
    text_hidden: int
    merges: int  # of the byte-pair vocabulary

    @property
    def shift(self) -> int:
        """How far control ids move down: they still follow the codes."""
        return CODEBOOK_SIZE - self.codebook_size


# 8.5 million parameters. A layer more, or a wider predictor, costs two CPU cores more than its share of 0.30 of real
# time: a frame took 13.8 ms of one core's time where the smaller voice took 11.9 (torch 2.13, one thread, medians).
VOICE = TalkerSizes(StackSizes(256, 768, 6, 4, 2, 64), StackSizes(256, 384, 2, 4, 2, 64), 256, 128, 3_000)
SMALL = TalkerSizes(StackSizes(256, 384, 5, 4, 2, 64), StackSizes(256, 256, 2, 4, 2, 64), 256, 128, 1_800)
TINY = TalkerSizes(StackSizes(64, 128, 2, 4, 2, 32), StackSizes(64, 64, 1, 4, 2, 32), 32, 32, 60)  # for tests


def speaker_ids(vocabulary: int, speakers: Sequence[str]) -> dict[str, int]:
    """Name -> control id, in the order in which config.json lists them; the released voice's keep their ids."""
    ours = set(speakers) <= set(SPEAKERS)
    order = SPEAKERS if ours else tuple(speakers)
    return {name: vocabulary - 1 - order.index(name) for name in (LISTED if ours else speakers)}


def config_files(sizes: TalkerSizes, text_ids: dict[str, int], speakers: Sequence[str] = SPEAKERS) -> dict[str, Json]:
    """Relative path -> content of config.json, generation_config.json and the files that never change.

    text_ids: special token (and "assistant") -> id, and "" -> rows of the text table. speech_tokenizer/config.json is
    the codec's business. speakers: names; other than the released voice's, the first is what programs take.
    """
    files = small_files("0.6b", "custom_voice", full_codec=True)
    del files["speech_tokenizer/config.json"]
    config = files["config.json"]
    config |= {
        "assistant_token_id": text_ids["assistant"],
        "im_start_token_id": text_ids["<|im_start|>"],
        "im_end_token_id": text_ids["<|im_end|>"],
        "tts_bos_token_id": text_ids["<tts_text_bos>"],
        "tts_eos_token_id": text_ids["<tts_text_eod>"],
        "tts_pad_token_id": text_ids["<tts_pad>"],
    }
    talker = config["talker_config"]
    for key, value in talker.items():
        if key.startswith("codec_") and isinstance(value, int):
            talker[key] = value - sizes.shift
    vocabulary = sizes.codebook_size + SUPPRESSED_TAIL
    half = sizes.talker.head_dim // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]  # equal positions: any split is ordinary rotary embedding
    talker |= _stack(sizes.talker) | {
        "vocab_size": vocabulary,
        "text_hidden_size": sizes.text_hidden,
        "text_vocab_size": text_ids[""],
        "codec_language_id": {LANGUAGE: talker["codec_language_id"][LANGUAGE] - sizes.shift},
        "spk_id": (ids := speaker_ids(vocabulary, speakers)),
        "spk_is_dialect": dict.fromkeys(ids, False),
        "rope_scaling": talker["rope_scaling"] | {"mrope_section": sections},
    }
    talker["code_predictor_config"] |= _stack(sizes.predictor) | {
        "vocab_size": sizes.codebook_size,
        "layer_types": ["full_attention"] * sizes.predictor.layers,
    }
    files["generation_config.json"] |= {
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "subtalker_temperature": PREDICTOR_TEMPERATURE,
        "subtalker_top_k": PREDICTOR_TOP_K,
        "repetition_penalty": REPETITION_PENALTY,
        "max_new_tokens": MAX_NEW_FRAMES,
        "max_chars_per_segment": MAX_CHARS_PER_SEGMENT,
        "text_front_end": LANGUAGE,
    }
    return files


def _stack(sizes: StackSizes) -> Json:
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
