"""The codec to train: an encoder that only training needs, sixteen codebooks, and the decoder that
`mktts.codec.decoder` streams, with Hub names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.audio import from_pcm16
from mktts.checkpoint.random.make import Json, small_files, write_weights
from mktts.checkpoint.tensors import expected_codec_tensors
from mktts.codec.layers import CONVNEXT_EPS
from mktts.common import write_json
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, CodecConfig
from mktts.training.state import read_state
from mktts.training.weights import Weights, fused

_LAYER_SCALE = 0.1  # initial value; the released models' 0.01 suits longer training


class Decoder(nn.Module):
    """Summed codebook vectors (B, codebook_dim, T) -> PCM (B, T * samples per frame), not clamped."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        self.config = decoder_config(sizes)
        expected = expected_codec_tensors(config_json(sizes), encoder=False)
        self.w = Weights({name: spec.shape for name, spec in expected.items() if ".quantizer." not in name}, _initial)

    def forward(self, x: Tensor) -> Tensor:
        x = self._transformer(self._conv("decoder.pre_conv", x))
        for i, rate in enumerate(self.config.upsampling_ratios):
            x = self._convnext(f"decoder.upsample.{i}.1", self._wider(f"decoder.upsample.{i}.0", x, rate))
        x = self._conv("decoder.decoder.0", x)
        rates = self.config.upsample_rates
        for i, rate in enumerate(rates[:-1], start=1):
            x = self._block(f"decoder.decoder.{i}.block", x, rate)
        with torch.autocast(x.device.type, enabled=False):  # at 24 kHz the rounding of bf16 is audible as noise
            last = len(rates)
            x = self._block(f"decoder.decoder.{last}.block", x.float(), rates[-1])
            x = self._conv(f"decoder.decoder.{last + 2}", self._snake(f"decoder.decoder.{last + 1}", x))
        return x[:, 0]

    def _conv(self, name: str, x: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
        """A causal convolution: padded on the left only."""
        weight = self.w[f"{name}.conv.weight"]
        left = (weight.shape[2] - 1) * dilation
        return F.conv1d(F.pad(x, (left, 0)), weight, self.w[f"{name}.conv.bias"], dilation=dilation, groups=groups)

    def _wider(self, name: str, x: Tensor, stride: int) -> Tensor:
        """A transposed convolution, trimmed on the right."""
        y = F.conv_transpose1d(x, self.w[f"{name}.conv.weight"], self.w[f"{name}.conv.bias"], stride)
        return y[..., : x.shape[-1] * stride]

    def _snake(self, name: str, x: Tensor) -> Tensor:
        return fused(snake, x.is_cuda)(x, self.w[f"{name}.alpha"], self.w[f"{name}.beta"])

    def _block(self, name: str, x: Tensor, rate: int) -> Tensor:
        """A waveform block: Snake, upsampling by `rate` to half the channels, three residual units."""
        x = self._wider(f"{name}.1", self._snake(f"{name}.0", x), rate)
        for i, dilation in enumerate(self.config.dilations, start=2):
            y = self._conv(f"{name}.{i}.conv1", self._snake(f"{name}.{i}.act1", x), dilation)
            x = x + self._conv(f"{name}.{i}.conv2", self._snake(f"{name}.{i}.act2", y))
        return x

    def _convnext(self, name: str, x: Tensor) -> Tensor:
        h = self._conv(f"{name}.dwconv", x, groups=x.shape[1]).transpose(1, 2)
        h = F.layer_norm(h, h.shape[-1:], self.w[f"{name}.norm.weight"], self.w[f"{name}.norm.bias"], CONVNEXT_EPS)
        h = self.w.linear(f"{name}.pwconv2", F.gelu(self.w.linear(f"{name}.pwconv1", h)))
        return x + (self.w[f"{name}.gamma"] * h).transpose(1, 2)

    def _transformer(self, x: Tensor) -> Tensor:
        """(B, latent, T) -> the same shape."""
        root, at = "decoder.pre_transformer", torch.arange(x.shape[-1], device=x.device)
        ago = at[:, None] - at
        mask = (ago >= 0) & (ago < self.config.sliding_window)
        h = self.w.linear(f"{root}.input_proj", x.transpose(1, 2)).float()
        return self.w.linear(f"{root}.output_proj", self.w.stack(root, self.config, h, mask)).transpose(1, 2)


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """`mktts.codec.layers.SnakeBeta` of x (B, channels, time); in fp32, because bf16 is too coarse for the phase."""
    wide = x.float()
    return (wide + torch.sin(wide * alpha.exp()[:, None]).square() / (beta.exp()[:, None] + 1e-9)).to(x.dtype)


def _initial(name: str, parameter: Tensor) -> None:
    if name.endswith((".alpha", ".beta", ".bias")):
        parameter.zero_()
    elif name.endswith((".scale", ".gamma")):
        parameter.fill_(_LAYER_SCALE)
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        nn.init.kaiming_uniform_(parameter, 5**0.5)  # torch's default for convolutions and linear layers


_WINDOW, _HOP = 960, 240  # samples of the encoder's spectra
_STRIDES = (2, 2, 2)  # from 100 spectra a second to 12.5 frames
_KEPT = 0.99  # fraction of a codebook's sums kept in a step
_AFTER = 14  # frames of silence after a clip: the encoder's lookahead
_LEAST_USED = 0.03  # of an even share; entries chosen less often are reinitialised


@dataclass(frozen=True)
class CodecSizes:
    """Widths and depths; the decoder's are named as in speech_tokenizer/config.json; kernel sizes as released."""

    codebook_size: int = 256
    vector: int = 64  # dimensions of a codebook's entries
    latent_dim: int = 192
    hidden_size: int = 256  # of the decoder's transformer
    intermediate_size: int = 512
    num_attention_heads: int = 8
    head_dim: int = 32
    num_hidden_layers: int = 3
    sliding_window: int = 24  # frames; shorter than a training crop, so that every distance occurs in training
    decoder_dim: int = 256  # channels after `upsampling_ratios`, halved by each upsampling block
    upsampling_ratios: tuple[int, ...] = (2, 2)  # from frames to 50 Hz, each with a ConvNeXt
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)  # from 50 Hz to samples
    encoder: int = 192  # channels
    encoder_layers: int = 2  # ConvNeXts at each of four rates
    judges: int = 32  # channels of a discriminator's first layer


