"""What the fused codec's Triton kernels compute, in plain PyTorch: to test its pass without a GPU.
Each takes the arguments of the kernel of its name, in `mktts.codec.row_kernels` or `product_kernels`."""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.packed import INPUT_SCALE, LOW_SCALE, UNIT, Packed, ProductTile, Rows


def launched(work: Callable) -> dict:
    """As a Triton kernel is launched, whatever the grid."""
    return defaultdict(lambda: work)


def planes(memory: Tensor, lane: int, low: int) -> Tensor:
    """(lanes, 1 or 2, values of a plane), a view."""
    return memory.view(-1, lane // low, low)


def read(memory: Tensor, lane: int, low: int, channels: int) -> Tensor:
    """(lanes, rows, channels) of fp32 or of the stored form."""
    parts = planes(memory, lane, low)[..., : low // channels * channels].float()
    if memory.dtype == torch.float32:
        return parts.view(len(parts), -1, channels)
    value = parts[:, 0] + (parts[:, 1] / LOW_SCALE if parts.shape[1] > 1 else 0)
    return value.view(len(parts), -1, channels) * INPUT_SCALE


def write(memory: Tensor, lane: int, low: int, first: int, value: Tensor) -> None:
    """`value` (lanes, ...) to the values from `first` on of each lane."""
    parts, value = planes(memory, lane, low), value.flatten(1)
    if memory.dtype == torch.float32:
        parts[:, 0, first : first + value.shape[1]] = value
        return
    value = value / INPUT_SCALE
    high = value.half()
    parts[:, 0, first : first + value.shape[1]] = high
    if parts.shape[1] > 1:
        parts[:, 1, first : first + value.shape[1]] = (value - high) * LOW_SCALE


def run_product(
    x: Rows, weight: Packed, tile: ProductTile, *, eps=None, gelu=False, swiglu=False, scale=None, residual=None,
    raw=None, snake=None, act=None,
):  # fmt: skip
    value = read(x.memory, x.lane, x.plane, x.channels)[:, : x.past + x.new]
    if eps is not None:
        value = F.rms_norm(value, value.shape[2:], eps=eps)
    taps = weight.high.shape[1] // weight.channels
    start = x.past - (taps - 1) * weight.dilation
    windows = [value[:, start + j * weight.dilation :][:, : x.new] for j in range(taps)]
    whole = weight.high.float() + (0 if weight.low is None else weight.low.float() / LOW_SCALE)
    y = torch.cat(windows, 2).flatten(0, 1) @ whole.t()
    y = y if weight.bias is None else y + weight.bias
    if swiglu:
        y = F.silu(y[:, 0::2]) * y[:, 1::2]
    y = F.gelu(y) if gelu else y
    y = y if scale is None else y * scale
    if residual is not None:
        kept = residual.float() * (INPUT_SCALE if residual.dtype == torch.float16 else 1)
        y = y + kept.view_as(y)
    if raw is not None:
        raw.copy_((y / INPUT_SCALE if raw.dtype == torch.float16 else y).view_as(raw))
    if act is not None:
        if snake is not None:
            y = y.view(-1, len(snake.frequency))
            y = y + (y * snake.frequency * math.pi).sin() ** 2 * snake.magnitude
        write(act.memory, act.lane, act.plane, act.past * act.channels, y.reshape(act.lanes, -1))


def begin(codes, books, slots, positions, frequency, quantized, turns, *, ENTRIES, GROUPS, FRAMES, **_):  # noqa: N803
    ids = codes.long().clamp(0, ENTRIES - 1) + torch.arange(GROUPS) * ENTRIES
    entries = books[ids]
    value = torch.cat((entries[:, 0], entries[:, 1:].sum(1)), 1)
    write(quantized, len(quantized) // len(codes), value.shape[1], 0, value)
    position = positions[slots.long()][:, None] + torch.arange(FRAMES)
    angle = position.flatten().float()[:, None] * frequency
    turns[:, 0], turns[:, 1] = angle.cos(), angle.sin()


def move(state, work, pieces, slots, positions, nobody, state_words, *, SAVE, FRAMES, **_):  # noqa: N803
    for lane, slot in enumerate(slots.tolist()):
        for kept, load, save, stride, count in (pieces * UNIT).tolist():
            at = (save if SAVE else load) + lane * stride
            kept += slot * state_words * UNIT
            pair = state.view(-1)[kept : kept + count], work[at : at + count]
            (pair[0] if SAVE else pair[1]).copy_(pair[1] if SAVE else pair[0])
        if SAVE and slot != nobody:
            positions[slot] += FRAMES


def norm(x, out, eps, **_):
    write(out, 2 * x.shape[1], x.shape[1], 0, F.rms_norm(x, x.shape[1:], eps=eps))


def attend(
    qkv, turns, slots, positions, keys, values, out, layer, layers, scale, *, HALF, WINDOW, RING, FRAMES, **_,  # noqa: N803
):  # fmt: skip
    heads = keys.shape[-3]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    for row in range(len(qkv)):
        slot, frame = int(slots[row // FRAMES]), row % FRAMES
        now, (cos, sin) = int(positions[slot]) + frame, turns[row]
        q, k, v = qkv[row].view(3, heads, 2 * HALF)
        places = [
            p % WINDOW if RING else p - now + frame + WINDOW - 1 for p in range(max(0, now - WINDOW + 1), now + 1)
        ]
        of_keys, of_values = (t[slot, layer] if RING else t[layer] for t in (keys, values))
        of_keys[:, places[-1]], of_values[:, places[-1]] = rotated(k), v
        k, v = of_keys[:, places].float(), of_values[:, places].float()
        weights = ((k @ rotated(q)[:, :, None]) * scale).softmax(1)
        value = (weights * v).sum(1).view(1, -1)
        lane = len(out) // len(qkv)
        write(out[row * lane : (row + 1) * lane], lane, value.shape[1], 0, value)


def depthwise_norm(
    x, taps, bias, weight, shift, out, per, x_lane, x_low, out_lane, out_low, eps, *, CHANNELS, TAPS, **_,  # noqa: N803
):  # fmt: skip
    value = read(x, x_lane * UNIT, x_low * UNIT, CHANNELS)[:, : TAPS - 1 + per].transpose(1, 2)
    y = F.conv1d(value, taps.t()[:, None], bias, groups=CHANNELS).transpose(1, 2)
    write(out, out_lane * UNIT, out_low * UNIT, 0, F.layer_norm(y, (CHANNELS,), weight, shift, eps))


def waveform(x, taps, bias, pcm, rows, per, x_lane, x_low, *, CHANNELS, TAPS, **_):  # noqa: N803
    value = read(x, x_lane * UNIT, x_low * UNIT, CHANNELS)[:, : TAPS - 1 + per].transpose(1, 2)
    pcm.view(len(value), -1).copy_(F.conv1d(value, taps.t()[None], bias)[:, 0].clamp(-1, 1))


ROWS = (begin, move, norm, attend, depthwise_norm, waveform)
STAND_INS = (
    SimpleNamespace(run_product=run_product),
    SimpleNamespace(**{work.__name__: launched(work) for work in ROWS}),
)
