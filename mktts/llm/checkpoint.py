"""Opens a Qwen3 text checkpoint (such as Qwen/Qwen3-0.6B): a folder in the Hub layout, a Hub id, or a random one.

As with speech checkpoints, `open_text_checkpoint` checks everything in the file headers, and weights are memory-mapped
on request. Settings that the decoder does not support are refused by name, never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.checkpoint import files as weight_files
from mktts.checkpoint.files import MARKER, WeightFiles
from mktts.checkpoint.open import resolve
from mktts.checkpoint.random.make import made_once, whole_folder, write_files, write_weights
from mktts.checkpoint.random.weights import HEAD_LOGIT_STD, PEAK_LOGIT, random_tensors, shrink_branches
from mktts.checkpoint.tensors import TensorSpecs, check, stack_shapes, tensor_specs
from mktts.common import cache_folder, read_object
from mktts.errors import CheckpointError, SamplingError
from mktts.llm.tokens import TextVocabulary
from mktts.model.sampling import Choice
from mktts.spec import StackConfig, stack_config

RECIPE = 1  # increase it when the same arguments give other bytes, so that cached checkpoints are made again
# The released JSON files (Apache-2.0), and the keys of config.json that each size of random checkpoints changes.
_RELEASED = read_object(Path(__file__).with_name("qwen3_0.6b.json"))
SIZES: dict[str, dict[str, Any]] = _RELEASED["sizes"]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
STACK = "model."  # prefix of the layers and the final norm

# The only supported values, by config.json key; any other value changes the arithmetic. A missing key means this value,
# as in transformers' Qwen3Config.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
    "quantization_config": None,
}
# Keys of generation_config.json that change the distribution but that Choice lacks, with their neutral values.
_NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None, "typical_p": 1.0, "num_beams": 1}


@dataclass(frozen=True)
class TextConfig:
    """The configuration of a text model. tied: whether the head is the embedding. eos_ids: the ids that end a text.
    choice: the checkpoint's default sampling."""

    stack: StackConfig
    tied: bool
    eos_ids: tuple[int, ...]
    choice: Choice

    @classmethod
    def load(cls, folder: Path) -> TextConfig:
        """Reads config.json and generation_config.json. Raises CheckpointError with the key at fault."""
        where, raw = str(folder / "config.json"), read_object(folder / "config.json")
        if (found := raw.get("model_type")) != "qwen3":
            raise CheckpointError(
                f"{where}: model_type must be 'qwen3', found {found!r}. TextDecoder reads Qwen3 text models; "
                "speech checkpoints go to Synthesizer."
            )
        for key, value in _FIXED.items():
            if raw.get(key, value) != value:
                raise CheckpointError(f"{where}: {key} must be {value!r}, found {raw[key]!r}: not supported")
        kinds = raw.get("layer_types") or []
        if set(kinds) - {"full_attention"}:
            raise CheckpointError(f"{where}: layer_types must all be 'full_attention', found {sorted(set(kinds))}")
        tied = raw.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise CheckpointError(f"{where}: tie_word_embeddings must be true or false, found {tied!r}")
        stack = _stack(raw, where)
        path = folder / "generation_config.json"
        generation = read_object(path) if path.is_file() else {}
        source, given = (path, generation) if generation.get("eos_token_id") is not None else (where, raw)
        value, size = given.get("eos_token_id"), stack.vocab_size  # the id is None, an int, or a list
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < size for i in ids):
            raise CheckpointError(f"{source}: eos_token_id must be ids below vocab_size {size}, found {value!r}")
        return cls(stack, tied, tuple(ids), _choice(generation, path))


@dataclass(frozen=True)
class TextCheckpoint:
    """A validated text checkpoint on disk. It holds no weights; `tensors()` maps them."""

    folder: Path
    config: TextConfig
    revision: str | None
    is_random: bool
    files: WeightFiles = field(repr=False)

    def tensors(self) -> dict[str, Tensor]:
        """The weights by Hub name: CPU views of the mapped files, in their dtype. Treat them as read-only. For a tied
        checkpoint a stored copy of the head, as in the released 0.6B, is left out."""
        return {name: t for name, t in self.files.map().items() if name != HEAD or not self.config.tied}

    def tokenizer(self) -> TextVocabulary:
        """The checkpoint's tokenizer. Raises CheckpointError if its files are unusable or have too many tokens."""
        return TextVocabulary(self.folder, self.config.stack.vocab_size)


def open_text_checkpoint(source: str | Path | TextCheckpoint) -> TextCheckpoint:
    """Opens and validates a text checkpoint.

    source: a folder, a Hub id such as "Qwen/Qwen3-0.6B", which is pinned, or "random:SIZE[:margin]", created in the
        cache on first use.

    Raises CheckpointError, which says what was expected, what was found and what to do, with the names of tensors."""
    if isinstance(source, TextCheckpoint):
        return source
    expected = "a folder, a Hub id like Qwen/Qwen3-0.6B, or random:tiny"
    refusal = f"text checkpoint {str(source)!r}: expected {expected}"
    folder, revision = resolve(source, None, ensure_named, refusal)
    config = TextConfig.load(folder)
    files = weight_files.find(folder)
    tensors = expected_text_tensors(config)
    if config.tied and HEAD in files.tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    check(files.tensors, tensors, str(folder))
    return TextCheckpoint(folder, config, revision, (folder / MARKER).is_file(), files)


