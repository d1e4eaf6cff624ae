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
from mktts.codec.state import CodecState, StateLayout
from mktts.codec.streaming import StreamingCodec
from mktts.codec.transformer import CodecTransformer
from mktts.spec import NUM_CODEBOOKS, CodecConfig

_MIN_USAGE = 1e-5  # upstream's EuclideanCodebook: embedding = embedding_sum / max(cluster_usage, 1e-5)


class CodecDecoder(StreamingCodec):
    """The decoder in plain operators, on any device."""

    name = "plain"

    def __init__(
        self,
        config: CodecConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`tensors` by Hub names without the prefix `decoder.` (`Checkpoint.codec_tensors`)."""
        device = torch.device(device)
        w = _Moved(tensors, device, dtype)
        books = ["rvq_first.vq.layers.0", *(f"rvq_rest.vq.layers.{g}" for g in range(NUM_CODEBOOKS - 1))]
        precision = torch.promote_types(dtype, torch.float32)
        tables = torch.cat([_codebook(tensors, book, precision) for book in books]).to(device, dtype)
        self.first_row = torch.arange(NUM_CODEBOOKS, device=device) * config.codebook_size
        self.book_out = [Linear.load(w, f"quantizer.rvq_{part}.output_proj", bias=False) for part in ("first", "rest")]
        self.pre_conv = CausalConv.load(w, "pre_conv")
        self.transformer = CodecTransformer(config, w, "pre_transformer")
        self.stages = _stages(config, w)
        self.last_snake = SnakeBeta.load(w, f"decoder.{len(config.upsample_rates) + 1}")
        self.last_conv = CausalConv.load(w, f"decoder.{len(config.upsample_rates) + 2}")
        layers = (self.pre_conv, *self.stages, self.last_conv)
        shapes = [shape for layer in layers if not isinstance(layer, SnakeBeta) for shape in layer.history_shapes]
        super().__init__(config, tables, StateLayout(self.transformer.cache_shape, tuple(shapes), dtype), device)

    def advance(self, codes: Tensor, state: CodecState) -> Tensor:
        """See `StreamingCodec.advance`."""
        history = iter(state.history)
        x = F.embedding(codes + self.first_row, self.books)  # (T, 16, codebook_dim / 2)
        x = self.book_out[0](x[:, 0]) + self.book_out[1](x[:, 1:].sum(1))
        x = self.transformer(self.pre_conv(x, history), state.keys, state.values, state.position)
        for stage in self.stages:
            x = stage(x) if isinstance(stage, SnakeBeta) else stage(x, history)
        pcm = self.last_conv(self.last_snake(x), history)
        return pcm[:, 0].float().clamp_(-1.0, 1.0)


class _Moved(Mapping[str, Tensor]):
    """`tensors` on a device, each copied there when it is asked for, so that never all of them take memory there."""

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
