"""Trainable tensors by the Hub's names, shapes from `mktts.checkpoint.tensors`, and the layers that both models have.

The arithmetic is that of `mktts.model.qwen3` and `mktts.codec.layers`, for whole sequences of a batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.model.qwen3 import inverse_frequency, rotate

_SIGN = "|"  # in place of the dots, which a module's own names may not have


class Weights(nn.Module):
    """Parameters by Hub name."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], initial: Callable[[str, Tensor], None]) -> None:
        """initial: fills a parameter of this name in place."""
        super().__init__()
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape))
            with torch.no_grad():
                initial(name, parameter)
            self.register_parameter(name.replace(".", _SIGN), parameter)

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name.replace(".", _SIGN)]

    def __contains__(self, name: str) -> bool:
        return name.replace(".", _SIGN) in self._parameters

    def hub(self) -> dict[str, Tensor]:
        """Hub name -> tensor."""
        return {name.replace(_SIGN, "."): p.detach() for name, p in self.named_parameters(recurse=False)}

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Through NAME.weight, and NAME.bias where there is one."""
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"] if f"{name}.bias" in self else None)

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        """RMS norm; the fused kernel wants weights of the input's dtype."""
        return F.rms_norm(x, x.shape[-1:], self[f"{name}.weight"].to(x.dtype), eps)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """SwiGLU."""
        gate = F.silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def attention(
        self, name: str, x: Tensor, head_dim: int, rotary: tuple[Tensor, Tensor], eps: float, mask: Tensor | None = None
    ) -> Tensor:
        """Of rows (B, T, H), causal or as `mask` (T, T) says; q and k are normed where there are weights for it.

        Right padding needs no mask: nothing before it sees it.
        """
        q, k, v = (
            self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self:
            q, k = self.norm(f"{name}.q_norm", q, eps), self.norm(f"{name}.k_norm", k, eps)
        q, k = (rotate(part.to(v.dtype), *(r.to(v.dtype) for r in rotary)) for part in (q, k))
        # repeated by hand: the fused kernels take equal head counts on every torch version
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.linear(f"{name}.o_proj", seen.transpose(1, 2).flatten(2))


def rotary(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions from 0 on, (length, head_dim) each."""
    angle = torch.outer(torch.arange(length, device=device).float(), _frequency(head_dim, theta, device))
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


_FREQUENCIES: dict[tuple[int, float, torch.device], Tensor] = {}


def _frequency(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Kept on its device: a copy to it waits for all that was launched before."""
    key = (head_dim, theta, device)
    if key not in _FREQUENCIES:
        with torch.inference_mode(False):
            _FREQUENCIES[key] = inverse_frequency(head_dim, theta).to(device)
    return _FREQUENCIES[key]


def fused(work: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    """`work` in one pass over memory where x is on a GPU: elementwise passes are what a training step waits for."""
    return _compiled(work) if x.is_cuda else work


@cache
def _compiled(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 64  # kinds of input: dtypes, layouts, with gradients or without
    torch._functorch.config.donated_buffer = False  # a graph may be gone through twice
    return torch.compile(work, dynamic=True)
