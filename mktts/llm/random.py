"""Makes random Qwen3 text checkpoints in exactly the Hub layout. Random weights: for timing and parity only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint.files import MARKER
from mktts.checkpoint.random.make import whole_folder, write_tokenizer, write_weights
from mktts.checkpoint.random.tokenizer import SPECIAL_START, SPECIALS
from mktts.checkpoint.random.weights import HEAD_LOGIT_STD, PEAK_LOGIT, random_tensors
from mktts.common import cache_folder, write_json
from mktts.errors import CheckpointError
from mktts.llm.config import EMBEDDING, HEAD, STACK, TextConfig, expected_text_tensors

RECIPE = 1  # raise it whenever the same arguments give other bytes: cached checkpoints are then made again
BRANCH_SHARE = 0.15  # of the residual stream, that attention and MLPs add up to with wide margins

# Values of Qwen/Qwen3-0.6B (Apache-2.0); the tiny sizes change widths, depth and the tie only.
_RELEASED: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": SPECIAL_START + SPECIALS.index("<|endoftext|>"),
    "eos_token_id": SPECIAL_START + SPECIALS.index("<|im_end|>"),
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_window_layers": 3,
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-untied": {**_TINY, "tie_word_embeddings": False},
    "0.6b": {},
}
_GENERATION = {
    "bos_token_id": _RELEASED["bos_token_id"],
    "do_sample": True,
    "eos_token_id": [_RELEASED["eos_token_id"], _RELEASED["bos_token_id"]],
    "pad_token_id": _RELEASED["bos_token_id"],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def make(
    folder: str | Path,
    size: str = "tiny",
    *,
    seed: int = 0,
    margin: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    store_head: bool = False,
) -> Path:
    """Writes a random text checkpoint to `folder` (all of it or nothing) and returns the folder.

    size: "tiny", "tiny-untied", "0.6b". dtype: bfloat16 or float32. shards: files the model is spread over.
    margin: every greedy choice wins by a wide margin, so that backends agree token for token; the head is untied.
    store_head: a tied head is stored again as lm_head.weight, as in the released 0.6B.

    Raises CheckpointError for an unknown size or dtype, or where `folder` cannot be written or is not empty.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise CheckpointError(f"dtype must be torch.bfloat16 or torch.float32, found {dtype}")
    raw = config_json(size) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    if margin:
        raw["tie_word_embeddings"] = False
    with whole_folder(Path(folder)) as work:
        write_json(work / "config.json", raw, sort_keys=False)
        write_json(work / "generation_config.json", _GENERATION, sort_keys=False)
        write_json(
            work / MARKER,
            {"random": True, "recipe": RECIPE, "size": size, "seed": seed, "margin": margin},
            sort_keys=False,
        )
        write_tokenizer(work)
        write_weights(work, _tensors(TextConfig.load(work), seed, dtype, margin, store_head), shards)
    return Path(folder)


def ensure_named(name: str, cache: str | Path | None = None) -> Path:
    """The folder of "random:SIZE[:margin]", made in the cache on first use. Raises CheckpointError for other words."""
    size, *rest = name.split(":")[1:] or [""]
    if size not in SIZES or rest not in ([], ["margin"]):
        raise CheckpointError(
            f"text checkpoint {name!r}: expected random:SIZE[:margin] with SIZE one of {', '.join(SIZES)}"
        )
    folder = cache_folder(cache) / "-".join([f"random-text-r{RECIPE}", size, *rest])
    if not (folder / MARKER).is_file():
        try:
            make(folder, size, margin=bool(rest))
        except CheckpointError:
            if not (folder / MARKER).is_file():  # otherwise another process made the same one first
                raise
    return folder


def config_json(size: str) -> dict[str, Any]:
    """The content of config.json. Raises CheckpointError listing the sizes for an unknown one."""
    if size not in SIZES:
        raise CheckpointError(f"size must be one of {', '.join(SIZES)}, found {size!r}")
    return {**_RELEASED, **SIZES[size]}


def _tensors(config: TextConfig, seed: int, dtype: torch.dtype, margin: bool, store_head: bool) -> dict[str, Tensor]:
    tensors = random_tensors(expected_text_tensors(config), seed, dtype)
    if margin:
        _widen_margins(tensors, config, seed)
    elif config.tied:
        # embedding rows have norm 1, so the scale of the final norm is the logits' standard deviation
        tensors[f"{STACK}norm.weight"] *= HEAD_LOGIT_STD
    if store_head:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    return tensors


def _widen_margins(tensors: dict[str, Tensor], config: TextConfig, seed: int) -> None:
    """Greedy choice: a permutation of the last token, in one cycle through the whole vocabulary.

    The head's row of the next token is the unit embedding of this one; the branches add only a small part to it.
    """
    stack, generator = config.stack, torch.Generator().manual_seed(seed)
    gain = BRANCH_SHARE / math.sqrt(2 * stack.num_hidden_layers)
    for i in range(stack.num_hidden_layers):
        for leaf in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{STACK}layers.{i}.{leaf}.weight"] *= gain
    embedding = tensors[EMBEDDING]
    rows = torch.randn(embedding.shape, generator=generator)
    embedding.copy_(rows)  # component RMS 1: the scale that the branches' share refers to
    cycle = torch.randperm(stack.vocab_size, generator=generator)
    unit = rows / rows.norm(dim=-1, keepdim=True)
    tensors[HEAD][cycle.roll(-1)] = (2 * PEAK_LOGIT / math.sqrt(stack.hidden_size) * unit[cycle]).to(embedding.dtype)
