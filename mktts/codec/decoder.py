"""The 12 Hz codec decoder, streaming without approximation: every layer is causal, so with the state that each one
needs (the last rows before a convolution, the last window - 1 keys and values) any schedule of chunks gives the same
samples up to fp32 rounding. Upstream instead repeats 25 frames, less than the attention window, before each 300."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.layers import CausalConv, CodecTransformer, ConvNeXt, ResidualUnit, SnakeBeta, Upsampling
from mktts.errors import CodecError
from mktts.model.qwen3 import Linear
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME, CodecConfig

_ALIGNMENT_BYTES = 32  # the fused decoder copies multiples of this


@dataclass
class CodecState:
    """The state that one or several streams carry from chunk to chunk, updated in place. `views` are created on first
    use: captured graphs copy `flat` as a whole, and a hundred views cost 0.16 ms of the time to first PCM."""

    flat: Tensor  # (bytes,) uint8, for several streams (B, bytes): the memory behind all views
    layout: StateLayout
    frames: int = 0  # for one stream: a copy of its position on the host

    @cached_property
    def views(self) -> tuple[Tensor, ...]:
        """Keys, values, all histories and the position, each (B, ...), with B = 1 for one stream. Keys (rotated) and
        values are (B, layers, heads, window - 1, head_dim), oldest first. A history (B, P, C) holds the last input rows
        of a layer with memory; they follow the order of the layers. The position (B,) int64 counts decoded frames."""
        layout, flat = self.layout, self.flat if self.flat.dim() > 1 else self.flat[None]
        shapes = (layout.cache, layout.cache, *layout.history, ())
        return tuple(
            flat[:, start : start + count * dtype.itemsize].view(dtype).view(-1, *shape)
            for (start, count, dtype), shape in zip(layout.places, shapes, strict=True)
        )

    def copy(self) -> CodecState:
        return CodecState(self.flat.clone(), self.layout, self.frames)


@dataclass(frozen=True)
class StateLayout:
    """The layout of a decoder's state in its buffer; decoders with equal layouts can exchange states."""

    cache: tuple[int, ...]  # shape of the keys, and of the values
    history: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # of everything but the position

    def words(self) -> list[int]:
        """Offsets of keys, values and every history in the buffer, in values of `dtype`."""
        return [start // self.dtype.itemsize for start, *_ in self.places[:-1]]

    @cached_property
    def places(self) -> list[tuple[int, int, torch.dtype]]:
        """(first byte, number of values, dtype) of keys, values, every history and the position."""
        places, start = [], 0
        tensors = [(math.prod(shape), self.dtype) for shape in (self.cache, self.cache, *self.history)]
        for count, dtype in (*tensors, (1, torch.int64)):
            places.append((start, count, dtype))
            start += -(-count * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return places


@dataclass
class PendingPcm:
    """PCM that may still be computed or copied. pcm: (S,) float32, in pinned memory if `arrived`, the event after which
    it is complete, is set, else on any device; None once `samples` is set. pcm16: the same as 16-bit PCM, if made."""

    pcm: Tensor | None
    arrived: torch.cuda.Event | None = None
    pcm16: bytes | None = None
    samples: np.ndarray | None = None

    def result(self) -> np.ndarray:
        """The samples (S,) float32, as a copy. Waits for this work only, not for work queued later."""
        if self.samples is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self.samples = self.pcm.cpu().numpy().copy()  # releases pinned memory even if the chunk is kept for long
            self.pcm = None
        return self.samples


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class StreamingCodec(ABC):
    """Decodes codes to PCM. It holds only weights, so any number of streams can share one decoder (in one thread at a
    time); decoders with equal `layout` can take turns on one state."""

    name: str  # of the implementation, for reports

    def __init__(self, config: CodecConfig, books: Tensor, layout: StateLayout, device: torch.device) -> None:
        """books: all codebooks, concatenated, (16 * 2048, codebook_dim / 2), on the device."""
        self.config, self.layout, self.device = config, layout, device
        self.books, self.dtype = books, books.dtype

    @abstractmethod
    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        """As `decode`, without checks, for codes (T, 16) int64 on the device. Consists of tensor operations only, so
        that a CUDA graph can record it; the caller updates `state.frames`."""

    def compile(self, sizes: Iterable[int]) -> None:  # noqa: B027
        """Compiles the kernels, if any, for passes of `sizes` frames, without running them."""

    @torch.inference_mode()
    def start(self) -> CodecState:
        """Returns the state before the first frame: zero histories and an empty cache."""
        start, count, dtype = self.layout.places[-1]
        flat = torch.zeros(start + count * dtype.itemsize, dtype=torch.uint8, device=self.device)
        return CodecState(flat, self.layout)

    @torch.inference_mode()
    def submit(self, codes: Tensor, state: CodecState) -> PendingPcm:
        """Decodes the next T frames of a stream. codes: (T, 16), any integer dtype, on the host or the device.
        `result()` of the returned object is the PCM (T * 1920,) float32 in [-1, 1] on the host. Raises CodecError for
        codes of another shape, dtype, device or range, and for another decoder's state."""
        self.check(codes, state)
        pcm = self.advance(codes.to(self.device, torch.int64), state)
        state.frames += len(codes)
        return PendingPcm(pcm)

    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """As `submit`, with the same errors; returns the PCM (T * 1920,) float32 on the device."""
        return self.submit(codes, state).pcm

    def decode_all(self, codes: Tensor) -> Tensor:
        """As `decode`, for a whole utterance in one pass, with about 4 MB of working memory a frame at full size."""
        return self.decode(codes, self.start())

    def check(self, codes: Tensor, state: CodecState) -> None:
        """Raises what `submit` raises, before any state changes. Waits for the device only if `codes` are on it."""
        if not isinstance(codes, Tensor) or codes.dtype not in _INTEGERS:
            found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise CodecError(f"codes must be an integer tensor (T, {NUM_CODEBOOKS}), got {found}")
        if codes.dim() != 2 or codes.shape[1] != NUM_CODEBOOKS or not len(codes):
            raise CodecError(f"codes must be (T >= 1, {NUM_CODEBOOKS}), got {tuple(codes.shape)}")
        if codes.device.type not in ("cpu", self.device.type):
            raise CodecError(f"codes must be on cpu or {self.device}, got {codes.device}")
        low, high = torch.stack(codes.aminmax()).tolist()
        if low < 0 or high >= CODEBOOK_SIZE:
            raise CodecError(f"codes must be in 0..{CODEBOOK_SIZE - 1}, found {low}..{high}: control ids are not audio")
        if state.flat.device != self.books.device or state.layout != self.layout:
            raise CodecError("the state belongs to another decoder: use the one that start() of this decoder returned")


_MIN_USAGE = 1e-5  # upstream's EuclideanCodebook: embedding = embedding_sum / max(cluster_usage, 1e-5)


class CodecDecoder(StreamingCodec):
    """The decoder in PyTorch operators, for any device."""

    name = "plain"

    def __init__(
        self,
        config: CodecConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """tensors: by Hub name without the prefix `decoder.`, as from `Checkpoint.codec_tensors`."""
        device = torch.device(device)
        w = _Moved(tensors, device, dtype)
        books = ["rvq_first.vq.layers.0", *(f"rvq_rest.vq.layers.{g}" for g in range(NUM_CODEBOOKS - 1))]
        precision = torch.promote_types(dtype, torch.float32)
        tables = torch.cat([_codebook(tensors, book, precision) for book in books]).to(device, dtype)
        self.first_row = torch.arange(NUM_CODEBOOKS, device=device) * config.codebook_size
        self.book_out = [Linear.load(w, f"quantizer.rvq_{part}.output_proj", bias=False) for part in ("first", "rest")]
        self.pre_conv = CausalConv.load(w, "pre_conv", rows=1)
        self.transformer = CodecTransformer(config, w, "pre_transformer")
        self.stages: list = []
        for i, stride in enumerate(config.upsampling_ratios):
            self.stages += [Upsampling.load(w, f"upsample.{i}.0", stride), ConvNeXt.load(w, f"upsample.{i}.1")]
        rows = math.prod(config.upsampling_ratios)
        self.stages.append(CausalConv.load(w, "decoder.0", rows))
        for i, stride in enumerate(config.upsample_rates, start=1):
            block, rows = f"decoder.{i}.block", rows * stride
            self.stages += [SnakeBeta.load(w, f"{block}.0"), Upsampling.load(w, f"{block}.1", stride)]
            units = enumerate(config.dilations, start=2)
            self.stages += [ResidualUnit.load(w, f"{block}.{j}", rows, dilation) for j, dilation in units]
        self.last_snake = SnakeBeta.load(w, f"decoder.{len(config.upsample_rates) + 1}")
        self.last_conv = CausalConv.load(w, f"decoder.{len(config.upsample_rates) + 2}", SAMPLES_PER_FRAME)
        layers = (self.pre_conv, *self.stages, self.last_conv)
        shapes = [shape for layer in layers if not isinstance(layer, SnakeBeta) for shape in layer.history_shapes]
        cache = config.num_hidden_layers, config.num_attention_heads, config.sliding_window - 1, config.head_dim
        super().__init__(config, tables, StateLayout(cache, tuple(shapes), dtype), device)

    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        """See `StreamingCodec`; also decodes T frames of the B streams of `state`: (B, T, 16) -> PCM (B, T * 1920)."""
        keys, values, *histories, position = state.views
        history = iter(histories)
        rows = codes.view(len(position), -1, NUM_CODEBOOKS) + self.first_row
        x = F.embedding(rows, self.books)  # (B, T, 16, codebook_dim / 2)
        x = self.book_out[0](x[:, :, 0]) + self.book_out[1](x[:, :, 1:].sum(2))
        x = self.transformer(self.pre_conv(x, history), keys, values, position)
        for stage in self.stages:
            x = stage(x) if isinstance(stage, SnakeBeta) else stage(x, history)
        pcm = self.last_conv(x, history, self.last_snake)
        return pcm.float().clamp_(-1.0, 1.0).reshape(*codes.shape[:-2], -1)


class _Moved(dict[str, Tensor]):
    """Copies each of `tensors` to a device when it is read, so that they are never all there at the same time."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._move = lambda name: tensors[name].to(device, dtype)

    def __missing__(self, name: str) -> Tensor:
        return self._move(name)


def _codebook(tensors: Mapping[str, Tensor], book: str, dtype: torch.dtype) -> Tensor:
    """The entries of a codebook, (2048, codebook_dim / 2)."""
    name = f"quantizer.{book}._codebook"
    usage = tensors[f"{name}.cluster_usage"].to(dtype).clamp(min=_MIN_USAGE)
    return tensors[f"{name}.embedding_sum"].to(dtype) / usage[:, None]


_VOICES = 8
_FRAMES = 32  # decoded per call: the decoder's working memory grows with their number


class PrimedStates:
    """Caches the codec states after the references of the voices used last. One thread at a time."""

    def __init__(self, codec: StreamingCodec) -> None:
        self._codec = codec
        self._states: OrderedDict[int, tuple[Tensor, CodecState]] = OrderedDict()

    def forget(self, reference: Tensor) -> None:
        self._states.pop(id(reference), None)

    def of(self, reference: Tensor) -> CodecState:
        """The state after decoding the codes `reference` (R, 16); the caller must copy it before use."""
        key = id(reference)
        if key not in self._states:
            state = self._codec.start()
            for codes in reference.split(_FRAMES):
                self._codec.decode(codes, state)
            self._states[key] = (reference, state)  # holding the tensor keeps its id from being reused
            if len(self._states) > _VOICES:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return self._states[key][1]
