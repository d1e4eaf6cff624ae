"""A checkpoint's weights as the frame kernel takes them: tapes, norms, rotary tables, embedding rows; all bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.kernel.grid import Shape
from mktts.kernel.tape import pack_layer, pack_projection, pack_rows
from mktts.model.qwen3 import inverse_frequency
from mktts.spec import NUM_CODEBOOKS, StackConfig

Get = Callable[[str], Tensor]  # Hub name -> bf16 tensor on the kernel's device


def model_weights(shape: Shape, get: Get, has_projection: bool) -> dict[str, Tensor]:
    """Talker and code predictor by the names in csrc/state.cuh, struct Params."""
    code_predictor = "talker.code_predictor."
    groups = range(NUM_CODEBOOKS - 1)
    weights = {"talker_head_tape": pack_rows(shape, get("talker.codec_head.weight"))}
    heads = [pack_rows(shape, get(f"{code_predictor}lm_head.{g}.weight")) for g in groups]
    weights["predictor_head_tape"] = torch.stack(heads)
    embeddings = torch.stack([get(f"{code_predictor}model.codec_embedding.{g}.weight") for g in groups])
    first = get("talker.model.codec_embedding.weight")
    weights |= {"embeddings0": first, "embeddings": embeddings, "inputs0": first, "inputs": embeddings}
    if has_projection:
        name = f"{code_predictor}small_to_mtp_projection."
        matrix, bias = get(name + "weight"), get(name + "bias")
        weights |= {"projection_tape": pack_projection(shape, matrix), "projection_bias": bias}
        weights |= {"inputs0": F.linear(first, matrix, bias), "inputs": F.linear(embeddings, matrix, bias)}
    weights |= stack_weights(shape, "talker", shape.talker, get, "talker.model.")
    return weights | stack_weights(shape, "predictor", shape.predictor, get, f"{code_predictor}model.")


def codec_embeddings(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The code embeddings among `model_weights` by Hub name, each (vocabulary, H)."""
    held = {"talker.model.codec_embedding.weight": weights["embeddings0"]}
    for group, table in enumerate(weights["embeddings"]):
        held[f"talker.code_predictor.model.codec_embedding.{group}.weight"] = table
    return held


def stack_weights(shape: Shape, kind: str, stack: StackConfig, get: Get, prefix: str) -> dict[str, Tensor]:
    """One Qwen3 stack, its names led by `kind`."""
    tape, norms, heads = None, [], []
    for index in range(stack.num_hidden_layers):  # one layer at a time: the matrices are needed only here
        layer = _Layer(get, f"{prefix}layers.{index}.")
        packed = pack_layer(shape, stack, layer)
        if tape is None:
            tape = packed.new_empty(len(packed), stack.num_hidden_layers, packed.shape[1])
        tape[:, index] = packed
        norms.append(torch.stack([layer["input_layernorm.weight"], layer["post_attention_layernorm.weight"]]))
        heads.append(torch.stack([layer["self_attn.q_norm.weight"], layer["self_attn.k_norm.weight"]]))
    final = get(f"{prefix}norm.weight")
    positions = NUM_CODEBOOKS if kind == "predictor" else stack.max_position_embeddings
    frequency = inverse_frequency(stack.head_dim, stack.rope_theta).to(final.device)
    angle = torch.outer(torch.arange(positions, device=final.device).float(), frequency)
    return {
        f"{kind}_tape": tape,
        f"{kind}_norms": torch.stack(norms),
        f"{kind}_qk": torch.stack(heads),
        f"{kind}_final": final,
        f"{kind}_cos": angle.cos().to(final.dtype),
        f"{kind}_sin": angle.sin().to(final.dtype),
    }


class _Layer:
    """The tensors of one layer by their names in it."""

    def __init__(self, get: Get, prefix: str) -> None:
        self._get, self._prefix = get, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._get(self._prefix + name)
