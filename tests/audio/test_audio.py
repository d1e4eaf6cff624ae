"""PCM conversions against numbers worked out by hand and against the standard library's reader."""

import math
import sys
import wave

import numpy as np
import pytest

from mktts.audio import first_audible_sample, peak_dbfs, read_audio, resample, to_pcm16, write_audio
from mktts.errors import AudioError, BackendUnavailable, VoiceError
from mktts.spec import SAMPLE_RATE_HZ


def f32(*values):
    return np.array(values, dtype=np.float32)


def test_pcm16_is_little_endian_rounded_and_clipped():
    assert to_pcm16(f32(0, 1, -1, 2, -2, 0.5, 1.4 / 32767)) == b"\0\0\xff\x7f\x01\x80\xff\x7f\x01\x80\x00\x40\x01\0"


@pytest.mark.parametrize(
    "bad",
    [np.zeros(4), np.zeros((2, 2), np.float32), f32(0, np.nan), f32(np.inf), [0.0, 0.1], None],
    ids=["float64", "two-dimensional", "nan", "infinity", "list", "none"],
)
def test_bad_pcm_is_refused_by_name_and_leaves_no_file(bad, tmp_path):
    with pytest.raises(AudioError, match="PCM must be"):
        write_audio(tmp_path / "a.wav", bad)
    assert list(tmp_path.iterdir()) == []


def test_wav_is_read_back_by_the_standard_library_and_by_read_audio(tmp_path):
    pcm = np.sin(np.arange(4800) / 20, dtype=np.float32) * 0.5
    path = write_audio(tmp_path / "deep" / "a.wav", pcm)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, SAMPLE_RATE_HZ)
        assert file.readframes(5000) == to_pcm16(pcm)
    back, rate_hz = read_audio(path)
    assert rate_hz == SAMPLE_RATE_HZ and back.dtype == np.float32
    np.testing.assert_allclose(back, pcm, atol=1 / 32767)


