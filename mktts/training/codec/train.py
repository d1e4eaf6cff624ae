"""Trains encoder, quantiser and decoder together: `python -m mktts train codec`.

The losses are on spectra and autocorrelations, from `adversarial_from` on also from discriminators. From `joint_steps`
on, encoder and codebooks are frozen: codes are then final, and talker and decoder can be trained in parallel."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mktts.model.backend import device_named
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec.model import SIZES, Codec, CodecSizes
from mktts.training.data.audio import Crops
from mktts.training.judge.signal import STEP_SAMPLES
from mktts.training.state import Trainer, adam, add_training_arguments, train_as_asked
from mktts.training.weights import fused

_FLOOR = 1e-5  # of magnitudes before the logarithm; a full-scale sine is 1: -100 dBFS is less than 16 bits can hold
_MEL_WINDOWS = ((256, 40), (512, 64), (1024, 96), (2048, 320))  # samples, bands; the last one resolves harmonics
_DISCRIMINATOR_WINDOWS = (512, 1024, 2048)
_PERIODS = (2, 3, 5, 7, 11)
# Repetition: edges of bands half an octave wide; window, transform and the lags that are compared, in samples. The
# long windows cover the decoder's step of 20 ms and twice that, the short ones follow a gliding pitch.
EDGES_HZ = (300, 425, 600, 850, 1200, 1700, 2400, 3400, 4800, 6800, 11_000)
_LONG, _SHORT = (2560, 4096, slice(48, 1008)), (1200, 2048, slice(48, 600))
_LOUD = 1e-3  # RMS of a band relative to full scale; fainter bands are not compared
# Pitch: the bands that determine its period, its shortest period in samples (400 Hz), the autocorrelation above which
# a window is voiced, the bands compared at it (0.6 to 4.8 kHz), the range around it searched for a maximum (samples).
_PITCH_BANDS, _SHORTEST, _VOICED, _COMPARED, _NEAR = slice(0, 3), 60, 0.5, slice(2, 8), 4


def mel_distance(a: Tensor, b: Tensor, window: int = 1024, bands: int = 80) -> Tensor:
    """Mean |difference| of the natural-log mel magnitudes of PCM (B, n)."""
    mel = mel_filters(window, bands, a.device)
    x, y = (torch.log((mel @ spectrum(pcm, window).abs()).clamp(min=_FLOOR)) for pcm in (a, b))
    return (x - y).abs().mean()


def repetition(pcm: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compares the autocorrelations of each band of PCM (B, n) at lags of 2 to 42 ms with the target's. Returns their
    mean squared difference, (), in windows of 107 and of 50 ms in which the target's band is loud enough; `_at_pitch`,
    (); and the excess of the autocorrelation at 20 ms over the target's, (bands,), without a gradient."""
    short, long = ((_autocorrelations(pcm, *w), _autocorrelations(target, *w)) for w in (_SHORT, _LONG))
    ours, theirs = (found[..., 1 + STEP_SAMPLES - _LONG[2].start] for found in long)
    weight = (long[1][..., 0] > _LOUD**2).float()
    more = (weight * (ours - theirs)).sum((0, 1)) / weight.sum((0, 1)).clamp(min=1)
    return (_distance(*short) + _distance(*long)) / 2, _at_pitch(*short), more.detach()


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared difference of autocorrelations (B, windows, bands, 1 + lags) where the target's band is loud."""
    weight = (theirs[..., :1] > _LOUD**2).float()
    squares = (ours - theirs)[..., 1:].square()
    return (weight * squares).sum() / (weight.sum() * squares.shape[-1]).clamp(min=1)


