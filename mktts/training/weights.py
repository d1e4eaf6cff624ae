"""Trainable tensors by Hub name, and the layers that both models share, for complete sequences at once."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.model.qwen3 import inverse_frequency, rotate

_SIGN = "|"  # replaces dots, which parameter names of a module must not contain


class Weights(nn.Module):
    """Parameters by Hub name."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], initial: Callable[[str, Tensor], None]) -> None:
        """initial: initialises a parameter, given its name, in place."""
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
        """All tensors by Hub name."""
        return {name.replace(_SIGN, "."): p.detach() for name, p in self.named_parameters(recurse=False)}

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Applies NAME.weight to `x`, and NAME.bias if there is one."""
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"] if f"{name}.bias" in self else None)

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        """RMSNorm; the fused kernel needs weights of the input's dtype."""
        return F.rms_norm(x, x.shape[-1:], self[f"{name}.weight"].to(x.dtype), eps)

    def stack(self, name: str, c: Any, x: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """Applies a decoder stack and its final norm to rows (B, T, H) from position 0. c: StackConfig or CodecConfig.
        mask: (T, T), or None for causal attention. dropout: on the outputs that a layer adds."""
        angle = torch.outer(torch.arange(x.shape[1], device=x.device).float(), _frequency(c, x.device))
        angle = torch.cat((angle, angle), -1)
        turned, eps = (angle.cos(), angle.sin()), c.rms_norm_eps
        for layer in (f"{name}.layers.{i}" for i in range(c.num_hidden_layers)):
            seen = self.norm(f"{layer}.input_layernorm", x, eps)
            seen = self._attention(f"{layer}.self_attn", c, seen, turned, mask)
            x = self._added(f"{layer}.self_attn", x, F.dropout(seen, dropout, self.training))
            inner = self.norm(f"{layer}.post_attention_layernorm", x, eps)
            gate = F.silu(self.linear(f"{layer}.mlp.gate_proj", inner))
            inner = self.linear(f"{layer}.mlp.down_proj", gate * self.linear(f"{layer}.mlp.up_proj", inner))
            x = self._added(f"{layer}.mlp", x, F.dropout(inner, dropout, self.training))
        return self.norm(f"{name}.norm", x, eps)

    def _added(self, name: str, x: Tensor, more: Tensor) -> Tensor:
        scale = f"{name}_layer_scale.scale"
        return x + (self[scale] * more if scale in self else more)

    def _attention(self, name: str, c: Any, x: Tensor, turned: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        projected = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        q, k, v = (part.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for part in projected)
        if f"{name}.q_norm.weight" in self:
            q, k = self.norm(f"{name}.q_norm", q, c.rms_norm_eps), self.norm(f"{name}.k_norm", k, c.rms_norm_eps)
        q, k = (rotate(part.to(v.dtype), *(r.to(v.dtype) for r in turned)) for part in (q, k))
        # repeated explicitly, because fused kernels support equal numbers of heads in every torch version
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.linear(f"{name}.o_proj", seen.transpose(1, 2).flatten(2))


@cache  # on its device, because a copy to the device waits for all work launched before
@torch.inference_mode(False)
def _frequency(c: Any, device: torch.device) -> Tensor:
    return inverse_frequency(c.head_dim, c.rope_theta).to(device)


@cache
def fused(work: Callable[..., Tensor], cuda: bool) -> Callable[..., Tensor]:
    """Returns `work`, on a GPU compiled to a single pass over memory: elementwise passes limit a training step."""
    if not cuda:
        return work
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = 64  # for all kinds of inputs: dtypes, layouts, with and without gradients
    torch._functorch.config.donated_buffer = False  # backward may run twice over a graph
    return torch.compile(work, dynamic=True)
