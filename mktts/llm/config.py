"""What a Qwen3 text model is: config.json, checked, and the tensors that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mktts.checkpoint.tensors import TensorSpecs, stack_shapes, tensor_specs
from mktts.common import read_object
from mktts.errors import CheckpointError
from mktts.spec import StackConfig

MODEL_TYPE = "qwen3"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
STACK = "model."  # prefix of the layers and the final norm

# What the stack computes, by config.json key. A key that is left out means the first value, as in transformers'
# Qwen3Config; anything else changes the arithmetic.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class TextConfig:
    """What a text model is. `tied`: the head is the embedding; `eos_ids`: the ids that end a text."""

    stack: StackConfig
    tied: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path) -> TextConfig:
        """Reads config.json and the end ids of generation_config.json. Raises CheckpointError naming the key."""
        where, raw = str(folder / "config.json"), read_object(folder / "config.json")
        found = raw.get("model_type")
        if found != MODEL_TYPE:
            raise CheckpointError(
                f"{where}: model_type must be {MODEL_TYPE!r}, found {found!r}. TextDecoder reads Qwen3 text models; "
                "speech checkpoints go to Synthesizer."
            )
        for key, allowed in _FIXED.items():
            if raw.get(key, allowed[0]) not in allowed:
                raise CheckpointError(f"{where}: {key} must be {allowed[0]!r}, found {raw[key]!r}: not supported")
        kinds = raw.get("layer_types") or []
        if set(kinds) - {"full_attention"}:
            raise CheckpointError(f"{where}: layer_types must all be 'full_attention', found {sorted(set(kinds))}")
        tied = raw.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise CheckpointError(f"{where}: tie_word_embeddings must be true or false, found {tied!r}")
        stack = _stack(raw, where)
        path = folder / "generation_config.json"
        generation = read_object(path) if path.is_file() else {}
        source, ids = (path, generation) if generation.get("eos_token_id") is not None else (where, raw)
        return cls(stack, tied, _eos_ids(ids.get("eos_token_id"), stack.vocab_size, str(source)))


def expected_text_tensors(config: TextConfig) -> TensorSpecs:
    """The tensors of a text model's `model.safetensors`: embedding, stack, and the head unless it is tied."""
    stack = config.stack
    shapes = {EMBEDDING: (stack.vocab_size, stack.hidden_size)} | stack_shapes(STACK, stack)
    if not config.tied:
        shapes[HEAD] = (stack.vocab_size, stack.hidden_size)
    return tensor_specs(shapes)


def _stack(raw: dict[str, Any], where: str) -> StackConfig:
    rope = raw.get("rope_parameters")  # where transformers 5 writes the rotary settings
    if rope is not None:
        if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
            raise CheckpointError(f"{where}: rope_parameters must be of rope_type 'default', found {rope!r}")
        raw = {**raw, **{key: rope[key] for key in ("rope_theta",) if key in rope}}
    values: dict[str, Any] = {}
    for f in fields(StackConfig):
        value, whole = raw.get(f.name), f.type == "int"
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
            raise CheckpointError(
                f"{where}: {f.name} must be a {'whole ' if whole else ''}number above 0, found {value!r}"
            )
        values[f.name] = value
    stack = StackConfig(**values)
    if stack.num_attention_heads % stack.num_key_value_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads, found "
            f"{stack.num_attention_heads} and {stack.num_key_value_heads}"
        )
    if stack.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim must be even for rotary positions, found {stack.head_dim}")
    return stack


def _eos_ids(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    """The end ids of `eos_token_id`: none, one, or a list, in the file's order."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
        raise CheckpointError(f"{where}: eos_token_id must be ids below vocab_size {vocab_size}, found {value!r}")
    return tuple(ids)