def expected_text_tensors(config: TextConfig) -> TensorSpecs:
    """The expected tensors of a text model: embedding, stack, and the head unless it is tied."""
    stack = config.stack
    shapes = {EMBEDDING: (stack.vocab_size, stack.hidden_size)} | stack_shapes(STACK, stack)
    if not config.tied:
        shapes[HEAD] = (stack.vocab_size, stack.hidden_size)
    return tensor_specs(shapes)


def _stack(raw: dict[str, Any], where: str) -> StackConfig:
    rope = raw.get("rope_parameters")  # the key of rotary settings in transformers 5
    if rope is not None:
        if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"{where}: rope_parameters must be of rope_type 'default', found {rope!r}")
        raw = raw | rope
    stack = stack_config(raw, where)
    if stack.num_attention_heads % stack.num_key_value_heads:
        found = f"{stack.num_attention_heads} and {stack.num_key_value_heads}"
        raise CheckpointError(f"{where}: num_attention_heads must be a multiple of num_key_value_heads, found {found}")
    if stack.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim must be even for rotary positions, found {stack.head_dim}")
    return stack


def _choice(raw: Mapping[str, Any], path: Path) -> Choice:
    """The sampling in generation_config.json, with transformers' defaults for missing keys. Raises CheckpointError for
    a value out of range, or a setting that Choice lacks."""
    for key, neutral in _NEUTRAL.items():
        if raw.get(key, neutral) not in (neutral, None):
            raise CheckpointError(f"{path}: {key} must be {neutral!r}, found {raw[key]!r}: not supported")
    default = Choice(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)  # transformers' GenerationConfig
    values = {f.name: raw[f.name] for f in fields(Choice) if raw.get(f.name) is not None}
    try:
        return replace(default, **values)
    except (SamplingError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


# ---- random weights, for timing and comparisons only


def ensure_named(name: str, cache: str | Path | None = None) -> Path:
    """The folder of "random:SIZE[:margin]", created in the cache on first use. With "margin" the best token wins by a
    wide margin, so that greedy backends agree token for token, and the head is untied. Raises CheckpointError for
    another name, or if the cache cannot be written."""
    size, *rest = name.split(":")[1:] or [""]
    if size not in SIZES or rest not in ([], ["margin"]):
        sizes = ", ".join(SIZES)
        raise CheckpointError(f"text checkpoint {name!r}: expected random:SIZE[:margin] with SIZE one of {sizes}")
    folder = cache_folder(cache) / "-".join([f"random-text-r{RECIPE}", size, *rest])
    return made_once(folder, lambda: _make(folder, size, bool(rest)))


def config_json(size: str) -> dict[str, Any]:
    """The content of config.json for a size."""
    return {**_RELEASED["config"], **SIZES[size]}


def _make(folder: Path, size: str, margin: bool) -> None:
    files = {
        "config.json": config_json(size) | ({"tie_word_embeddings": False} if margin else {}),
        "generation_config.json": _RELEASED["generation_config"],
        MARKER: {"random": True, "recipe": RECIPE, "size": size, "margin": margin},
    }
    with whole_folder(folder) as work:
        write_files(work, files)
        config = TextConfig.load(work)
        tensors = random_tensors(expected_text_tensors(config), 0, torch.bfloat16)
        if margin:
            _widen_margins(tensors, config)
        elif config.tied:
            # Embedding rows have norm 1, so the scale of the final norm is the logits' standard deviation.
            tensors[f"{STACK}norm.weight"] *= HEAD_LOGIT_STD
        write_weights(work, tensors)


def _widen_margins(tensors: dict[str, Tensor], config: TextConfig) -> None:
    """Sets weights whose greedy choice is a function of the last token, one cycle through the whole vocabulary: the
    head's row of the next token is the scaled embedding of this one, to which the branches add only a small part."""
    stack, generator = config.stack, torch.Generator().manual_seed(0)
    shrink_branches(tensors, STACK, stack, 1.0)
    embedding = tensors[EMBEDDING]
    rows = torch.randn(embedding.shape, generator=generator)
    embedding.copy_(rows)  # component RMS 1, to which the scale of the branches refers
    cycle = torch.randperm(stack.vocab_size, generator=generator)
    unit = F.normalize(rows, dim=-1)[cycle]
    tensors[HEAD][cycle.roll(-1)] = (2 * PEAK_LOGIT / math.sqrt(stack.hidden_size) * unit).to(embedding.dtype)
