"""What codes stand for: features of known sounds, principal components, and the codebooks of k-means."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec import quantizer as quantizing
from mktts.training.codec.analysis import BANDS, PITCHES, SPECTRA, WIDTH, Analysis, features, weights_of_features
from mktts.training.codec.fit import fit
from mktts.training.codec.losses import mel_filters
from mktts.training.codec.quantizer import SplitQuantizer, k_means, moved_together, nearest_path
from mktts.training.codec.sizes import TINY
from mktts.training.data.codec_data import vowels

FRAMES = 6


def parts(pcm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one clip: log-mel (T * 8, 80), octaves above 130 Hz and voicing (T * 4,)."""
    bands, octaves, voicing = features(pcm[None])[0].split((SPECTRA * BANDS, PITCHES, PITCHES), -1)
    return bands.reshape(-1, BANDS), octaves.flatten() / 15, voicing.flatten() / 3


def tone(hz: float, frames: int = FRAMES) -> Tensor:
    return 0.5 * torch.sin(2 * torch.pi * hz * torch.arange(frames * SAMPLES_PER_FRAME) / SAMPLE_RATE_HZ)


def pulses(period: int) -> Tensor:
    pcm = torch.zeros(FRAMES * SAMPLES_PER_FRAME)
    pcm[::period] = 0.8
    return pcm


