"""PCM conversions against numbers worked out by hand."""

import math

import numpy as np
import pytest
import soundfile

from mktts.audio import first_audible_sample, read_audio, resample, to_pcm16, write_audio
from mktts.errors import AudioError, VoiceError
from mktts.spec import SAMPLE_RATE_HZ


def f32(*values):
    return np.array(values, dtype=np.float32)


def test_pcm16_is_little_endian_rounded_and_clipped():
    assert to_pcm16(f32(0, 1, -1, 2, -2, 0.5, 1.4 / 32767)) == b"\0\0\xff\x7f\x01\x80\xff\x7f\x01\x80\x00\x40\x01\0"


@pytest.mark.parametrize(
    ("name", "container", "subtype", "worst_error"),
    [
        ("deep/a.wav", "WAV", "PCM_16", 1e-4),
        ("a.FLAC", "FLAC", "PCM_16", 1e-4),
        ("a.ogg", "OGG", "VORBIS", 0.05),
        ("a.opus", "OGG", "OPUS", 0.05),
        ("a.b.mp3", "MP3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_the_name_is_the_format_and_what_is_heard_is_the_same(tmp_path, name, container, subtype, worst_error):
    tone = np.sin(np.arange(SAMPLE_RATE_HZ) * 2 * np.pi * 440 / SAMPLE_RATE_HZ, dtype=np.float32) * 0.5
    path = write_audio(tmp_path / name, tone)
    about = soundfile.info(path)
    assert (about.format, about.subtype, about.channels) == (container, subtype, 1)
    back, rate_hz = read_audio(path)
    assert rate_hz == SAMPLE_RATE_HZ and back.dtype == np.float32
    assert len(back) == pytest.approx(len(tone), abs=2_000)  # encoders pad
    middle = back[6_000:18_000]
    errors = [np.abs(middle - tone[start : start + len(middle)]).max() for start in range(4_000, 8_000)]
    assert min(errors) < worst_error


def test_a_long_vorbis_file_does_not_crash_its_library(tmp_path):
    assert soundfile.info(write_audio(tmp_path / "a.ogg", np.zeros(4_000_000, np.float32), 8_000)).frames == 4_000_000


@pytest.mark.parametrize(
    ("name", "pcm", "rate_hz", "said"),
    [
        *(("a.wav", bad, SAMPLE_RATE_HZ, "PCM must be") for bad in (np.zeros(4), f32(0)[None])),
        *(("a.wav", bad, SAMPLE_RATE_HZ, "PCM must be") for bad in (f32(0, np.nan), f32(np.inf), [0.0], None)),
        *((name, f32(0), SAMPLE_RATE_HZ, r"in \.wav, \.flac") for name in ("a", "a.mp4", "a.raw", "wav", ".mp3.txt")),
        ("a.opus", f32(0), 22_050, "cannot write opus at 22050 Hz"),
        ("a.ogg", f32(0), 200_001, "sample_rate_hz must be at most 200000"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_refused_by_name_before_anything_is_made(tmp_path, name, pcm, rate_hz, said):
    with pytest.raises(AudioError, match=said):
        write_audio(tmp_path / name, pcm, rate_hz)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = write_audio(tmp_path / "a.wav", f32(0.5))
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_audio(path, f32(0.25))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_stereo_files_are_averaged_and_what_is_not_audio_is_refused_by_name(tmp_path):
    soundfile.write(tmp_path / "s.wav", np.array([[0.5, 0.0], [0.25, 0.25]]), 8000, subtype="FLOAT")
    pcm, rate_hz = read_audio(tmp_path / "s.wav")
    assert rate_hz == 8000 and pcm.tolist() == [0.25, 0.25]
    (tmp_path / "text.wav").write_text("not audio")
    for name, found in (("text.wav", "could not read"), (".", "a folder"), ("no", "nothing")):
        with pytest.raises(VoiceError, match=found):
            read_audio(tmp_path / name)


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


# ---- the resampler, against sines, whose samples at any rate are known


def sine(hz: float, rate_hz: int) -> np.ndarray:
    """Half a second that fades in and out: outside it is silence."""
    seconds = np.arange(rate_hz // 2) / rate_hz
    return (np.sin(2 * np.pi * seconds) ** 2 * np.sin(2 * np.pi * hz * seconds + 0.3)).astype(np.float32)


@pytest.mark.parametrize("from_hz", [8_000, 16_000, 22_050, 24_000])
@pytest.mark.parametrize("to_hz", [16_000, 24_000])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.95])
def test_a_sine_is_the_same_sine_at_another_rate(from_hz, to_hz, share):
    hz = share * min(from_hz, to_hz) / 2
    found = resample(sine(hz, from_hz), from_hz, to_hz)
    assert found.dtype == np.float32 and found.shape == (to_hz // 2,)
    assert np.abs(found - sine(hz, to_hz)).max() < 1e-3


def test_a_sine_above_the_lower_rates_nyquist_frequency_is_gone_and_any_length_has_its_samples():
    for hz in (8_300, 9_000, 11_500):
        assert np.abs(resample(sine(hz, 24_000), 24_000, 16_000)).max() < 1e-3
    for samples in (0, 1, 2, 3, 101):
        assert resample(np.ones(samples, np.float32), 24_000, 16_000).shape == (math.ceil(samples * 2 / 3),)
