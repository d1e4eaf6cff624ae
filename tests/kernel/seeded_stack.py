"""A small decoder stack with seeded weights, and prompts for it."""

from __future__ import annotations

import torch
from torch import Tensor

from mktts.model.qwen3 import Qwen3Stack
from mktts.spec import StackConfig

SMALL = StackConfig(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
)


def stack(
    dtype: torch.dtype = torch.float32, config: StackConfig = SMALL, device: str = "cpu", kind: type = Qwen3Stack
) -> Qwen3Stack:
    """Seeded weights that are bf16 numbers: the same on every device and in every dtype."""
    generator = torch.Generator().manual_seed(1)
    c, d = config, config.head_dim
    shapes = {
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
        "self_attn.q_proj": (c.num_attention_heads * d, c.hidden_size),
        "self_attn.k_proj": (c.num_key_value_heads * d, c.hidden_size),
        "self_attn.v_proj": (c.num_key_value_heads * d, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, c.num_attention_heads * d),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "input_layernorm": (c.hidden_size,),
        "post_attention_layernorm": (c.hidden_size,),
    }
    names = {f"layers.{i}.{name}": shape for i in range(c.num_hidden_layers) for name, shape in shapes.items()}
    tensors = {}
    for name, shape in (names | {"norm": (c.hidden_size,)}).items():
        noise = torch.randn(shape, generator=generator)
        weight = 1 + 0.3 * noise if len(shape) == 1 else noise / shape[1] ** 0.5
        tensors[f"{name}.weight"] = weight.bfloat16()
    return kind(config, tensors, "", torch.device(device), dtype)


def prompt(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = SMALL.hidden_size) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * rows + seed)).to(dtype)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], error: float = 1e-5) -> bool:
    return all(f.shape == e.shape and (f - e).abs().max() <= error for f, e in zip(found, expected, strict=True))