def noise(seed: int, frames: int = FRAMES) -> Tensor:
    return 0.1 * torch.randn(frames * SAMPLES_PER_FRAME, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hz", [75.0, 130.0, 213.0, 300.0])
def test_a_tones_pitch_is_its_octaves_above_130_hz(hz: float) -> None:
    _, octaves, voicing = parts(tone(hz))
    assert bool((voicing == 1).all())
    half_a_sample = math.log2(1 + 0.51 * hz / SAMPLE_RATE_HZ)
    assert (octaves[1:-1] - math.log2(hz / 130)).abs().max() < half_a_sample + 1e-3


@pytest.mark.parametrize("period", [80, 109, 200, 320])
def test_a_pulse_trains_pitch_is_its_period_and_not_a_multiple_of_it(period: int) -> None:
    _, octaves, voicing = parts(pulses(period))
    inner = slice(2, -2)  # the outermost windows lie half in the silence around the clip
    assert bool((voicing[inner] == 1).all())
    assert (octaves[inner] - math.log2(SAMPLE_RATE_HZ / period / 130)).abs().max() < 1e-3


def test_noise_and_a_tone_too_quiet_to_hear_are_unvoiced() -> None:
    _, octaves, voicing = parts(noise(0, 40))
    assert voicing.mean() < 0.05 and not octaves[voicing == 0].any()
    assert not parts(1e-3 * tone(150.0))[2].any()  # -66 dBFS


@pytest.mark.parametrize(("share", "voiced"), [(0.7, True), (0.3, False)])
def test_a_tone_in_noise_is_voiced_where_it_has_more_than_half_of_the_power(share: float, voiced: bool) -> None:
    found = parts(share**0.5 * tone(140.0, 40) / 0.125**0.5 + (1 - share) ** 0.5 * noise(5, 40) / 0.1)[2]
    assert (found == voiced).float().mean() > 0.9


def test_silence_is_the_floor_everywhere() -> None:
    bands, octaves, voicing = parts(torch.zeros(FRAMES * SAMPLES_PER_FRAME))
    assert torch.allclose(bands, torch.full_like(bands, math.log(3e-5)))
    assert not octaves.any() and not voicing.any()


def test_bands_are_mel_magnitudes_of_windows_centred_on_eighths_of_a_frame() -> None:
    pcm = noise(1) + tone(1000.0)
    bands, _, _ = parts(pcm)
    around = np.concatenate([np.zeros(512), pcm.double().numpy(), np.zeros(512)])
    shape = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    for i in (0, 3, 20, 8 * FRAMES - 1):
        centre = 240 * i + 120  # 10 ms apart
        magnitudes = np.abs(np.fft.rfft(around[centre : centre + 1024] * shape)) * 4 / 1024
        expected = np.log(np.maximum(mel_filters(1024, BANDS).double().numpy() @ magnitudes, 1e-3))
        assert np.abs(bands[i].numpy() - expected).max() < 1e-4


def test_twice_the_amplitude_adds_the_logarithm_of_two_above_the_floor_and_nothing_else() -> None:
    loud, quiet = parts(2 * noise(2)), parts(noise(2))
    above = quiet[0] > math.log(1e-3)
    assert above.float().mean() > 0.95 and ((loud[0] - quiet[0])[above] - math.log(2)).abs().max() < 1e-4
    assert torch.equal(loud[1], quiet[1]) and torch.equal(loud[2], quiet[2])


def test_features_do_not_depend_on_other_rows_or_on_audio_further_away_than_a_window() -> None:
    rows = torch.stack([tone(140.0), noise(3), pulses(200)])
    assert torch.allclose(features(rows)[1], features(rows[1:2])[0], atol=1e-4)
    other = rows[1:2].clone()
    other[:, 3 * SAMPLES_PER_FRAME :] = 0
    assert torch.allclose(features(other)[:, :2], features(rows[1:2])[:, :2], atol=1e-4)
    later = features(rows[1:2, SAMPLES_PER_FRAME:])
    assert torch.allclose(later[:, 1:], features(rows[1:2])[:, 2:], atol=1e-4)


def test_principal_components_of_a_set_of_rank_three_are_found_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    axes, _ = torch.linalg.qr(torch.randn(WIDTH, 3, generator=generator))
    weights = torch.randn(4000, 3, generator=generator) * torch.tensor([1.0, 9.0, 3.0])
    counted = weights_of_features(weights).float()
    rows = 5 + weights @ axes.T @ torch.linalg.inv(counted)
    analysis = Analysis(4)
    assert analysis.fit(rows) == pytest.approx(1, abs=1e-3)
    directions = torch.linalg.inv(counted) @ analysis.basis
    found = (directions[:, :3].T @ axes).abs()
    assert torch.allclose(found, torch.eye(3)[[1, 2, 0]], atol=0.05)  # the largest first
    components = analysis.components(rows)
    assert (components[:, 3].abs().max() < 1e-2) and components.mean(0).abs().max() < 1e-2
    assert ((rows - analysis.mean) @ counted - components @ directions.T).abs().max() < 1e-2


def test_fine_ripples_of_a_spectrum_count_half_and_pitch_in_full() -> None:
    counted = weights_of_features(torch.zeros(1))

    def ripple(number: int) -> Tensor:
        row = torch.zeros(WIDTH, dtype=torch.float64)
        row[BANDS : 2 * BANDS] = torch.cos(math.pi * number * (torch.arange(BANDS, dtype=torch.float64) + 0.5) / BANDS)
        return row

    pitch = torch.zeros(WIDTH, dtype=torch.float64)
    pitch[-PITCHES - 1] = 1.0
    for row, factor in ((ripple(0), 1), (ripple(3), 1), (ripple(40), 0.5), (ripple(79), 0.5), (pitch, 1)):
        assert torch.allclose(row @ counted, factor * row, atol=1e-9)


def test_k_means_finds_the_places_of_separate_clusters_however_many_centres_begin_in_one() -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0], [-50.0, 10.0]])
    rows = (places[:, None] + 0.1 * torch.randn(4, 300, 2, generator=generator)).flatten(0, 1)
    centres = k_means(rows, 12, generator)
    assert (torch.cdist(places, centres).amin(1) < 0.3).all() and (torch.cdist(rows, centres).amin(1) < 0.6).all()
    assert torch.allclose(k_means(rows, 1, generator)[0], rows.mean(0), atol=1e-3)
    again = []
    for _ in range(2):
        torch.rand(1)  # what else draws makes no difference
        again.append(k_means(rows, 12, torch.Generator().manual_seed(4)))
    assert torch.equal(*again)


