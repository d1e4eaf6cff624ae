"""What is encoded while it is made: decoded by FFmpeg, early, as long as what went in, at the same pitch. Audio from
somebody unknown: what it holds, or one line about what is wrong; never more time, memory or files."""

import subprocess
import sys
import wave
from io import BytesIO

import numpy as np
import pytest
import soundfile
from absent import needs, python_without
from sounds import decoded, loudest_hz, tone

from mktts.audio import encoded
from mktts.audio.encoding import STREAM_FORMATS, Encoder
from mktts.audio.untrusted import decode_untrusted
from mktts.errors import AudioError, VoiceError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

pytestmark = needs("av")
SECONDS = 2.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space")
PADDING_S = {"mp3": 0.1, "opus": 0.001, "aac": 0.1, "flac": 0.0, "wav": 0.0}  # encoders fill their last block


def pieces(kind: str, pcm: np.ndarray, samples: int = SAMPLES_PER_FRAME, **how) -> list[bytes]:
    """What comes out after each `samples` of `pcm`, and at the end."""
    encoder = Encoder(kind, **how)
    fed = [encoder.feed(pcm[start : start + samples]) for start in range(0, len(pcm), samples)]
    return [*fed, encoder.finish()]


@pytest.mark.parametrize(
    ("kind", "samples", "how"),
    [
        *((kind, samples, {}) for kind in PADDING_S for samples in (SAMPLES_PER_FRAME, 777)),
        *(("wav", SAMPLES_PER_FRAME, {"speed": speed}) for speed in (0.25, 0.8, 2.0, 4.0)),
        *(("wav", SAMPLES_PER_FRAME, {"sample_rate_hz": rate_hz}) for rate_hz in (8_000, 16_000, 44_100, 48_000)),
    ],
    ids=str,
)
def test_what_is_heard_is_what_went_in_and_speed_and_another_rate_keep_its_pitch(kind, samples, how):
    _, heard, rate_hz = decoded(b"".join(pieces(kind, tone(SECONDS), samples, **how)))
    assert rate_hz == how.get("sample_rate_hz", rate_hz)
    more = len(heard) - round(SECONDS * rate_hz / how.get("speed", 1.0))
    assert 0 <= more <= PADDING_S[kind] * rate_hz
    middle = heard[len(heard) // 5 : -len(heard) // 5]
    assert loudest_hz(middle, rate_hz) == pytest.approx(440, abs=8 if how else 2)
    level = pytest.approx(0.5 / np.sqrt(2), rel=0.1 if how else 0.06)  # LAME takes 5 % off
    assert np.sqrt(np.mean(middle**2)) == level


@pytest.mark.parametrize(("kind", "frames"), [("mp3", 1), ("opus", 1), ("aac", 2), ("flac", 2), ("wav", 1), ("pcm", 1)])
def test_the_first_sound_comes_out_after_so_many_frames_and_then_it_keeps_up(kind, frames):
    """Cut off anywhere, what came so far is heard: at most two frames of it still wait."""
    out = pieces(kind, tone(SECONDS))[:-1]
    assert all(out[frames - 1 :]) or kind == "flac"  # whose blocks are longer than a frame
    for made in (frames, frames + 3):
        head = b"".join(out[:made])
        if kind != "pcm":
            _, heard, rate_hz = decoded(head)
            assert len(heard) / rate_hz >= (made - 2) * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ and len(heard)


def test_a_stream_of_mp3_or_wav_promises_no_length():
    head = b"".join(pieces("mp3", tone(SECONDS)))[:200]
    assert head[0] == 0xFF and b"ID3" not in head and b"Xing" not in head and b"Info" not in head
    head = b"".join(pieces("wav", tone(SECONDS)))[:44]
    assert head[4:8] == head[40:44] == b"\xff" * 4  # RIFF's and data's lengths as players take them for unknown


@pytest.mark.parametrize("kind", STREAM_FORMATS)
def test_a_whole_one_comes_at_the_end(kind):
    *before, last = pieces(kind, tone(SECONDS), whole=True)
    assert not any(before)
    if kind == "wav":
        with wave.open(BytesIO(last)) as file:
            assert file.getnframes() == len(tone(SECONDS))
    if kind not in ("wav", "flac"):  # the same sound as while it is made, in as many bits
        streamed = b"".join(pieces(kind, tone(SECONDS)))
        assert len(last) == len(streamed) and (last == streamed or kind == "opus")  # an Ogg stream's number is drawn
    if kind not in ("pcm", "mulaw", "alaw"):
        assert len(decoded(last)[1]) / decoded(last)[2] == pytest.approx(SECONDS, abs=0.1)


@pytest.mark.parametrize("kind", STREAM_FORMATS)
def test_no_sound_at_all_is_no_failure_and_bad_samples_are(kind):
    for encoder in (Encoder(kind), Encoder(kind, speed=2.0)):
        assert encoder.feed(np.zeros(0, np.float32)) + encoder.finish() is not None
    encoder = Encoder(kind)
    with pytest.raises(AudioError, match="finite"):
        encoder.feed(np.full(300, np.nan, np.float32)) + encoder.finish()


@pytest.mark.parametrize(
    ("kind", "how", "message"),
    [
        ("ogg", {}, "format must be one of mp3, opus"),
        ("mp3", {"speed": 0.2}, "speed must be 0.25 to 4"),
        ("mp3", {"speed": float("nan")}, "speed must be"),
        ("opus", {"sample_rate_hz": 44_100}, "opus can have sample rates of 8000, 12000"),
        ("mp3", {"sample_rate_hz": 7_000}, "mp3 can have"),
        ("mulaw", {"sample_rate_hz": 16_000}, "mulaw can have sample rates of 8000 Hz"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused_by_name(kind, how, message):
    with pytest.raises(AudioError, match=message):
        Encoder(kind, **how)


def test_without_pyav_samples_are_still_sent_and_the_rest_names_the_package():
    code = (
        "import numpy as np\n"
        "from mktts.audio.encoding import Encoder\n"
        "from mktts.errors import BackendUnavailable\n"
        "assert Encoder('wav').feed(np.zeros(9, np.float32)) and Encoder('pcm')\n"
        "for call in (lambda: Encoder('mp3'), lambda: Encoder('wav', speed=2)):\n"
        "    try: call()\n"
        "    except BackendUnavailable as error: print(error)\n"
    )
    done = python_without(["av"], code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pip install av") == 2


def expanded(kind: str, data: bytes) -> np.ndarray:
    """16-bit samples of G.711's bytes, by the tables of ITU-T G.711 as a formula."""
    code = np.frombuffer(data, np.uint8).astype(np.int32) ^ (0xFF if kind == "mulaw" else 0x55)
    segment, step = code >> 4 & 7, code & 15
    if kind == "mulaw":
        size = ((2 * step + 33) << (segment + 2)) - 132
        return np.where(code & 0x80, -size, size)
    size = np.where(segment == 0, 2 * step + 1, (2 * step + 33) << np.maximum(segment - 1, 0)) << 3
    return np.where(code & 0x80, size, -size)


@pytest.mark.parametrize("kind", ["mulaw", "alaw"])
def test_g711_is_read_by_its_formula_and_is_the_nearest_of_its_steps(kind):
    out = b"".join(pieces(kind, tone(SECONDS, peak=0.9), 777))
    assert out == pieces(kind, tone(SECONDS, peak=0.9), whole=True)[-1] and len(out) == SECONDS * 8_000
    heard = expanded(kind, out)
    assert loudest_hz(heard, 8_000) == pytest.approx(440, abs=2)
    linear = np.frombuffer(b"".join(pieces("pcm", tone(SECONDS, peak=0.9), sample_rate_hz=8_000)), "<i2").astype(int)
    steps = np.sort(expanded(kind, bytes(range(256))))
    nearest = np.abs(linear[:, None] - steps).min(1)
    assert np.abs(heard - linear).max() <= 1_024 and (np.abs(heard - linear) - nearest).max() <= 16


# ---- audio from somebody unknown


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg", "opus", "aac"])
def test_every_format_is_read(kind):
    pcm, rate_hz = decode_untrusted(encoded(tone(SECONDS), kind))
    assert pcm.dtype == np.float32 and len(pcm) / rate_hz == pytest.approx(SECONDS, abs=0.1)
    assert np.abs(pcm).max() == pytest.approx(0.5, abs=0.05)


def test_channels_are_averaged_and_24_bits_kept():
    file = BytesIO()
    soundfile.write(file, np.stack([tone(SECONDS), 0 * tone(SECONDS)], 1), 44_100, format="WAV", subtype="PCM_24")
    pcm, rate_hz = decode_untrusted(file.getvalue())
    assert rate_hz == 44_100
    np.testing.assert_allclose(pcm, tone(SECONDS) / 2, atol=1e-6)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello there",
        b"\x89PNG\r\n\x1a\n" + bytes(500),
        b"RIFF\xff\xff\xff\xffWAVEfmt \x10\x00\x00\x00" + bytes(100),
        encoded(np.zeros(0, np.float32), "wav"),
        bytes(range(256)) * 400,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://FOLDER/secret.wav\n",
        b"ffconcat version 1.0\nfile 'FOLDER/secret.wav'\n",
    ],
    ids=["nothing", "text", "picture", "torn header", "no samples", "noise", "hls", "concat"],
)
def test_what_is_no_audio_is_one_line_and_a_playlist_opens_nothing(data, tmp_path):
    (tmp_path / "secret.wav").write_bytes(encoded(tone(SECONDS), "wav"))
    with pytest.raises(VoiceError, match="expected audio|could not be decoded") as refused:
        decode_untrusted(data.replace(b"FOLDER", bytes(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"audio_s": 10}, "may last 10 s"),
        ({"data_bytes": 100}, "may have 100 bytes"),
        ({"time_s": 0.01}, "took more than 0.01 s"),
        pytest.param({"memory_bytes": 64 * 2**20}, "", marks=LINUX),
    ],
    ids=str,
)
def test_there_are_limits_of_length_size_time_and_memory(limit, said):
    flac = encoded(np.zeros(24_000 * 20, np.float32), "flac")  # 20 s in a few kilobytes
    with pytest.raises(VoiceError, match=said):
        decode_untrusted(flac, **limit)


def test_the_child_can_write_no_file():
    code = (
        "import sys; from mktts.audio.untrusted import main; import io\n"
        "sys.stdin = io.TextIOWrapper(io.BytesIO(b''))\n"
        "main(['1', '1', str(2**30)])\n"
        "import tempfile; f = tempfile.TemporaryFile(buffering=0); f.write(b'x')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
