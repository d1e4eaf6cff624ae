"""Makes random Qwen3 text checkpoints in exactly the Hub layout. Random weights: for timing and parity only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint.files import MARKER
from mktts.checkpoint.random.make import whole_folder, write_tokenizer, write_weights
from mktts.checkpoint.random.weights import HEAD_LOGIT_STD, PEAK_LOGIT, random_tensors
from mktts.common import cache_folder, write_json
from mktts.errors import CheckpointError
from mktts.llm.checkpoint import EMBEDDING, HEAD, STACK, TextConfig, expected_text_tensors

RECIPE = 1  # raise it whenever the same arguments give other bytes: cached checkpoints are then made again
BRANCH_SHARE = 0.15  # of the residual stream, that attention and MLPs add up to with wide margins
_RELEASED = Path(__file__).with_name("qwen3_0.6b.json")  # the released JSON files (Apache-2.0)
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_window_layers": 3,
}
SIZES: dict[str, dict[str, Any]] = {"tiny": _TINY, "tiny-untied": {**_TINY, "tie_word_embeddings": False}, "0.6b": {}}


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
        for name, content in (
            ("config.json", raw),
            ("generation_config.json", _released("generation_config")),
            (MARKER, {"random": True, "recipe": RECIPE, "size": size, "seed": seed, "margin": margin}),
        ):
            write_json(work / name, content, sort_keys=False)
        write_tokenizer(work)
        config = TextConfig.load(work)
        tensors = random_tensors(expected_text_tensors(config), seed, dtype)
        if margin:
            _widen_margins(tensors, config, seed)
        elif config.tied:
            # embedding rows have norm 1, so the scale of the final norm is the logits' standard deviation
            tensors[f"{STACK}norm.weight"] *= HEAD_LOGIT_STD
        if store_head:
            tensors[HEAD] = tensors[EMBEDDING].clone()
        write_weights(work, tensors, shards)
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
    return {**_released("config"), **SIZES[size]}


def _released(name: str) -> dict[str, Any]:
    return json.loads(_RELEASED.read_text(encoding="utf-8"))[name]


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