@pytest.fixture(scope="module")
def rows() -> Tensor:
    """Components of unlike sizes, (3000, 8), of mean zero."""
    found = torch.randn(3000, TINY.components, generator=torch.Generator().manual_seed(1)) * torch.logspace(1, -1, 8)
    return found - found.mean(0)


@pytest.fixture(scope="module")
def fitted(rows: Tensor) -> tuple[SplitQuantizer, list[float]]:
    quantizer = SplitQuantizer(NUM_CODEBOOKS, TINY.codebook_size, TINY.components)
    return quantizer, quantizer.fit(rows, torch.Generator().manual_seed(2))


def entries(quantizer: SplitQuantizer) -> Tensor:
    """All books as differences of components: (16, size, width)."""
    return torch.cat((quantizer.first.books, quantizer.rest.books)) / quantizer.gain


def test_every_book_leaves_less_and_the_last_share_is_what_the_codes_leave(
    rows: Tensor, fitted: tuple[SplitQuantizer, list[float]]
) -> None:
    quantizer, (*shares, last) = fitted
    assert len(shares) == NUM_CODEBOOKS and shares[0] < 0.3
    assert all(after < before for before, after in zip(shares, shares[1:], strict=False))
    codes = quantizer.encode(rows)
    assert codes.shape == (3000, NUM_CODEBOOKS) and int(codes.max()) < TINY.codebook_size
    assert left_by(quantizer, rows, codes, NUM_CODEBOOKS) == pytest.approx(last, rel=1e-2)
    assert last < 0.9 * shares[-1]  # by more paths, and books that were moved together


def test_each_share_is_what_one_path_through_so_many_books_leaves(
    rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "_JOINT_ROUNDS", 0)
    quantizer = SplitQuantizer(NUM_CODEBOOKS, TINY.codebook_size, TINY.components)
    shares = quantizer.fit(rows, torch.Generator().manual_seed(2))
    codes = nearest_path(rows, entries(quantizer), paths=1)
    for books in (1, 4, NUM_CODEBOOKS):
        assert left_by(quantizer, rows, codes, books) == pytest.approx(shares[books - 1], rel=1e-2)


def test_books_moved_together_are_the_least_squares_of_their_codes(rows: Tensor) -> None:
    books, some = torch.randn(3, 8, TINY.components, generator=torch.Generator().manual_seed(4)), rows[:500]
    codes = nearest_path(some, books)
    chosen = F.one_hot(codes, 8).flatten(1).double().numpy()
    best = chosen @ np.linalg.lstsq(chosen, some.double().numpy(), rcond=None)[0]
    moved = moved_together(some, books)
    found = sum(moved[i][codes[:, i]] for i in range(3))
    before, after, least = (
        float((some.double() - there).square().sum())
        for there in (sum(books[i][codes[:, i]] for i in range(3)), found, torch.from_numpy(best))
    )
    assert least <= after < 1.02 * least < 0.9 * before
    unused = [k for k in range(8) if k not in codes[:, 2]]
    assert torch.allclose(moved[2][unused], books[2][unused], atol=1e-5)


def left_by(quantizer: SplitQuantizer, rows: Tensor, codes: Tensor, books: int) -> float:
    """Share of the rows' squares that the first books leave."""
    restored = sum(entries(quantizer)[i][codes[:, i]] for i in range(books))
    return float((rows - restored).square().mean() / rows.square().mean())


