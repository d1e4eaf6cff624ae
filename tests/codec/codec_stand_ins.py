"""What mktts.codec.fused_kernels computes, in plain PyTorch: to test the pass without a GPU, and the kernels
against.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.packed import LOW_SCALE, Packed


def operand(x: Tensor, packed: Packed, rows: int) -> Tensor:
    """(rows, depth)."""
    taps = packed.high.shape[1] // packed.channels
    return torch.cat([x[j * packed.dilation :][:rows] for j in range(taps)], 1)


def product(
    x, packed, rows, *, norm_eps=None, swiglu=False, gelu=False,
    scale=None, residual=None, raw=None, snake=None, act=None,
):  # fmt: skip
    a = operand(x, packed, rows)
    if norm_eps is not None:
        a = F.rms_norm(a, a.shape[1:], eps=norm_eps)
    y = a @ (packed.high.float() + packed.low.float() / LOW_SCALE).t()
    y = y if packed.bias is None else y + packed.bias
    y = F.gelu(y) if gelu else y
    y = F.silu(y[:, ::2]) * y[:, 1::2] if swiglu else y
    y = y if scale is None else y * scale
    y = y if residual is None else y + residual.view_as(y)
    if raw is not None:
        raw.view(-1).copy_(y.view(-1))
    if snake is not None:
        act.view(-1).copy_(snake(y.view(-1, len(snake.frequency))).view(-1))


def attention(qkv, keys, values, out, position, inverse_frequency):
    frames, (heads, places, head_dim) = len(qkv), keys.shape
    before = places - frames
    angle = (position + torch.arange(frames, device=qkv.device))[:, None] * inverse_frequency
    turn = torch.polar(torch.ones_like(angle), angle)  # (frames, head_dim / 2)
    q, k, v = qkv.view(frames, 3, heads, head_dim).permute(1, 2, 0, 3)

    def rotated(x: Tensor) -> Tensor:
        turned = torch.complex(*(half.contiguous() for half in x.chunk(2, -1))) * turn
        return torch.cat((turned.real, turned.imag), -1)

    keys[:, before:], values[:, before:] = rotated(k), v
    key, query = torch.arange(places, device=qkv.device), torch.arange(frames, device=qkv.device)[:, None]
    seen = (key >= query) & (key <= query + before) & (key >= before - position)
    keys, values = (torch.nan_to_num(t) for t in (keys, values))
    attended = F.scaled_dot_product_attention(rotated(q), keys, values, attn_mask=seen)
    out.copy_(attended.transpose(0, 1).reshape(frames, -1))


def gather(codes, books, out):
    books = books.view(codes.shape[1], -1, books.shape[1])
    entries = torch.stack([book[ids] for book, ids in zip(books, codes.t(), strict=True)])
    out.copy_(torch.cat((entries[0], entries[1:].sum(0)), 1))


def depthwise_norm(x, taps, bias, norm, eps, out):
    y = F.conv1d(x.t()[None], taps.t()[:, None], bias, groups=x.shape[1])[0].t()
    out.copy_(F.layer_norm(y, y.shape[1:], *norm, eps))


def waveform(x, taps, bias, pcm):
    pcm.copy_(F.conv1d(x.t()[None], taps.t()[None], bias)[0, 0].clamp(-1, 1))


def move(source, target, table, position, frames):
    for start, end, count in table.tolist():
        target[end : end + count] = source[start : start + count]
    position += frames
