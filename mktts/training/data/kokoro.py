"""Kokoro-82M as a teacher: phonemes of many sentences in, 24 kHz speech out, in batches.

Follows the package kokoro 0.9.4 (Apache-2.0, hexgrad) layer by layer. Sentences of different lengths go together: norms
over time see a sentence's own frames, and its padding is zero before every convolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.spec import SAMPLE_RATE_HZ

FRAME_SAMPLES = 600
_STYLE = 128  # dimensions of a style: the first half is of sound, the second of prosody
_HEADS, _LAYERS = 12, 12  # of the text model
_TRANSFORM, _HOP = 20, 5  # samples of the spectra that the vocoder ends in
_PITCH_SAMPLES = 300  # of one value of pitch
_HARMONICS = 9
_SINE, _VOICED_NOISE, _NOISE = 0.1, 0.003, 0.1 / 3  # levels of the source
_VOICED_HZ = 10.0
_STEP = 32  # widths of a batch in frames are multiples of it, so that shapes repeat


@dataclass(frozen=True)
class _Planned:
    """What is known of a sentence before it sounds."""

    durations: Tensor  # (phonemes,) frames
    prosody: Tensor  # (phonemes, 640)
    text: Tensor  # (phonemes, 512)
    style: Tensor  # (256,)
    frames: int


class Kokoro:
    """The model, of weights by the names of the kokoro package's modules, on one device."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """On CUDA the vocoder's convolutions are in fp16 (bf16 is heard), and norms are compiled."""
        self.device = torch.device(device)
        half = torch.float16 if self.device.type == "cuda" else torch.float32
        self._weights = {
            name: w.to(self.device, half if name.startswith("decoder.") and _is_convolution(name, w) else torch.float32)
            for name, w in weights.items()
        }
        self._norm = torch.compile(normed, dynamic=True) if self.device.type == "cuda" else normed
        self._lstms: dict[str, torch.nn.LSTM] = {}
        for name in [n.removesuffix(".weight_ih_l0") for n in weights if n.endswith(".weight_ih_l0")]:
            lstm = torch.nn.LSTM(weights[f"{name}.weight_ih_l0"].shape[1], 256, batch_first=True, bidirectional=True)
            lstm.load_state_dict({key: weights[f"{name}.{key}"].float() for key in lstm.state_dict()})
            self._lstms[name] = lstm.to(self.device).eval()

    def speak(
        self, phonemes: Sequence[Sequence[int]], voices: Sequence[Tensor], seed: int = 0, frames: int = 20_000
    ) -> list[np.ndarray]:
        """float32 (samples,) of each sentence of phoneme numbers, in the style that its voice has for its length.

        voices: (510, 256) for each sentence. seed: of the source's noise. frames: of 25 ms that go together.
        """
        plans = self._plan(phonemes, voices)
        order = sorted(range(len(plans)), key=lambda i: -plans[i].frames)
        generator = torch.Generator(self.device).manual_seed(seed)
        spoken: list[np.ndarray] = [np.zeros(0, np.float32)] * len(plans)
        while order:
            width = -(-plans[order[0]].frames // _STEP) * _STEP
            rows = max(1, frames // width)
            batch, order = order[:rows], order[rows:]
            filled = batch + [batch[-1]] * (rows - len(batch) if self.device.type == "cuda" else 0)
            audio = self._vocode([plans[i] for i in filled], width, generator).cpu().numpy()
            for row, i in zip(audio, batch, strict=False):
                spoken[i] = row[: plans[i].frames * FRAME_SAMPLES].copy()
        return spoken

    @torch.no_grad()
    def _plan(self, phonemes: Sequence[Sequence[int]], voices: Sequence[Tensor], rows: int = 256) -> list[_Planned]:
        order = sorted(range(len(phonemes)), key=lambda i: len(phonemes[i]))
        plans: dict[int, _Planned] = {}
        for begin in range(0, len(order), rows):
            batch = order[begin : begin + rows]
            ids = [torch.tensor([0, *phonemes[i], 0]) for i in batch]
            lengths = torch.tensor([len(row) for row in ids])
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.device)
            style = torch.stack([voices[i][len(phonemes[i])] for i in batch]).to(self.device)
            durations, prosody, text = self._prosody(padded, lengths, style)
            frames = durations.sum(1).tolist()
            for row, i in enumerate(batch):
                n = int(lengths[row])
                plans[i] = _Planned(durations[row, :n], prosody[row, :n], text[row, :n], style[row], frames[row])
        return [plans[i] for i in range(len(phonemes))]

    def _prosody(self, ids: Tensor, lengths: Tensor, style: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Durations (B, N) in frames, prosody (B, N, 640) and text features (B, N, 512) of padded ids (B, N)."""
        count = ids.shape[1]
        valid = torch.arange(count, device=self.device) < lengths.to(self.device)[:, None]
        mask, manner = valid.unsqueeze(-1).float(), style[:, _STYLE:]
        every = manner[:, None].expand(-1, count, -1)
        x = torch.cat((self._linear("bert_encoder", self._bert(ids, valid)), every), -1) * mask
        for i in (0, 2, 4):
            name = "predictor.text_encoder.lstms"
            h = F.layer_norm(self._lstm(f"{name}.{i}", x, lengths), (512,))
            gain, shift = self._linear(f"{name}.{i + 1}.fc", manner)[:, None].chunk(2, -1)
            x = torch.cat(((1 + gain) * h + shift, every), -1) * mask
        chances = self._linear("predictor.duration_proj.linear_layer", self._lstm("predictor.lstm", x, lengths))
        durations = chances.sigmoid().sum(-1).round().clamp(min=1).long() * valid
        text = self._weights["text_encoder.embedding.weight"][ids] * mask
        for i in range(3):
            name = f"text_encoder.cnn.{i}"
            text = self._conv(f"{name}.0", text.transpose(1, 2), padding=2).transpose(1, 2)
            norm = F.layer_norm(text, (512,), self._weights[f"{name}.1.gamma"], self._weights[f"{name}.1.beta"])
            text = F.leaky_relu(norm, 0.2) * mask
        return durations, x, self._lstm("text_encoder.lstm", text, lengths) * mask

    def _bert(self, ids: Tensor, valid: Tensor) -> Tensor:
        """One ALBERT layer twelve times."""
        embeddings, layer = "bert.embeddings", "bert.encoder.albert_layer_groups.0.albert_layers.0"
        w = self._weights
        x = w[f"{embeddings}.word_embeddings.weight"][ids] + w[f"{embeddings}.token_type_embeddings.weight"][0]
        x = x + w[f"{embeddings}.position_embeddings.weight"][: ids.shape[1]]
        x = self._linear("bert.encoder.embedding_hidden_mapping_in", self._layer_norm(f"{embeddings}.LayerNorm", x))
        for _ in range(_LAYERS):
            qkv = (self._linear(f"{layer}.attention.{part}", x) for part in ("query", "key", "value"))
            q, k, v = (part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in qkv)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None]).transpose(1, 2).flatten(2)
            seen = self._linear(f"{layer}.attention.dense", seen)
            x = self._layer_norm(f"{layer}.attention.LayerNorm", x + seen)
            inner = F.gelu(self._linear(f"{layer}.ffn", x), approximate="tanh")
            x = self._layer_norm(f"{layer}.full_layer_layer_norm", x + self._linear(f"{layer}.ffn_output", inner))
        return x

    @torch.no_grad()
    def _vocode(self, plans: Sequence[_Planned], width: int, generator: torch.Generator) -> Tensor:
        """Audio (B, width * 600) float32."""
        pad = torch.nn.utils.rnn.pad_sequence
        durations = pad([plan.durations for plan in plans], batch_first=True)
        prosody, text = (pad([getattr(p, part) for p in plans], batch_first=True) for part in ("prosody", "text"))
        style = torch.stack([plan.style for plan in plans])
        sound, manner = style[:, :_STYLE], style[:, _STYLE:]
        ends = durations.cumsum(1)
        frames = ends[:, -1]

        def mask(rate: int, more: int = 0) -> Tensor:
            at = torch.arange(width * rate + more, device=self.device)
            return (at < (frames * rate + more)[:, None]).float()[:, None]

        whole, double = mask(1), mask(2)
        at = torch.searchsorted(ends, torch.arange(width, device=self.device).repeat(len(plans), 1), right=True)
        at = at.clamp(max=ends.shape[1] - 1)[..., None]
        shared = self._lstm("predictor.shared", prosody.gather(1, at.expand(-1, -1, 640)), frames.cpu())
        curves = []
        for name in ("F0", "N"):  # pitch and energy
            x = shared.transpose(1, 2) * whole
            for i, twice in enumerate((None, double, None)):
                x = self._residual(f"predictor.{name}.{i}", x, manner, whole if i < 2 else double, twice)
            curves.append(self._conv(f"predictor.{name}_proj", x) * double)
        said = text.gather(1, at.expand(-1, -1, 512)).transpose(1, 2) * whole
        f0, energy = curves
        halves = [self._conv(f"decoder.{n}_conv", x, stride=2, padding=1) for n, x in (("F0", f0), ("N", energy))]
        low = self._conv("decoder.asr_res.0", said)
        beside = torch.cat([low, *(half.to(low.dtype) for half in halves)], 1) * whole.to(low.dtype)
        x = self._residual("decoder.encode", torch.cat([said, *halves], 1) * whole, sound, whole)
        for i in range(4):
            last = double if i == 3 else None
            x = self._residual(f"decoder.decode.{i}", torch.cat([x, beside], 1), sound, whole, last)
        return self._generate(x, self._source(f0[:, 0], generator), sound, mask)

    def _generate(self, x: Tensor, source: Tensor, style: Tensor, mask) -> Tensor:
        """The vocoder's two up-samplings by 10 and 6, each joined by the source, and the spectra's inverse."""
        name, window = "decoder.generator", torch.hann_window(_TRANSFORM, device=self.device)
        spectra = torch.stft(source, _TRANSFORM, _HOP, window=window, return_complex=True)
        harmonic = torch.cat((spectra.abs(), spectra.angle()), 1) * mask(120, 1)
        masks = (mask(20), mask(120, 1))
        joined = ((20, 10, 7, {"stride": 6, "padding": 3}), (12, 6, 11, {}))
        for i, (kernel, rate, noise_kernel, cut) in enumerate(joined):
            given = self._conv(f"{name}.noise_convs.{i}", harmonic, **cut)
            given = self._snakes(f"{name}.noise_res.{i}", given, style, masks[i], noise_kernel)
            w, b = self._weights[f"{name}.ups.{i}.weight"], self._weights[f"{name}.ups.{i}.bias"]
            x = F.leaky_relu(x, 0.1).to(w.dtype)
            x = F.conv_transpose1d(x, w, b.to(w.dtype), stride=rate, padding=(kernel - rate) // 2)
            x = (F.pad(x, (1, 0), mode="reflect") if i else x) + given
            kernels = enumerate((3, 7, 11))
            x = sum(self._snakes(f"{name}.resblocks.{3 * i + j}", x, style, masks[i], k) for j, k in kernels) / 3
            x = x * masks[i].to(x.dtype)
        x = self._conv(f"{name}.conv_post", F.leaky_relu(x), padding=3).float()
        bins = _TRANSFORM // 2 + 1
        spectra = torch.polar(x[:, :bins].exp() * masks[1], x[:, bins:].sin())
        return torch.istft(spectra, _TRANSFORM, _HOP, window=window)

    def _source(self, pitch_hz: Tensor, generator: torch.Generator) -> Tensor:
        """Nine harmonics and noise, joined into one: pitch (B, n) of 12.5 ms -> (B, 300 n)."""
        harmonics = torch.arange(1, _HARMONICS + 1, device=self.device, dtype=torch.float64)[:, None]
        turns = (pitch_hz.double()[:, None] * harmonics / SAMPLE_RATE_HZ % 1).cumsum(-1) * _PITCH_SAMPLES
        turns = F.interpolate(turns, scale_factor=_PITCH_SAMPLES, mode="linear") % 1
        voiced = (pitch_hz.repeat_interleave(_PITCH_SAMPLES, -1) > _VOICED_HZ).float()[:, None]
        x = (turns.float() * (2 * math.pi)).sin() * _SINE * voiced
        drawn = torch.randn(x.shape, device=self.device, generator=generator)
        x = x + drawn * (voiced * _VOICED_NOISE + (1 - voiced) * _NOISE)
        return self._linear("decoder.generator.m_source.l_linear", x.transpose(1, 2)).tanh().squeeze(-1)

    def _residual(self, name: str, x: Tensor, style: Tensor, mask: Tensor, twice: Tensor | None = None) -> Tensor:
        """AdaIN residual block; twice: the mask at double the rate, where the block doubles it."""
        y = self._styled(f"{name}.norm1", x, style, mask, 0.2)
        if twice is not None:
            w = self._weights[f"{name}.pool.weight"]
            bias = self._weights[f"{name}.pool.bias"].to(w.dtype)
            doubling = {"stride": 2, "padding": 1, "output_padding": 1, "groups": x.shape[1]}
            y = F.conv_transpose1d(y.to(w.dtype), w, bias, **doubling) * twice
            x, mask = x.repeat_interleave(2, -1), twice
        y = self._conv(f"{name}.conv1", y, padding=1)
        y = self._conv(f"{name}.conv2", self._styled(f"{name}.norm2", y, style, mask, 0.2), padding=1)
        if f"{name}.conv1x1.weight" in self._weights:
            x = self._conv(f"{name}.conv1x1", x)
        return (y + x) * mask.to(y.dtype) * math.sqrt(0.5)

    def _snakes(self, name: str, x: Tensor, style: Tensor, mask: Tensor, kernel: int) -> Tensor:
        """Three residual units of AdaIN, snake and dilated convolution."""
        for i, dilation in enumerate((1, 3, 5)):
            y = self._styled(f"{name}.adain1.{i}", x, style, mask, self._weights[f"{name}.alpha1.{i}"])
            y = self._conv(f"{name}.convs1.{i}", y, padding=(kernel - 1) * dilation // 2, dilation=dilation)
            y = self._styled(f"{name}.adain2.{i}", y, style, mask, self._weights[f"{name}.alpha2.{i}"])
            x = x + self._conv(f"{name}.convs2.{i}", y, padding=(kernel - 1) // 2)
        return x

    def _styled(self, name: str, x: Tensor, style: Tensor, mask: Tensor, activation: float | Tensor) -> Tensor:
        gain, shift = self._linear(f"{name}.fc", style).unsqueeze(-1).chunk(2, 1)
        return self._norm(x, gain, shift, mask, activation)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _conv(self, name: str, x: Tensor, **choices: int) -> Tensor:
        w, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return F.conv1d(x.to(w.dtype), w, None if bias is None else bias.to(w.dtype), **choices)

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], 1e-12)

    def _lstm(self, name: str, x: Tensor, lengths: Tensor) -> Tensor:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found = self._lstms[name](packed)[0]
        return torch.nn.utils.rnn.pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]


def normed(x: Tensor, gain: Tensor, shift: Tensor, mask: Tensor, activation: float | Tensor) -> Tensor:
    """Instance norm over the frames of `mask`, in fp32, scaled and shifted; then a leaky ReLU of that slope, or a snake
    of those frequencies; padding is zero."""
    count, y = mask.sum(-1, keepdim=True), x.float()
    y = y - (y * mask).sum(-1, keepdim=True) / count
    y = y * torch.rsqrt((y * y * mask).sum(-1, keepdim=True) / count + 1e-5) * (1 + gain) + shift
    if isinstance(activation, float):
        y = F.leaky_relu(y, activation)
    else:
        y = y + (activation * y).sin().square() / activation
    return (y * mask).to(x.dtype)


def _is_convolution(name: str, weight: Tensor) -> bool:
    return weight.dim() == 3 and "alpha" not in name and "_conv." not in name
