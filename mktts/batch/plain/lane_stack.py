"""One Qwen3 decoder stack over rows of many streams: few operators a layer, and rows that do not feel their company.

Matrices are kept as (in, out): with at least two rows, a BLAS then makes a row's sums in one order however many rows
come with it, while short enough (MKL: all of 256 to 1 000 terms, up to about 200 rows of longer ones).
In fp32 norm weights are multiplied into the matrices behind them, and the halves of a head lie interleaved, so that
rotary embedding is one complex product. Other dtypes take the oracle's own operators, and its roundings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.model.qwen3 import LayerWeights, Qwen3Stack, inverse_frequency, rms_norm, rotate

Rotary = tuple[Tensor, ...]  # see `LaneStack.rotary`


@dataclass(frozen=True)
class PackedLayer:
    """One layer; H hidden, I intermediate, D head_dim, A query heads, K key and value heads."""

    qkv: Tensor  # (H, (A + 2 K) D)
    head_norm: Tensor  # (A + K, D)
    o: Tensor  # (A D, H)
    gate_up: Tensor  # (H, 2 I)
    down: Tensor  # (I, H)
    input_norm: Tensor | None  # (H,); None where it is in `qkv`
    post_norm: Tensor | None  # (H,); None where it is in `gate_up`


class LaneStack:
    """The layers of a stack for rows (R, H) of any streams; keys and values are the caller's.

    scale: what attention multiplies scores by.
    """

    def __init__(self, stack: Qwen3Stack) -> None:
        """Takes the weights over: `stack` has no layers left, so that they are not there twice."""
        c = self.config = stack.config
        self.device, self.dtype = stack.device, stack.dtype
        self.folded = self.dtype == torch.float32
        self.scale = 1.0 if self.folded else c.head_dim**-0.5  # folded, it is in the queries' norm
        self.group = c.num_attention_heads // c.num_key_value_heads
        self.norm = stack.norm * math.sqrt(c.hidden_size) if self.folded else stack.norm
        self.layers: list[PackedLayer] = []
        while stack.layers:
            self.layers.append(self._packed(stack.layers.pop(0)))
        self._frequency = inverse_frequency(c.head_dim, c.rope_theta).to(self.device)
        widths = c.hidden_size, c.head_dim
        self._floor = {width: torch.tensor(math.sqrt(width * c.rms_norm_eps)).to(self.norm) for width in widths}

    def rotary(self, positions: Tensor) -> Rotary:
        """What `heads` rotates rows at `positions` (R,) by. Angles are fp32, as in the oracle."""
        angle = positions.float()[:, None] * self._frequency
        if self.folded:
            return (torch.complex(angle.cos(), angle.sin())[:, None],)  # (R, 1, D / 2)
        angle = torch.cat((angle, angle), -1)[:, None]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)  # (R, 1, D) each

    def heads(self, layer: PackedLayer, x: Tensor, rotary: Rotary) -> Tensor:
        """Rows `x` (R, H) -> (R, A + 2 K, D): queries and keys, normed and rotated, and values."""
        c = self.config
        both = c.num_attention_heads + c.num_key_value_heads
        heads = (self._normed(x, layer.input_norm) @ layer.qkv).view(len(x), -1, c.head_dim)
        turned = heads[:, :both]
        if self.folded:
            unit = self._unit(turned).mul_(layer.head_norm)
            torch.mul(_pairs(unit), rotary[0], out=_pairs(turned))
        else:
            turned.copy_(rotate(rms_norm(turned, layer.head_norm, c.rms_norm_eps), *rotary))
        return heads

    def finish(self, layer: PackedLayer, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: rows `x` (R, H), overwritten, and their attention's output (R, A D) -> (R, H)."""
        x = self._plus(x, attended, layer.o)
        gate, up = (self._normed(x, layer.post_norm) @ layer.gate_up).chunk(2, -1)
        return self._plus(x, F.silu(gate, inplace=True).mul_(up), layer.down)

    def final(self, x: Tensor) -> Tensor:
        """The final norm of rows (R, H)."""
        return self._unit(x).mul_(self.norm) if self.folded else rms_norm(x, self.norm, self.config.rms_norm_eps)

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """`heads` -> queries (R, A, D), and keys and values (R, 2, K, D)."""
        c = self.config
        queries, rest = heads.split((c.num_attention_heads, 2 * c.num_key_value_heads), 1)
        return queries, rest.unflatten(1, (2, -1))

    def attend_causally(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows that attend to themselves and those before: (B, R, A, D), (B, K, R, D) twice -> (B, R, A D)."""
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(2)

    def _plus(self, x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        return x.addmm_(h, weight) if self.folded else x + h @ weight

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return self._unit(x) if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)

    def _unit(self, x: Tensor) -> Tensor:
        """RMSNorm but for a factor of 1 / sqrt(n) over the last dimension: three operators, composed it is six."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor[x.shape[-1]])

    def _packed(self, w: LayerWeights) -> PackedLayer:
        c = self.config
        qkv, gate_up = torch.cat((w.q, w.k, w.v)), torch.cat((w.gate, w.up))
        both = c.num_attention_heads + c.num_key_value_heads
        norms = [w.q_norm] * c.num_attention_heads + [w.k_norm] * c.num_key_value_heads
        head_norm = torch.stack(norms)
        if self.folded:
            length = math.sqrt(c.hidden_size)
            qkv, gate_up = qkv * (w.input_norm * length), gate_up * (w.post_norm * length)
            by_head = qkv.view(-1, c.head_dim, c.hidden_size)
            by_head[:both] = _interleaved(by_head[:both], 1)
            head_norm = _interleaved(head_norm, 1)
            # the length of a head, and in queries the 1 / length that attention scales scores by
            head_norm[c.num_attention_heads :] *= math.sqrt(c.head_dim)
        return PackedLayer(
            qkv=qkv.t().contiguous(),
            head_norm=head_norm.contiguous(),
            o=w.o.t().contiguous(),
            gate_up=gate_up.t().contiguous(),
            down=w.down.t().contiguous(),
            input_norm=None if self.folded else w.input_norm,
            post_norm=None if self.folded else w.post_norm,
        )


def _pairs(x: Tensor) -> Tensor:
    """(..., D) -> (..., D / 2) complex, the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Places 0, 1, 2, ... of `dim` take what stood at 0, n / 2, 1, n / 2 + 1, ..."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)
