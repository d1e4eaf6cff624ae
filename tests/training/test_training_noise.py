"""Noise books, and what they are trained by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec.analysis import features
from mktts.training.codec.defects import onset, repetition
from mktts.training.codec.fit import fit
from mktts.training.codec.losses import spectral_losses
from mktts.training.codec.model import Codec, hub_tensors, noise_books
from mktts.training.codec.quantizer import scattered
from mktts.training.codec.sizes import TINY, CodecSizes
from mktts.training.codec.trainer import CodecRecipe, CodecTrainer
from mktts.training.data.codec_data import Crops, vowels, write_shard
from mktts.training.data.encode import encode_shard
from mktts.training.judge.edges import edge_steps
from mktts.training.judge.signal import lag_correlation

SILENT = replace(TINY, noise_books=0, noise=0)


def noise(seed: int, rows: int = 1, frames: int = 12) -> Tensor:
    return 0.1 * torch.randn(rows, frames * SAMPLES_PER_FRAME, generator=torch.Generator().manual_seed(seed))


def spoken(frames: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(vowels(frames * 0.08, seed) / np.float32(32_768))[None]


def fitted(sizes: CodecSizes, pcm: Tensor) -> Codec:
    return fit(features(pcm)[0], sizes, 0)[0]


def test_noise_codes_are_flat_follow_from_the_row_and_foretell_nothing() -> None:
    rows = torch.randint(256, (20_000, 14), generator=torch.Generator().manual_seed(0))
    codes = scattered(rows, 2, 256)
    assert torch.equal(codes[5:9], scattered(rows[5:9], 2, 256))
    rows[:, 13] = (rows[:, 13] + 1) % 256
    for one, other in ((codes[:, 0], codes[:, 1]), *zip(codes.T, scattered(rows, 2, 256).T, strict=True)):
        assert abs((one == other).float().mean() - 1 / 256) < 0.002  # three deviations
        assert 0.8 < torch.bincount(one, minlength=256).float().var() / (20_000 / 256) < 1.2
        assert abs(torch.corrcoef(torch.stack((one, other)).float())[0, 1]) < 0.03


def test_noise_books_and_measured_ones_fill_dimensions_of_their_own() -> None:
    codec = fitted(TINY, spoken(60))
    books = torch.cat((codec.quantizer.first.books, codec.quantizer.rest.books))
    assert books[:14, :, TINY.components :].abs().max() == 0 and books[14:, :, : TINY.components].abs().max() == 0
    assert books[14:, :, TINY.components :].sum(0).std() == pytest.approx(1, abs=0.15)
    codes = codec.encode(spoken(60))
    again = codec.quantizer.redrawn(codes)
    assert torch.equal(again[..., :14], codes[..., :14])
    assert ((again[..., 14:] == codes[..., 14:]).float().mean((0, 1)) < 0.2).all() and again.max() < 32
    assert torch.equal(Codec(SILENT).quantizer.redrawn(codes), codes)


def above(pcm: Tensor) -> Tensor:
    """Below 4.5 kHz always the same."""
    return _joined(noise(99, *_shape(pcm)), pcm, 4_500)


def below(pcm: Tensor) -> Tensor:
    """Above 1.8 kHz always the same."""
    return _joined(pcm, noise(99, *_shape(pcm)), 1_800)


def _shape(pcm: Tensor) -> tuple[int, int]:
    return len(pcm), pcm.shape[1] // SAMPLES_PER_FRAME


def _joined(low: Tensor, high: Tensor, hz: int) -> Tensor:
    cut = round(hz / SAMPLE_RATE_HZ * low.shape[1])
    return torch.fft.irfft(torch.cat((torch.fft.rfft(low)[:, :cut], torch.fft.rfft(high)[:, cut:]), 1), low.shape[1])


def test_two_renderings_that_vary_as_the_target_does_are_better_than_one_repeated() -> None:
    def means(pairs: list[tuple[Tensor, Tensor]], band: Callable[[Tensor], Tensor]) -> dict[str, float]:
        targets = [band(noise(1_000 + index)) for index in range(len(pairs))]
        found = [
            spectral_losses([band(one) for one in pair], target) for pair, target in zip(pairs, targets, strict=True)
        ]
        return {name: float(np.mean([float(losses[name]) for losses in found])) for name in ("mel", "stft")}

    vary = [(noise(i), noise(100 + i)) for i in range(6)]
    same = [(noise(i), noise(i)) for i in range(6)]
    louder = [(2 * noise(i), 2 * noise(100 + i)) for i in range(6)]
    high = [means(pairs, above) for pairs in (vary, same, louder)]
    low = [means(pairs, below) for pairs in (vary, same)]
    for name in ("mel", "stft"):
        assert high[0][name] < 0.8 * min(high[1][name], high[2][name])
        assert low[0][name] > 0.95 * low[1][name]  # no reward for what should not vary
    # the same rendering twice is as far as it is alone
    alone = spectral_losses([noise(1)], noise(2))
    assert all(
        torch.isclose(alone[n], loss, rtol=1e-3) for n, loss in spectral_losses([noise(1)] * 2, noise(2)).items()
    )


def test_repetition_is_found_at_its_lag_and_pulls_away_from_it() -> None:
    comb = noise(3, frames=1)[:, :480].repeat(1, 48).requires_grad_()
    loss, lags = repetition(comb, noise(4))
    assert (lags > 0.99).all() and 0.8 < loss.item() < 1.2
    assert float(repetition(noise(5), noise(4))[0]) < 0.03
    frames = noise(3, frames=1).repeat(1, 12)
    assert (repetition(frames, noise(4))[1] > 0.9).tolist() == [False, False, False, True]
    loss.backward()
    moved = (comb - 0.1 * comb.grad / comb.grad.abs().max()).detach()
    assert float(repetition(moved, noise(4))[0]) < loss.item()
    assert float(repetition(comb.detach(), torch.zeros_like(comb))[0]) == 0  # nothing to be like


def test_a_click_at_the_start_costs_and_silence_does_not() -> None:
    silence = torch.zeros(2, 4 * SAMPLES_PER_FRAME)
    click = silence.clone()
    click[:, 0] = 0.0026
    late = silence.clone()
    late[:, 512:] = 0.5
    assert float(onset(silence, silence)) == float(onset(late, silence)) == 0
    assert float(onset(click, silence)) == pytest.approx(float(np.log(0.0026 / 1e-4)) / 10, rel=0.01)
    hum = silence.clone()
    hum[:, 256:512] = 0.0026
    assert float(onset(hum, silence)) == pytest.approx(float(onset(click, silence)))


def test_energy_that_jumps_at_frame_edges_is_told_from_noise() -> None:
    even = noise(6, frames=40)[0].numpy()
    steps = even * np.repeat(np.tile([1.0, 0.2], 20), SAMPLES_PER_FRAME)
    assert edge_steps(even) == pytest.approx(1, abs=0.25) and edge_steps(steps) > 3


def test_a_files_noise_books_are_counted() -> None:
    assert noise_books(hub_tensors(fitted(TINY, spoken(60)))) == 2
    assert noise_books(hub_tensors(fitted(SILENT, spoken(60)))) == 0


def repeated_after(sizes: CodecSizes, recipe: CodecRecipe, steps: int) -> float:
    """The correlation at 20 ms of what a codec makes of hiss after some steps of learning it."""
    hiss = noise(7, frames=120) * 0.3
    torch.manual_seed(0)
    trainer = CodecTrainer(recipe, fitted(sizes, hiss))
    codes = trainer.codec.encode(hiss)
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, 120 - recipe.crop_frames, recipe.batch)
        pcm = torch.cat([hiss[:, s * 1920 : (s + recipe.crop_frames) * 1920] for s in starts])
        trainer.train_step(pcm, torch.cat([codes[:, s : s + recipe.crop_frames] for s in starts]))
    with torch.no_grad():
        output = trainer.codec(codes[:, :60])[0].numpy()
    assert output.std() > 0.3 * float(hiss.std())
    return lag_correlation(output, 0.020)


@pytest.mark.slow  # 250 steps of training: 17 s, and how far it comes in so few depends on the machine
def test_with_noise_books_and_their_losses_hiss_no_longer_repeats() -> None:
    recipe = CodecRecipe(batch=2, crop_frames=7, steps=1_000, warmup_steps=5, rate=3e-3, onsets=0, unheard_frames=1)
    sizes = CodecSizes(32, 16, 32, 32, 64, 2, 16, 1, 8, 32, 2, noise_books=2, noise=16)
    assert abs(repeated_after(sizes, recipe, 100)) < 0.15
    plain = replace(recipe, draws=1, repetition=0.0)
    assert repeated_after(replace(sizes, noise_books=0, noise=0), plain, 100) > 0.25


def test_the_first_crops_begin_where_clips_do_and_hours_end_the_reading(tmp_path: Path) -> None:
    clips = [vowels(seconds, seed) for seed, seconds in enumerate((2.0, 3.7, 1.63))]
    for name, part in (("a", clips[:2]), ("b", clips[2:])):
        write_shard(tmp_path / "audio" / f"{name}.npz", part, ["slt"] * len(part), ["one"] * len(part))
        encode_shard(Codec(TINY), tmp_path / "audio" / f"{name}.npz", tmp_path / "codes" / f"{name}.npz")
    crops = Crops(tmp_path / "audio", tmp_path / "codes", 6, 0, onsets=0.5)
    heads = [clip[: 6 * SAMPLES_PER_FRAME] / np.float32(32_768) for clip in clips]
    pcm = crops.batch(3, 8)[0].numpy()
    assert all(any(np.array_equal(row, head) for head in heads) for row in pcm[:4])
    assert not all(any(np.array_equal(row, head) for head in heads) for row in pcm[4:])
    little = Crops(tmp_path / "audio", tmp_path / "codes", 6, 0, hours=1 / 3600)
    assert little.hours == pytest.approx((25 + 47) * 0.08 / 3600)


def test_silence_of_a_second_is_long_enough_for_all_lags() -> None:
    short = torch.zeros(1, SAMPLE_RATE_HZ // 5)
    assert float(repetition(short, short)[0]) == 0