def test_one_path_takes_the_nearest_entry_of_each_book_in_turn(
    rows: Tensor, fitted: tuple[SplitQuantizer, list[float]]
) -> None:
    quantizer, _ = fitted
    expected, left = [], rows[:60].double().numpy()
    for book in entries(quantizer).double().numpy():
        nearest = ((left[..., None, :] - book) ** 2).sum(-1).argmin(-1)
        expected.append(nearest)
        left = left - book[nearest]
    assert np.array_equal(nearest_path(rows[:60], entries(quantizer), paths=1).numpy(), np.stack(expected, -1))


def test_paths_enough_find_the_best_sum_behind_the_nearest_first_entry() -> None:
    draws = torch.Generator().manual_seed(3)
    books, rows = torch.randn(3, 4, 2, generator=draws), 2 * torch.randn(50, 2, generator=draws)
    found = nearest_path(rows, books, paths=4**2).tolist()
    for row, codes in zip(rows.double(), found, strict=True):
        first = int((row - books[0]).square().sum(-1).argmin())
        sums = {
            (first, second, third): float((row - books[0, first] - books[1, second] - books[2, third]).square().sum())
            for second in range(4)
            for third in range(4)
        }
        assert tuple(codes) == min(sums, key=sums.__getitem__)


def test_rows_of_any_shape_are_encoded_each_by_itself(rows: Tensor, fitted: tuple[SplitQuantizer, list[float]]) -> None:
    quantizer, _ = fitted
    codes = quantizer.encode(rows[:60].unflatten(0, (3, 20)))
    assert torch.equal(codes.flatten(0, 1), quantizer.encode(rows)[:60])


def test_the_gain_of_the_decoders_vectors_changes_no_code(
    rows: Tensor, fitted: tuple[SplitQuantizer, list[float]]
) -> None:
    quantizer, _ = fitted
    other = SplitQuantizer(NUM_CODEBOOKS, TINY.codebook_size, TINY.components)
    other.load_state_dict(quantizer.state_dict())
    factor = torch.linspace(0.5, 4, TINY.components)
    other.gain *= factor
    other.first.books *= factor
    other.rest.books *= factor
    assert (other.encode(rows) == quantizer.encode(rows)).float().mean() > 0.999
    spread = entries(quantizer)[0].std(0), quantizer.first.books[0].std(0)
    assert spread[1].max() / spread[1].min() < 0.5 * spread[0].max() / spread[0].min()


def test_the_decoder_is_given_the_sum_of_the_entries_through_two_projections(
    fitted: tuple[SplitQuantizer, list[float]],
) -> None:
    quantizer, _ = fitted
    codes = torch.randint(TINY.codebook_size, (2, 5, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(3))
    first, rest = (chain.output_proj.weight[..., 0] for chain in (quantizer.first, quantizer.rest))
    at = codes[1, 4]
    summed = sum(quantizer.rest.books[i - 1, at[i]] for i in range(1, NUM_CODEBOOKS))
    expected = first @ quantizer.first.books[0, at[0]] + rest @ summed
    assert torch.allclose(quantizer(codes)[1, :, 4], expected, atol=1e-4)


def test_a_fit_is_decided_by_its_rows_and_its_seed() -> None:
    rows = features(torch.from_numpy(vowels(16.0, 1) / np.float32(32_768))[None])[0]
    codec, lost = fit(rows, TINY, 0)
    again, _ = fit(rows, TINY, 0)
    assert all(torch.equal(a, b) for a, b in zip(codec.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(fit(rows, TINY, 1)[0].quantizer.first.books, codec.quantizer.first.books)
    counted = weights_of_features(rows).float()
    whole, kept = (rows - codec.analysis.mean) @ counted, codec.analysis.components(rows)
    outside = (
        whole - kept @ (torch.linalg.inv(counted) @ codec.analysis.basis).T
    ).square().sum() / whole.square().sum()
    assert lost["variance_kept"] == pytest.approx(1 - float(outside), abs=2e-3)
    assert (
        len(lost["left_after_each_book"]) == NUM_CODEBOOKS - TINY.noise_books and lost["left_after_each_book"][-1] < 0.2
    )
