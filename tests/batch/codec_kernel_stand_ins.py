"""What the batched codec's Triton kernels compute, in plain PyTorch: to test its pass without a GPU.

Each takes the arguments of the kernel of its name, in `mktts.batch.cuda.kernels.codec_rows` or `codec_products`.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.cuda.memory import INPUT_SCALE, UNIT, Rows
from mktts.codec.packed import LOW_SCALE, Packed


class Kernel:
    """Launched as a Triton kernel is, whatever the grid."""

    def __init__(self, work: Callable) -> None:
        self._work = work

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return self._work


def planes(memory: Tensor, lane: int, low: int) -> Tensor:
    """(lanes, 1 or 2, values of a plane), a view."""
    return memory.view(-1, lane // low, low)


def read(memory: Tensor, lane: int, low: int, channels: int) -> Tensor:
    """(lanes, rows, channels) of the stored form."""
    parts = planes(memory, lane, low)[..., : low // channels * channels].float()
    value = parts[:, 0] + (parts[:, 1] / LOW_SCALE if parts.shape[1] > 1 else 0)
    return value.view(len(parts), -1, channels) * INPUT_SCALE


def write(memory: Tensor, lane: int, low: int, first: int, value: Tensor) -> None:
    """`value` (lanes, ...) to the values from `first` on of each lane."""
    parts, value = planes(memory, lane, low), value.flatten(1) / INPUT_SCALE
    high = value.half()
    parts[:, 0, first : first + value.shape[1]] = high
    if parts.shape[1] > 1:
        parts[:, 1, first : first + value.shape[1]] = (value - high) * LOW_SCALE


def run_product(
    x: Rows, weight: Packed, lanes: int, *, gelu=False, swiglu=False, scale=None, residual=None, raw=None, snake=None,
    act=None,
):  # fmt: skip
    value = read(x.memory, x.lane, x.plane, x.channels)[:, : x.past + x.new]
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
        write(act.memory, act.lane, act.plane, act.past * act.channels, y.reshape(lanes, -1))


def begin(codes, books, slots, positions, frequency, quantized, turns, *, ENTRIES, GROUPS, **_):  # noqa: N803
    ids = codes.long().clamp(0, ENTRIES - 1) + torch.arange(GROUPS) * ENTRIES
    entries = books[ids]
    value = torch.cat((entries[:, 0], entries[:, 1:].sum(1)), 1)
    write(quantized, 2 * value.shape[1], value.shape[1], 0, value)
    angle = positions[slots.long()].float()[:, None] * frequency
    turns[:, 0], turns[:, 1] = angle.cos(), angle.sin()


def move(state, work, pieces, slots, positions, nobody, state_words, *, SAVE, **_):  # noqa: N803
    for lane, slot in enumerate(slots.tolist()):
        for kept, load, save, stride, count in (pieces * UNIT).tolist():
            at = (save if SAVE else load) + lane * stride
            pair = state[slot, kept : kept + count], work[at : at + count]
            (pair[0] if SAVE else pair[1]).copy_(pair[1] if SAVE else pair[0])
        if SAVE and slot != nobody:
            positions[slot] += 1


def norm(x, out, eps, **_):
    write(out, 2 * x.shape[1], x.shape[1], 0, F.rms_norm(x, x.shape[1:], eps=eps))


def attend(qkv, turns, slots, positions, keys, values, out, layer, layers, scale, *, HALF, WINDOW, **_):  # noqa: N803
    heads = keys.shape[2]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    for lane, slot in enumerate(slots.tolist()):
        now, (cos, sin) = int(positions[slot]), turns[lane]
        q, k, v = qkv[lane].view(3, heads, 2 * HALF)
        keys[slot, layer, :, now % WINDOW], values[slot, layer, :, now % WINDOW] = rotated(k), v
        places = [p % WINDOW for p in range(max(0, now - WINDOW + 1), now + 1)]
        k, v = keys[slot, layer][:, places].float(), values[slot, layer][:, places].float()
        weights = ((k @ rotated(q)[:, :, None]) * scale).softmax(1)
        value = (weights * v).sum(1).view(1, -1)
        width = value.shape[1]
        write(out[lane * 2 * width : (lane + 1) * 2 * width], 2 * width, width, 0, value)


def depthwise_norm(
    x, taps, bias, weight, shift, out, per, x_lane, x_low, out_lane, out_low, eps, *, CHANNELS, TAPS, **_,  # noqa: N803
):  # fmt: skip
    value = read(x, x_lane * UNIT, x_low * UNIT, CHANNELS)[:, : TAPS - 1 + per].transpose(1, 2)
    y = F.conv1d(value, taps.t()[:, None], bias, groups=CHANNELS).transpose(1, 2)
    write(out, out_lane * UNIT, out_low * UNIT, 0, F.layer_norm(y, (CHANNELS,), weight, shift, eps))


def waveform(x, taps, bias, pcm, rows, per, x_lane, x_low, *, CHANNELS, TAPS, **_):  # noqa: N803
    value = read(x, x_lane * UNIT, x_low * UNIT, CHANNELS)[:, : TAPS - 1 + per].transpose(1, 2)
    pcm.copy_(F.conv1d(value, taps.t()[None], bias)[:, 0].clamp(-1, 1))


PRODUCTS = SimpleNamespace(run_product=run_product)
ROWS = SimpleNamespace(
    **{work.__name__: Kernel(work) for work in (begin, move, norm, attend, depthwise_norm, waveform)}
)
