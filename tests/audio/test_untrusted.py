"""Audio from somebody unknown: what it holds, or one line about what is wrong; never more time, memory or files."""

import io
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from absent import needs
from sounds import tone

from mktts.audio import encoded
from mktts.audio.untrusted import decode_untrusted
from mktts.errors import VoiceError

pytestmark = needs("av")
SECONDS = 1.0


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg", "opus", "aac"])
def test_every_format_is_read(kind):
    pcm, rate_hz = decode_untrusted(encoded(tone(SECONDS), kind))
    assert pcm.dtype == np.float32 and len(pcm) / rate_hz == pytest.approx(SECONDS, abs=0.1)
    assert np.abs(pcm).max() == pytest.approx(0.5, abs=0.05)


def test_channels_are_averaged_and_24_bits_kept():
    file = io.BytesIO()
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


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space")


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
