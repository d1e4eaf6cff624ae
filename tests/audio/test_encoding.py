"""What is encoded while it is made: decoded by FFmpeg, early, as long as what went in, at the same pitch."""

import wave
from io import BytesIO

import numpy as np
import pytest
from absent import needs, python_without
from sounds import decoded, loudest_hz, tone

from mktts.audio.encoding import STREAM_FORMATS, Encoder
from mktts.errors import AudioError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

pytestmark = needs("av")
SECONDS = 2.0
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


def test_speed_moves_what_is_heard_to_its_time():
    """A second of silence, a second of tone: at double speed the tone begins after half a second."""
    pcm = np.concatenate([np.zeros(SAMPLE_RATE_HZ, np.float32), tone(1.0)])
    changed = np.frombuffer(b"".join(pieces("pcm", pcm, speed=2.0)), "<i2") / 2**15
    onset_s = np.argmax(np.abs(changed) > 0.25) / SAMPLE_RATE_HZ
    assert onset_s == pytest.approx(0.5, abs=0.06)


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