def _at_pitch(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean |difference| of autocorrelations in short windows (B, windows, bands, 1 + lags) at the pitch's period, where
    the target is voiced: one of hundreds of lags, but the audible one."""
    levels, x, y = theirs[..., :1], ours[..., 1:], theirs[..., 1:]
    told = (levels * y)[..., _PITCH_BANDS, :].sum(-2) / (levels[..., _PITCH_BANDS, :].sum(-2) + _FLOOR**2)
    shortest = _SHORTEST - _SHORT[2].start
    height, period = told[..., shortest:-_NEAR].max(-1, keepdim=True)
    x, y = x[..., _COMPARED, :], y[..., _COMPARED, :]
    period = (period + shortest)[..., None, :].expand(*y.shape[:-1], 1)
    lags = torch.cat([period + d for d in range(-_NEAR, _NEAR + 1)], -1)
    highest, at = y.gather(-1, lags).max(-1, keepdim=True)
    weight = (height > _VOICED).float()[..., None, :] * (levels[..., _COMPARED, :] > _LOUD**2)
    return (weight * (highest - x.gather(-1, lags.gather(-1, at))).abs()).sum() / weight.sum().clamp(min=1)


def _autocorrelations(pcm: Tensor, window: int, transform: int, lags: slice) -> Tensor:
    """(B, windows, bands, 1 + lags): the mean square of each band, then its normalised autocorrelation."""
    shape = torch.hann_window(window, device=pcm.device)
    windows = pcm.float().unfold(1, window, window // 2) * shape
    power = torch.fft.rfft(windows, transform).abs().square()
    found = torch.fft.irfft(power[..., None, :] * _bands(pcm.device, transform))
    level = found[..., :1] / shape.square().sum()
    return torch.cat((level, found[..., lags] / (found[..., :1] + _FLOOR**2 * window)), -1)


@cache
@torch.inference_mode(False)
def _bands(device: torch.device, transform: int) -> Tensor:
    hz = torch.linspace(0, SAMPLE_RATE_HZ / 2, transform // 2 + 1)
    bands = [((hz >= a) & (hz < b)).float() for a, b in zip(EDGES_HZ, EDGES_HZ[1:], strict=False)]
    return torch.stack(bands).to(device)


class Discriminators(nn.Module):
    """Discriminators of spectra at three resolutions and of the waveform folded by five periods (Kong et al. 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # spectra have many more positions than a folded waveform, so their discriminators are narrow
        narrow, wide = (channels,) * 4, (channels, 4 * channels, 8 * channels, 8 * channels)
        self.spectral = nn.ModuleList(_judge((2, *narrow), (3, 9), (1, 2)) for _ in _DISCRIMINATOR_WINDOWS)
        self.periodic = nn.ModuleList(_judge((1, *wide), (5, 1), (3, 1)) for _ in _PERIODS)

    def forward(self, pcm: Tensor) -> list[list[Tensor]]:
        """Returns the outputs of all layers of every discriminator for PCM (B, n), the score last."""
        seen = []
        for window, judge in zip(_DISCRIMINATOR_WINDOWS, self.spectral, strict=True):
            seen_by = spectrum(pcm, window).transpose(1, 2) * (window / 4)  # else biases would dominate faint bands
            seen.append(_layers(judge, torch.stack((seen_by.real, seen_by.imag), 1)))
        for period, judge in zip(_PERIODS, self.periodic, strict=True):
            folded = F.pad(pcm, (0, -pcm.shape[1] % period)).unflatten(1, (-1, period))
            seen.append(_layers(judge, folded[:, None]))
        return seen


def adversarial_losses(real: list[list[Tensor]], fake: list[list[Tensor]]) -> dict[str, Tensor]:
    """`judges`: least-squares loss, 1 for the teacher's audio and 0 for the decoder's (Mao et al. 2017); `adversarial`:
    the decoder's loss; `features`: distance of the discriminators' inner layers, relative to their size."""
    pairs = list(zip(real, fake, strict=True))
    judged = sum((1 - r[-1].float()).square().mean() + f[-1].float().square().mean() for r, f in pairs) / len(pairs)
    adversarial = sum((1 - f[-1].float()).square().mean() for f in fake) / len(fake)
    inner = [layers for r, f in pairs for layers in zip(r[:-1], f[:-1], strict=True)]
    distances = [fused(_relative_distance, x.is_cuda)(x.detach(), y) for x, y in inner]
    return {"judges": judged, "adversarial": adversarial, "features": sum(distances) / len(distances)}


def _relative_distance(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() - y.float()).abs().mean() / x.float().abs().mean().clamp(min=_FLOOR)


def _judge(widths: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int]) -> nn.ModuleList:
    padding = tuple(k // 2 for k in kernel)
    layers = [nn.Conv2d(a, b, kernel, stride, padding) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.ModuleList(nn.utils.parametrizations.weight_norm(c) for c in (*layers, nn.Conv2d(widths[-1], 1, 3, 1, 1)))


def _layers(judge: nn.ModuleList, x: Tensor) -> list[Tensor]:
    seen = []
    for layer in judge:
        # the layout that bf16 convolutions prefer; their outputs then have it too
        weight = layer.weight.contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x, weight, layer.bias, layer.stride, layer.padding)
        if layer is not judge[-1]:
            x = F.leaky_relu(x, 0.1)
        seen.append(x)
    return seen


def spectrum(pcm: Tensor, window: int) -> Tensor:
    """Short-time spectra at a hop of a quarter window: (B, n) -> (B, window // 2 + 1, frames), complex."""
    shape = torch.hann_window(window, device=pcm.device)
    # 2 / window / mean(hann) = 4 / window: a full-scale sine has magnitude 1 in every resolution
    return torch.stft(pcm.float(), window, window // 4, window=shape, return_complex=True) * (4 / window)


@cache  # on the device, because a copy to it waits for all work launched before
@torch.inference_mode(False)
def mel_filters(window: int, bands: int, device: torch.device) -> Tensor:
    """Triangular filters equally spaced on the mel scale, each summing to 1: (bands, window // 2 + 1)."""
    bins_mel = 2595 * torch.log10(1 + torch.linspace(0, SAMPLE_RATE_HZ / 2, window // 2 + 1) / 700)
    edges_mel = torch.linspace(0, float(bins_mel[-1]), bands + 2)
    low, centre, high = (edges_mel[i : i + bands, None] for i in range(3))
    weights = torch.minimum((bins_mel - low) / (centre - low), (high - bins_mel) / (high - centre)).clamp(min=0)
    # low bands of short windows fall between two bins and use the nearer one
    nearest = F.one_hot((bins_mel - centre).abs().argmin(1), window // 2 + 1)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, nearest.float())
    return (weights / weights.sum(1, keepdim=True)).to(device)


_ALWAYS = 0x7FFF_FFFF  # a step number whose crops are measured after every block, for comparability
_DOUBLINGS = 9
_QUIET = 1e-4  # of levels at the start: -80 dBFS


@dataclass(frozen=True)
class CodecRecipe:
    """Everything that determines the result, except the data."""

    seed: int = 0
    steps: int = 40_000  # over which the learning rate falls to a twentieth
    block: int = 250  # steps between measurements
    warmup_steps: int = 500
    batch: int = 16
    crop_frames: int = 28
    ahead_frames: int = 2  # at the end of a crop: lookahead of the encoder, not part of the loss
    unheard_frames: int = 3  # at the start of a crop, unless a clip starts there: the decoder lacks the context
    judged_frames: int = 12  # input of the discriminators
    joint_steps: int = 20_000
    adversarial_from: int = 4_000
    rate: float = 4e-4
    judge_rate: float = 2e-4
    averaged_steps: int = 1_000  # approximate number of steps over which weights are averaged
    onsets: float = 0.25  # fraction of crops that start at the beginning of a clip
    mel: float = 20.0
    repetition: float = 80.0
    pitch: float = 40.0
    onset: float = 0.02  # the loss is on few and faint samples: at 0.1 its gradient is twice that of mel
    commitment: float = 1.0
    spread: float = 1.0
    judged_spread: float = 0.3  # spread from `adversarial_from` on; without it only 15 of 55 dimensions remain in use
    adversarial: float = 3.0
    features: float = 10.0


class CodecTrainer(Trainer):
    """Trains codec and discriminators."""

    def __init__(
        self, recipe: CodecRecipe, sizes: CodecSizes, crops: Crops, device: str = "cpu", graphs: bool = False
    ) -> None:
        """On CUDA, products are in bf16, except near the waveform."""
        super().__init__(recipe, sizes, device, graphs)
        torch.manual_seed(recipe.seed)
        self.crops = crops
        self.codec, self.judges = Codec(sizes).to(device), Discriminators(sizes.judges).to(device)
        self.modules = {"codec": self.codec, "judges": self.judges}
        for name, module in self.modules.items():
            self.optimizers[name] = adam(module.parameters(), self.device, betas=(0.8, 0.99), weight_decay=0.01)
        self.average = {
            f"codec.{name}": p.detach().clone()
            for name, p in self.codec.named_parameters()
            if not name.startswith("encoder.")  # whose live weights make the codes
        }
        self._share = torch.ones((), device=self.device)  # fraction of the newest weights in the average
        self._batches: Iterator[Tensor] | None = None
        self._first = round(recipe.onsets * recipe.batch)  # crops of a batch that start at the beginning of a clip
        heard = torch.ones(recipe.batch, recipe.crop_frames - recipe.ahead_frames)
        heard[self._first :, : recipe.unheard_frames] = 0
        self._heard = heard.repeat_interleave(SAMPLES_PER_FRAME, 1).bool().to(device)
        self._always = crops.batch(_ALWAYS, recipe.batch).to(device)

    def train_step(self) -> dict[str, Tensor]:
        r = self.recipe
        if self._batches is None:
            self._batches = self.crops.batches(self.step, r.batch)
        pcm = next(self._batches).to(self.device, non_blocking=True)
        self.begin_step(r.rate, r.judge_rate)
        if self.step == 0:
            with torch.no_grad():
                self.codec.quantizer.begin(self.codec.encoder(pcm))
        self._share.fill_(max(1 / (1 + self.step), 1 / r.averaged_steps))
        joint, adversarial = self.step < r.joint_steps, self.step >= r.adversarial_from
        judged = (r.crop_frames - r.ahead_frames - r.judged_frames) * SAMPLES_PER_FRAME
        start = torch.randint(judged + 1, (1,)).to(self.device)
        work = partial(self._step, joint=joint, adversarial=adversarial)
        losses = self.steps.run((joint, adversarial), work, pcm, start)
        self.step += 1
        return losses

    def _step(self, pcm: Tensor, start: Tensor, joint: bool, adversarial: bool) -> dict[str, Tensor]:
        r, quantizer = self.recipe, self.codec.quantizer
        losses: dict[str, Tensor] = {}
        with torch.set_grad_enabled(joint):
            rows = self.codec.encoder(pcm)  # in fp32, as in `encoded`: codes depend on small differences
        if joint:
            losses["judged_spread" if adversarial else "spread"] = spread(rows)
            rows, losses["commitment"] = quantizer.learn(rows)
        else:
            rows = quantizer.summed(quantizer.encode(rows))
        with self.steps.cast():
            heard = rows[:, : r.crop_frames - r.ahead_frames].transpose(1, 2)
            output = self.codec.decoder(quantizer.output_proj(heard))
        pcm = pcm[:, : output.shape[1]]
        output = torch.where(self._heard, output.float(), pcm)
        losses["mel"] = sum(mel_distance(output, pcm, *size) for size in _MEL_WINDOWS) / len(_MEL_WINDOWS)
        losses["repetition"], losses["pitch"], more = repetition(output, pcm)
        if self._first:
            losses["onset"] = onset(output[: self._first], pcm[: self._first])
        if adversarial:
            at = start + torch.arange(r.judged_frames * SAMPLES_PER_FRAME, device=self.device)
            real, fake = pcm.index_select(1, at), output.index_select(1, at)
            with self.steps.cast():
                losses |= adversarial_losses(self.judges(real), self.judges(fake))
        goals = {"judges": losses.pop("judges")} if adversarial else {}
        goals = {"codec": sum(getattr(r, name) * loss for name, loss in losses.items()), **goals}
        for name, goal in goals.items():  # both losses come from a single forward pass
            self.optimizers[name].zero_grad(set_to_none=True)
            goal.backward(inputs=list(self.modules[name].parameters()), retain_graph=name != list(goals)[-1])
        for name in goals:
            torch.nn.utils.clip_grad_norm_(self.modules[name].parameters(), 10.0)
            self.optimizers[name].step()
        self.follow(self._share)
        found = {"loss": goals.pop("codec"), **losses, "comb": more.max(), **goals}
        return {name: value.detach() for name, value in found.items()}

    @torch.no_grad()
    def measured(self) -> dict[str, float]:
        """Log-mel distance of the live codec's copy of fixed crops; and the effective dimension of the encoder's
        output: (sum)^2 / sum of squares of the variances along its principal axes."""
        rows = self.codec.encoder(self._always)
        copy = self.codec.decode(self.codec.quantizer.encode(rows)).clone()
        covariance = torch.cov(rows.flatten(0, 1).T)
        numbers = covariance.trace().square() / covariance.square().sum()
        return {"fixed_mel": float(mel_distance(copy, self._always)), "numbers": float(numbers)}


def spread(rows: Tensor) -> Tensor:
    """Squared distance of the covariance of rows (B, T, vector) from the identity. Without this loss, the encoder
    learns to use only a few of its dimensions, and commitment suppresses the others."""
    rows = rows.flatten(0, 1) - rows.mean((0, 1))
    covariance = rows.T @ rows / len(rows)  # not torch.cov, which reads a value: a recorded step must not
    return (covariance - torch.eye(len(covariance), device=rows.device)).square().sum() / len(covariance)


def onset(pcm: Tensor, target: Tensor) -> Tensor:
    """Mean |difference| of levels (natural log, down to -80 dBFS) in parts of the first 21 ms of PCM (B, n): sample 0,
    sample 1, then parts as long as all before them. It detects a click of one sample caused by the zero history."""
    heads = torch.stack((pcm, target))[..., : 2**_DOUBLINGS].square()
    parts = [heads[..., :1], *(heads[..., n : 2 * n] for n in map((2).__pow__, range(_DOUBLINGS)))]
    x, y = ((torch.stack([part.mean(-1) for part in parts]) + _QUIET**2).log() / 2).unbind(1)
    return (x - y).abs().mean()


EXAMPLES = """examples:
  python -m mktts train codec --data AUDIO --out CODEC --minutes 8.5 --graphs --resume

A run can be cut anywhere and go on with --resume. The last line of standard output is JSON: what was reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser, CodecRecipe())


def main(arguments: argparse.Namespace) -> int:
    """Trains for --minutes. Raises CheckpointError for a state of another recipe, AudioError for invalid shards."""
    recipe = CodecRecipe(**{name: getattr(arguments, name) for name in asdict(CodecRecipe())})
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # there are few shapes
    crops = Crops(arguments.data, recipe.crop_frames, recipe.seed, recipe.onsets)
    trainer = CodecTrainer(recipe, SIZES[arguments.size], crops, device_named(arguments.device), arguments.graphs)
    train_as_asked(trainer, arguments, crops.hours)
    return 0
