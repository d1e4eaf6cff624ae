"""The streaming codec decoder with few, fused kernels: the pass of `CodecDecoder`, a launch for a layer or less.

Every layer that looks back reads one buffer, (history + new) rows: histories are copied from the state to the fronts at
the start, each layer writes its output, through the next one's SnakeBeta, behind the next one's history, and the newest
rows are copied back at the end. Additions, biases and activations are the ends of matrix products.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState, StreamingCodec
from mktts.codec.layers import CONVNEXT_EPS, SnakeBeta
from mktts.codec.packed import CodecWeights, Packed, PackedBlock, copies, rows_per_frame
from mktts.errors import CodecError
from mktts.kernel.build import require_triton

_ALIGNMENT_WORDS = 4  # 16 bytes: the widest load
MAX_FUSED_FRAMES = 8  # of one pass


@dataclass(frozen=True)
class _Buffers:
    """The working memory of a pass over n frames, and the copies between it and a state."""

    words: int
    keys: int  # offsets in words
    values: int
    extended: tuple[tuple[int, tuple[int, int]], ...]  # (offset, shape) of every (history + new, channels)
    load: Tensor  # state -> working memory
    save: Tensor  # working memory -> state


class FusedCodec(StreamingCodec):
    """A decoder (fp32 state) that decodes up to MAX_FUSED_FRAMES frames at a time by fused kernels, on fp16 matrix
    units with split operands, nearly fp32 (88 dB above the difference to it, of 300 frames at full size and random
    weights, H200). Only packed weights stay on the device (433 MiB at full size)."""

    name = "fused"

    def __init__(self, plain: Callable[[], CodecDecoder], kernels: ModuleType | None = None) -> None:
        """plain: makes the fp32 decoder whose weights are packed; it is let go. kernels: in place of
        mktts.codec.fused_kernels, for tests. Raises BackendUnavailable where they cannot run."""
        decoder = plain()
        super().__init__(decoder.config, decoder.books, decoder.layout, decoder.device)
        if self.config.sliding_window <= MAX_FUSED_FRAMES:
            raise CodecError(f"fused kernels need a window above {MAX_FUSED_FRAMES}, got {self.config.sliding_window}")
        if kernels is None:
            require_triton("the fused codec", self.device)
            from mktts.codec import fused_kernels as kernels

        self._kernels = kernels
        self._weights = CodecWeights.pack(decoder, fast=False)
        new_rows = list(rows_per_frame(decoder))
        self._plans = {n: self._plan(n, new_rows) for n in range(1, MAX_FUSED_FRAMES + 1)}

    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        frames = len(codes)
        if frames > MAX_FUSED_FRAMES:
            raise CodecError(f"a fused pass decodes at most {MAX_FUSED_FRAMES} frames, got {frames}")
        plan, run = self._plans[frames], self._kernels
        work = torch.empty(plan.words, device=self.device)
        flat = state.flat[: state.flat.numel() // 4 * 4].view(torch.float32)
        run.move(flat, work, plan.load, state.position, 0)
        inputs = [work[start:][: rows * channels].view(rows, channels) for start, (rows, channels) in plan.extended]
        quantized = torch.empty(frames, 2 * self.books.shape[1], device=self.device)
        run.gather(codes, self.books, quantized)
        run.product(quantized, self._weights.quantizer, frames, raw=_newest(inputs[0], frames))
        x = self._attend(inputs[0], work, plan, state.position, frames)
        pcm = self._waveform(x, iter(inputs[1:]))
        run.move(work, flat, plan.save, state.position, frames)
        return pcm

    def _attend(self, first: Tensor, work: Tensor, plan: _Buffers, position: Tensor, frames: int) -> Tensor:
        """The convolution before the transformer, and the transformer: (frames, latent)."""
        run, c = self._kernels, self.config
        places = c.sliding_window - 1 + frames
        shape = c.num_hidden_layers, c.num_attention_heads, places, c.head_dim
        count = shape[0] * shape[1] * shape[2] * shape[3]
        keys, values = (work[start:][:count].view(shape) for start in (plan.keys, plan.values))
        latent = self._product(first, self._weights.entry, frames)
        x = self._product(latent, self._weights.enter, frames)
        eps = c.rms_norm_eps
        for layer, layer_keys, layer_values in zip(self._weights.layers, keys, values, strict=True):
            qkv = self._product(x, layer.qkv, frames, norm_eps=eps)
            attended = torch.empty(frames, qkv.shape[1] // 3, device=self.device)
            run.attention(qkv, layer_keys, layer_values, attended, position, self._weights.inverse_frequency)
            run.product(attended, layer.out, frames, scale=layer.attention_scale, residual=x, raw=x)
            inner = torch.empty(frames, layer.down.channels, device=self.device)
            run.product(x, layer.gate_up, frames, norm_eps=eps, swiglu=True, raw=inner)
            run.product(inner, layer.down, frames, scale=layer.mlp_scale, residual=x, raw=x)
        return self._product(x, self._weights.leave, frames, norm_eps=eps)

    def _waveform(self, x: Tensor, inputs: Iterator[Tensor]) -> Tensor:
        """Upsampling to samples (S,). `x` (n, latent); `inputs`: (history + new, channels) of every layer, in order."""
        run = self._kernels
        source, rows = self._upsample(x, inputs)
        snakes = self._weights.snakes
        target = next(inputs)
        run.product(source, self._weights.widen, rows, snake=snakes[0], act=_newest(target, rows))
        for block, following in zip(self._weights.blocks, snakes[1:], strict=True):
            target, rows = self._run_block(block, target, rows, inputs, following)
        pcm = torch.empty(rows, device=self.device)
        run.waveform(target, self._weights.last_taps, self._weights.last_bias, pcm)
        return pcm

    def _upsample(self, x: Tensor, inputs: Iterator[Tensor]) -> tuple[Tensor, int]:
        """The ConvNeXt stages: the input of the convolution behind them, whose newest rows they fill, and how many."""
        run, rows = self._kernels, len(x)
        source = next(inputs)
        for i, (up, block) in enumerate(self._weights.convnexts, start=1):
            rows = len(x) * len(up.high) // x.shape[1]
            new = _newest(source, rows)
            run.product(x, up, len(x), raw=new)
            normed = torch.empty_like(new)
            run.depthwise_norm(source, block.taps, block.bias, block.norm, CONVNEXT_EPS, normed)
            wide = self._product(normed, block.expand, rows, gelu=True)
            source = next(inputs)
            x = torch.empty_like(new) if i < len(self._weights.convnexts) else _newest(source, rows)
            run.product(wide, block.shrink, rows, scale=block.gamma, residual=new, raw=x)
        return source, rows

    def _run_block(
        self, block: PackedBlock, source: Tensor, count: int, inputs: Iterator[Tensor], following: SnakeBeta
    ) -> tuple[Tensor, int]:
        """One waveform block, from the `count` newest rows of `source`, which are through its SnakeBeta already: the
        input of the layer behind it, whose newest rows it fills through `following`, and how many."""
        run, target = self._kernels, next(inputs)
        rows = count * len(block.up.high) // block.channels
        x = torch.empty(rows, block.channels, device=self.device)
        act = _newest(target, rows)
        run.product(source, block.up, count, raw=x, snake=block.units[0].first, act=act)
        snakes = [*(unit.first for unit in block.units[1:]), following]
        for unit, snake in zip(block.units, snakes, strict=True):
            source, target = target, next(inputs)
            inner = torch.empty_like(x)
            run.product(source, unit.conv, rows, snake=unit.second, act=inner)
            raw = None if snake is following else x  # in place: every value is read by the program that replaces it
            run.product(inner, unit.mix, rows, residual=x, raw=raw, snake=snake, act=_newest(target, rows))
        return target, rows

    def _product(self, x: Tensor, weight: Packed, rows: int, **options) -> Tensor:
        y = torch.empty(rows, len(weight.high), device=self.device)
        self._kernels.product(x, weight, rows, raw=y, **options)
        return y

    def _plan(self, frames: int, new_rows: Sequence[int]) -> _Buffers:
        """`new_rows`: of every layer that looks back, what a frame brings (`rows_per_frame`)."""
        c, layout = self.config, self.layout
        heads, cached = c.num_hidden_layers * c.num_attention_heads, (c.sliding_window - 1) * c.head_dim
        grown = cached + frames * c.head_dim
        shapes = [
            (past + frames * new, channels) for (past, channels), new in zip(layout.history, new_rows, strict=True)
        ]
        sizes = [heads * grown, heads * grown, *(rows * channels for rows, channels in shapes)]
        sizes = [-(-size // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS for size in sizes]
        keys, values, *starts, words = accumulate(sizes, initial=0)
        places = layout.words()
        caches = [(*pair, h) for pair in zip(places[:2], (keys, values), strict=True) for h in range(heads)]
        load = [(place + h * cached, start + h * grown, cached) for place, start, h in caches]
        save = [(start + h * grown + grown - cached, place + h * cached, cached) for place, start, h in caches]
        for place, start, (rows, channels), (past, _) in zip(places[2:], starts, shapes, layout.history, strict=True):
            load.append((place, start, past * channels))
            save.append((start + (rows - past) * channels, place, past * channels))
        tables = (copies(table, self.device) for table in (load, save))
        return _Buffers(words, keys, values, tuple(zip(starts, shapes, strict=True)), *tables)


def _newest(extended: Tensor, rows: int) -> Tensor:
    return extended[len(extended) - rows :]