VOICE = CodecSizes()
TINY = CodecSizes(32, 8, 16, 16, 32, 2, 8, 1, 6, 32, encoder=16, encoder_layers=1, judges=4)  # for tests
SIZES = {"voice": VOICE, "tiny": TINY}


def config_json(sizes: CodecSizes) -> Json:
    """speech_tokenizer/config.json for these sizes; with the smallest encoder that upstream builds, as it has none."""
    released = small_files("0.6b", "custom_voice", full_codec=True)["speech_tokenizer/config.json"]
    outer, decoder = 2 * sizes.vector, released["decoder_config"]
    given = json.loads(json.dumps(asdict(sizes)))
    decoder |= {key: value for key, value in given.items() if key in decoder}
    decoder |= {"num_key_value_heads": sizes.num_attention_heads}
    decoder |= dict.fromkeys(("codebook_dim", "vector_quantization_hidden_dimension"), outer)
    least = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_filters": 2, "num_hidden_layers": 0}
    least |= dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "upsample_groups"), outer)
    least |= dict.fromkeys(("codebook_dim", "vector_quantization_hidden_dimension"), sizes.vector)
    released["encoder_config"] |= least | {"codebook_size": sizes.codebook_size, "num_quantizers": NUM_CODEBOOKS}
    return released


def decoder_config(sizes: CodecSizes) -> CodecConfig:
    """The decoder's dimensions, as inference reads them from the file."""
    return CodecConfig.of(config_json(sizes)["decoder_config"], "the codec's sizes")