@pytest.mark.parametrize(
    ("name", "container", "subtype", "worst_error"),
    [
        ("a.wav", "WAV", "PCM_16", 1e-4),
        ("a.FLAC", "FLAC", "PCM_16", 1e-4),
        ("a.ogg", "OGG", "VORBIS", 0.05),
        ("a.opus", "OGG", "OPUS", 0.05),
        ("a.b.mp3", "MP3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_the_name_is_the_format_and_what_is_heard_is_the_same(tmp_path, name, container, subtype, worst_error):
    soundfile = pytest.importorskip("soundfile")
    tone = np.sin(np.arange(SAMPLE_RATE_HZ) * 2 * np.pi * 440 / SAMPLE_RATE_HZ, dtype=np.float32) * 0.5
    path = write_audio(tmp_path / name, tone)
    about = soundfile.info(path)
    assert (about.format, about.subtype, about.channels) == (container, subtype, 1)
    back, rate_hz = read_audio(path)
    assert rate_hz == SAMPLE_RATE_HZ and len(back) == pytest.approx(len(tone), abs=2_000)  # encoders pad
    middle = back[6_000:18_000]
    errors = [np.abs(middle - tone[start : start + len(middle)]).max() for start in range(4_000, 8_000)]
    assert min(errors) < worst_error


def test_a_long_vorbis_file_does_not_crash_its_library(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    silence = np.zeros(4_000_000, np.float32)
    assert soundfile.info(write_audio(tmp_path / "a.ogg", silence, 8_000)).frames == len(silence)


@pytest.mark.parametrize("name", ["a", "a.mp4", "a.raw", "wav", ".mp3.txt"])
def test_another_name_is_refused_before_anything_is_made(tmp_path, name):
    with pytest.raises(AudioError, match=r"ends in \.wav, \.flac"):
        write_audio(tmp_path / name, f32(0))
    assert list(tmp_path.iterdir()) == []


def test_a_rate_that_the_format_lacks_is_named(tmp_path):
    pytest.importorskip("soundfile")
    with pytest.raises(AudioError, match="cannot write opus at 22050 Hz"):
        write_audio(tmp_path / "a.opus", f32(0), 22_050)


def test_an_old_libsndfile_is_named(tmp_path, monkeypatch):
    soundfile = pytest.importorskip("soundfile")
    monkeypatch.setattr(soundfile, "available_subtypes", lambda container: {"VORBIS": "Vorbis"})
    write_audio(tmp_path / "a.ogg", f32(0))
    with pytest.raises(BackendUnavailable, match="cannot write opus"):
        write_audio(tmp_path / "a.opus", f32(0))


def test_without_soundfile_only_wav_is_written_and_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    write_audio(tmp_path / "a.wav", f32(0))
    with pytest.raises(BackendUnavailable, match="soundfile"):
        write_audio(tmp_path / "a.mp3", f32(0))
    with pytest.raises(BackendUnavailable, match="soundfile"):
        read_audio(tmp_path / "a.wav")


def test_a_failed_write_keeps_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = write_audio(tmp_path / "a.wav", f32(0.5))
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_audio(path, f32(0.25))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_stereo_files_are_averaged(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "s.wav", np.array([[0.5, 0.0], [0.25, 0.25]]), 8000, subtype="FLOAT")
    pcm, rate_hz = read_audio(tmp_path / "s.wav")
    assert rate_hz == 8000 and pcm.tolist() == [0.25, 0.25]


def test_what_is_not_audio_is_refused_by_name(tmp_path):
    (tmp_path / "text.wav").write_text("not audio")
    for path, found in (
        (tmp_path / "text.wav", "could not read"),
        (tmp_path, "a folder"),
        (tmp_path / "no", "nothing"),
    ):
        with pytest.raises(VoiceError, match=found):
            read_audio(path)


def sound(milliseconds: int, dbfs: float, rate_hz: int = SAMPLE_RATE_HZ) -> np.ndarray:
    """Samples of one amplitude and alternating sign: their RMS is their peak."""
    return f32(*[10 ** (dbfs / 20), -(10 ** (dbfs / 20))] * (rate_hz * milliseconds // 2_000))


def test_audible_is_the_first_ten_milliseconds_above_45_db_below_full_scale():
    before, quiet, loud = sound(30, -90), sound(20, -45.1), sound(10, -44.9)
    assert first_audible_sample(np.concatenate((before, quiet, loud, sound(500, -3)))) == 50 * 24
    assert first_audible_sample(np.concatenate((before, loud), dtype=np.float32)) == 30 * 24
    assert first_audible_sample(np.concatenate((before, quiet))) is None
    assert first_audible_sample(loud[:-1]) is None and first_audible_sample(f32()) is None  # no whole window
    assert first_audible_sample(np.concatenate((sound(20, -90, 8_000), sound(10, -44, 8_000))), 8_000) == 20 * 8


def test_a_click_before_the_silence_is_not_audible():
    """The shipped voice begins with one: 2 ms, -51 dBFS at its peak, then 80 ms of silence, then speech."""
    whole = np.concatenate((sound(2, -51), np.zeros(78 * 24, np.float32), sound(100, -20)))
    assert peak_dbfs(whole[:48]) == pytest.approx(-51)
    assert first_audible_sample(whole) == 80 * 24


def test_levels_of_a_full_scale_sine_and_of_silence():
    sine = np.sin(2 * np.pi * np.arange(2400) / 240, dtype=np.float32)
    assert peak_dbfs(sine) == pytest.approx(0, abs=1e-3)
    assert peak_dbfs(f32()) == peak_dbfs(f32(0, 0)) == -math.inf


# ---- the resampler, against sines, whose samples at any rate are known, and against what must not be there

BOTH_WAYS = [
    (16_000, 24_000, 0.96, 144),
    (24_000, 16_000, 0.95, 96),
    (24_000, 24_000, 0.95, 96),
    (8_000, 24_000, 0.9, 90),
]
SECONDS = 0.5
EDGE_S = 0.012  # at both ends, where the low pass reaches into the silence around


def sine(hz: float, rate_hz: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(SECONDS * rate_hz)) / rate_hz + 0.3)).astype(np.float32)


def inner(pcm: np.ndarray, rate_hz: int) -> np.ndarray:
    return pcm[round(EDGE_S * rate_hz) : -round(EDGE_S * rate_hz)]


@pytest.mark.parametrize(("from_hz", "to_hz", "cutoff", "half_taps"), BOTH_WAYS)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.8])
def test_a_sine_below_the_cut_off_is_the_same_sine(from_hz, to_hz, cutoff, half_taps, share):
    hz = share * min(from_hz, to_hz) / 2
    found = resample(sine(hz, from_hz), from_hz, to_hz, cutoff, half_taps)
    assert found.dtype == np.float32 and found.shape == (SECONDS * to_hz,)
    assert np.abs(inner(found - sine(hz, to_hz), to_hz)).max() < 1e-4


@pytest.mark.parametrize("hz", [8_300, 9_000, 11_500])
def test_a_sine_above_the_lower_rates_nyquist_frequency_is_gone(hz):
    found = resample(sine(hz, 24_000), 24_000, 16_000, 0.95, 96)
    assert np.abs(inner(found, 16_000)).max() < 1e-4


def test_a_higher_rate_has_nothing_above_the_lower_rates_nyquist_frequency():
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 8_000).astype(np.float32)
    found = inner(resample(noise, 16_000, 24_000, 0.96, 144), 24_000)
    power = np.abs(np.fft.rfft(found * np.blackman(len(found)))) ** 2
    hz = np.fft.rfftfreq(len(found), 1 / 24_000)
    assert power[hz > 8_200].mean() < 1e-8 * power[hz < 7_000].mean()


@pytest.mark.parametrize(("from_hz", "to_hz", "cutoff", "half_taps"), BOTH_WAYS)
def test_any_length_has_its_samples_in_silence(from_hz, to_hz, cutoff, half_taps):
    """Few samples are what many with silence behind them are, to the end of their own time."""
    for samples in (0, 1, 2, 3, 101):
        few = np.random.default_rng(samples).uniform(-1, 1, samples).astype(np.float32)
        found = resample(few, from_hz, to_hz, cutoff, half_taps)
        assert found.shape == (math.ceil(samples * to_hz / from_hz),)
        more = resample(np.concatenate([few, np.zeros(2_000, np.float32)]), from_hz, to_hz, cutoff, half_taps)
        np.testing.assert_allclose(found, more[: len(found)], atol=1e-6)
