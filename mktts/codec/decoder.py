"""The 12 Hz codec decoder, streaming without approximation.

Every layer of the decoder is causal, so keeping what each one still needs (the last rows before a convolution, the
last window - 1 keys and values) makes decoding frame by frame the same computation as decoding the utterance in one
pass: any schedule of chunks gives the same samples up to fp32 rounding. Upstream instead decodes chunks of 300
frames and repeats 25 frames of context, which is shorter than the attention window (`decode_chunked` of
mktts.measure.parity.codec does the same, to compare with).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.layers import CausalConv, ConvNeXt, Linear, ResidualUnit, SnakeBeta, Upsampling
from mktts.codec.pending import Pending
from mktts.codec.state import CodecState, StateLayout
from mktts.codec.transformer import CodecTransformer
from mktts.errors import CodecError
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, CodecConfig

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MIN_USAGE = 1e-5  # upstream's EuclideanCodebook: embedding = embedding_sum / max(cluster_usage, 1e-5)


class CodecDecoder:
    """Codes to PCM. Holds weights only, so any number of streams can share one decoder (one thread at a time)."""

    def __init__(
        self,
        config: CodecConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`tensors` are the decoder's, named as on the Hub less the leading "decoder." (`Checkpoint.codec_tensors`)."""
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        w = _Moved(tensors, self.device, dtype)
        books = ["rvq_first.vq.layers.0", *(f"rvq_rest.vq.layers.{g}" for g in range(NUM_CODEBOOKS - 1))]
        precision = torch.promote_types(dtype, torch.float32)
        self._books = torch.cat([_codebook(tensors, book, precision) for book in books]).to(self.device, dtype)
        self._first_row = torch.arange(NUM_CODEBOOKS, device=self.device) * config.codebook_size
        self._book_out = [Linear.load(w, f"quantizer.rvq_{part}.output_proj", bias=False) for part in ("first", "rest")]
        self._pre_conv = CausalConv.load(w, "pre_conv")
        self._transformer = CodecTransformer(config, w, "pre_transformer")
        self._stages = _stages(config, w)
        self._last_snake = SnakeBeta.load(w, f"decoder.{len(config.upsample_rates) + 1}")
        self._last_conv = CausalConv.load(w, f"decoder.{len(config.upsample_rates) + 2}")
        layers = (self._pre_conv, *self._stages, self._last_conv)
        shapes = [shape for layer in layers if not isinstance(layer, SnakeBeta) for shape in layer.history_shapes]
        self._layout = StateLayout(self._transformer.cache_shape, tuple(shapes), dtype)

    @torch.inference_mode()
    def start(self) -> CodecState:
        """The state before the first frame: silence, and nothing to attend to."""
        return self._layout.zeros(self.device)

    @torch.inference_mode()
    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """The next T frames of a stream: codes (T, 16) integer -> PCM (T * 1920,) float32 in [-1, 1] on the device.

        Codes may lie on the host (checked there, without waiting for the device) or on the device.
        Raises CodecError for codes of another shape, dtype, device or range, and for a state of another decoder.
        """
        pcm = self.advance(self.checked(codes, state), state)
        state.frames += len(codes)
        return pcm

    def submit(self, codes: Tensor, state: CodecState) -> Pending:
        """`decode` to the host; here, unlike with graphs, it is there when this returns. Errors as of `decode`."""
        return Pending(self.decode(codes, state).cpu())

    def decode_all(self, codes: Tensor) -> Tensor:
        """A whole utterance in one pass, about 4 MB of working memory per frame at full size. Else as `decode`."""
        return self.decode(codes, self.start())

    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        """`decode` without checks: tensor operations only, no host synchronisation, so a CUDA graph can hold it.

        `codes` (T, 16) int64 on the device. `state.frames` is left to the caller.
        """
        history = iter(state.history)
        x = F.embedding(codes + self._first_row, self._books)  # (T, 16, codebook_dim / 2)
        x = self._book_out[0](x[:, 0]) + self._book_out[1](x[:, 1:].sum(1))
        x = self._transformer(self._pre_conv(x, history), state.keys, state.values, state.position)
        for stage in self._stages:
            x = stage(x) if isinstance(stage, SnakeBeta) else stage(x, history)
        pcm = self._last_conv(self._last_snake(x), history)
        return pcm[:, 0].float().clamp_(-1.0, 1.0)

    def checked(self, codes: Tensor, state: CodecState) -> Tensor:
        """`codes` as `advance` takes them. Raises what `decode` raises, before anything is changed."""
        self.check(codes, state)
        return codes.to(self.device, torch.int64)

    def check(self, codes: Tensor, state: CodecState) -> None:
        """Raises what `decode` raises. Waits for the device only if `codes` lie there."""
        self._check_codes(codes)
        if state.flat.device != self._books.device or state.layout != self._layout:
            raise CodecError("the state belongs to another decoder: use the one that start() of this decoder returned")

    def _check_codes(self, codes: Tensor) -> None:
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


class _Moved(Mapping[str, Tensor]):
    """`tensors` on a device, each brought over when it is asked for: they are not all there beside what they become."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._tensors, self._device, self._dtype = tensors, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _stages(config: CodecConfig, w: Mapping[str, Tensor]) -> list:
    stages: list = []
    for i, stride in enumerate(config.upsampling_ratios):
        stages += [Upsampling.load(w, f"upsample.{i}.0", stride), ConvNeXt.load(w, f"upsample.{i}.1")]
    stages.append(CausalConv.load(w, "decoder.0"))
    for i, stride in enumerate(config.upsample_rates, start=1):
        block = f"decoder.{i}.block"
        stages += [SnakeBeta.load(w, f"{block}.0"), Upsampling.load(w, f"{block}.1", stride)]
        stages += [ResidualUnit.load(w, f"{block}.{j}", d) for j, d in enumerate(config.dilations, start=2)]
    return stages


def _codebook(tensors: Mapping[str, Tensor], book: str, dtype: torch.dtype) -> Tensor:
    """(2048, codebook_dim / 2)."""
    name = f"quantizer.{book}._codebook"
    usage = tensors[f"{name}.cluster_usage"].to(dtype).clamp(min=_MIN_USAGE)
    return tensors[f"{name}.embedding_sum"].to(dtype) / usage[:, None]