class _EncoderBlock(nn.Module):
    """The decoder's ConvNeXt block, but not causal: it looks ahead as far as back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.inner, self.outer = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).transpose(1, 2))
        return x + (self.scale * self.outer(F.gelu(self.inner(h)))).transpose(1, 2)


class CodecEncoder(nn.Module):
    """PCM (B, T * samples per frame) -> (B, T, vector). The input spectra are complex, with magnitudes to the power of
    0.3: without phases, the decoder repeats the same samples in each of its steps while the codes are constant, which
    gives a comb of spectral lines unrelated to the pitch."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        width = sizes.encoder
        self.register_buffer("shape", torch.hann_window(_WINDOW), persistent=False)
        self.first = nn.Conv1d(2 * (_WINDOW // 2 + 1), width, 1)
        layers: list[nn.Module] = [_EncoderBlock(width) for _ in range(sizes.encoder_layers)]
        for stride in _STRIDES:
            layers.append(nn.Conv1d(width, width, stride, stride))
            layers += [_EncoderBlock(width) for _ in range(sizes.encoder_layers)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, sizes.vector)
        for layer in self.modules():  # with torch's default, the frames' common part hides their differences
            if isinstance(layer, nn.Conv1d | nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
                nn.init.zeros_(layer.bias)

    def forward(self, pcm: Tensor) -> Tensor:
        side = (_WINDOW - _HOP) // 2
        windows = F.pad(pcm, (side, side)).unfold(1, _WINDOW, _HOP) * self.shape
        spectra = torch.fft.rfft(windows) * (4 / _WINDOW)
        spectra = spectra * (spectra.real.square() + spectra.imag.square() + 1e-10).pow(-0.35)
        x = torch.cat((spectra.real, spectra.imag), -1).transpose(1, 2)
        return self.last(self.norm(self.layers(self.first(x)).transpose(1, 2)))


class Quantizer(nn.Module):
    """Residual vector quantisation: each codebook quantises the residual of those before it, with entries that are
    moving averages. The released layout has a separate projection for the first codebook; here both are the same."""

    def __init__(self, sizes: CodecSizes) -> None:
        super().__init__()
        shape = (NUM_CODEBOOKS, sizes.codebook_size)
        self.output_proj = nn.Conv1d(sizes.vector, 2 * sizes.vector, 1, bias=False)
        self.register_buffer("books", torch.zeros(*shape, sizes.vector))
        self.register_buffer("sums", torch.zeros(*shape, sizes.vector))
        self.register_buffer("usage", torch.zeros(shape))

    def summed(self, codes: Tensor) -> Tensor:
        """The sum of the codes' entries, (B, T, vector)."""
        return sum(F.embedding(code, book) for code, book in zip(codes.unbind(-1), self.books, strict=True))

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Tensor:
        """Rows (B, T, vector) -> codes (B, T, 16): in each codebook the entry nearest to the residual."""
        left, codes = rows.flatten(0, 1), []
        for book in self.books:
            codes.append(_nearest(left, book))
            left = left - book[codes[-1]]
        return torch.stack(codes, -1).view(*rows.shape[:-1], -1)

    @torch.no_grad()
    def begin(self, rows: Tensor) -> None:
        """Initialises all entries with rows (B, T, vector) of a first batch, or with their residuals."""
        left = rows.flatten(0, 1)
        self.usage.fill_(len(left) / self.books.shape[1])
        for number, book in enumerate(self.books):
            book.copy_(left[torch.randint(len(left), (len(book),), device=left.device)])
            self.sums[number] = book * self.usage[number][:, None]
            left = left - book[_nearest(left, book)]

    def learn(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the quantised rows (B, T, vector), with the gradient of the rows, and the mean squared residual.
        Moves entries towards the rows that chose them, and replaces entries that are rarely chosen by random rows."""
        left, missed = rows.flatten(0, 1), rows.new_zeros(())
        for number, book in enumerate(self.books.clone()):
            code = _nearest(left.detach(), book)
            self._move(number, left.detach(), code)
            left = left - book[code]
            missed = missed + left.square().mean() / NUM_CODEBOOKS
        return rows - left.detach().view_as(rows), missed

    @torch.no_grad()
    def _move(self, number: int, rows: Tensor, code: Tensor) -> None:
        size = self.books.shape[1]
        chosen = (code[:, None] == torch.arange(size, device=rows.device)).to(rows.dtype)
        self.usage[number].lerp_(chosen.sum(0), 1 - _KEPT)
        self.sums[number].lerp_(chosen.T @ rows, 1 - _KEPT)
        drawn = torch.randint(len(rows), (size,), device=rows.device)
        even = len(rows) / size
        fresh = self.usage[number] < _LEAST_USED * even
        self.usage[number] = self.usage[number].masked_fill(fresh, even)
        self.sums[number] = torch.where(fresh[:, None], rows[drawn] * even, self.sums[number])
        self.books[number] = self.sums[number] / self.usage[number][:, None]


def _nearest(rows: Tensor, book: Tensor) -> Tensor:
    return (book.square().sum(1) - 2 * rows @ book.T).argmin(1)


class Codec(nn.Module):
    """PCM to sixteen codes a frame, and back."""

    def __init__(self, sizes: CodecSizes = VOICE) -> None:
        super().__init__()
        self.sizes = sizes
        self.encoder, self.quantizer = CodecEncoder(sizes), Quantizer(sizes)
        self.decoder = Decoder(sizes)

    @torch.inference_mode()
    def encode(self, pcm: Tensor) -> Tensor:
        """PCM (B, T * samples per frame) -> codes (B, T, 16)."""
        return self.quantizer.encode(self.encoder(pcm))

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, T, 16) -> PCM (B, T * samples per frame), clamped to [-1, 1] as in inference."""
        rows = self.quantizer.summed(codes).transpose(1, 2)
        return self.decoder(self.quantizer.output_proj(rows)).clamp(-1.0, 1.0)


def load_codec(folder: Path, device: torch.device | str = "cpu") -> Codec:
    """The codec of `train codec`, with averaged weights where available. Raises CheckpointError without a state."""
    state = read_state(folder)
    codec, weights = Codec(CodecSizes(**state["sizes"])), state["weights"] | state.get("average", {})
    codec.load_state_dict({name: weights[f"codec.{name}"] for name in codec.state_dict()})
    return codec.eval().to(device)


def encoded(codec: Codec, clips: list[np.ndarray], batch_frames: int = 8_000) -> list[Tensor]:
    """Encodes int16 clips (n,), each followed by silence -> codes (ceil(n / samples per frame), 16) uint8, CPU."""
    device = next(codec.parameters()).device
    frames = [-(-len(clip) // SAMPLES_PER_FRAME) for clip in clips]
    order = sorted(range(len(clips)), key=lambda i: frames[i])
    codes = [torch.zeros(0, NUM_CODEBOOKS, dtype=torch.uint8)] * len(clips)
    while order:
        size = max(1, batch_frames // max(1, frames[order[-1]]))
        batch, order = order[-size:], order[:-size]
        pcm = nn.utils.rnn.pad_sequence([torch.from_numpy(from_pcm16(clips[i])) for i in batch], batch_first=True)
        pcm = F.pad(pcm, (0, (frames[batch[-1]] + _AFTER) * SAMPLES_PER_FRAME - pcm.shape[1]))
        found = codec.encode(pcm.to(device)).to("cpu", torch.uint8)
        for row, i in zip(found, batch, strict=True):
            codes[i] = row[: frames[i]].clone()
    return codes


def hub_tensors(codec: Codec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The decoder's tensors of speech_tokenizer/model.safetensors, by Hub name. Codebooks have a usage of 1, which is
    exact in any dtype; input projections, which only encoding needs, are zero."""
    tensors = codec.decoder.w.hub()
    projection = codec.quantizer.output_proj.weight
    for name, books in (("rvq_first", codec.quantizer.books[:1]), ("rvq_rest", codec.quantizer.books[1:])):
        prefix = f"decoder.quantizer.{name}."
        tensors[prefix + "output_proj.weight"] = projection
        tensors[prefix + "input_proj.weight"] = torch.zeros(projection.transpose(0, 1).shape)
        for i, book in enumerate(books):
            tensors[f"{prefix}vq.layers.{i}._codebook.cluster_usage"] = torch.ones(len(book))
            tensors[f"{prefix}vq.layers.{i}._codebook.embedding_sum"] = book
    return {name: tensor.detach().to("cpu", dtype).clone() for name, tensor in sorted(tensors.items())}


def write_codec(folder: Path, codec: Codec, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes configuration and weights of a checkpoint's speech_tokenizer/ to `folder`."""
    write_json(folder / "config.json", config_json(codec.sizes), sort_keys=False)
    write_weights(folder, hub_tensors(codec, dtype))
