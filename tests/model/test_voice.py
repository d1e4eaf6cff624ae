"""Voices against upstream's create_voice_clone_prompt, and every kind of bad reference by name."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from upstream_models import loaded

from mktts.audio import write_audio
from mktts.errors import VoiceError
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth.cloning import clone_voice

TEXT = "What the reference says."
CODES = torch.arange(3 * NUM_CODEBOOKS).view(3, NUM_CODEBOOKS)


def hum(samples: int, rate_hz: int = SAMPLE_RATE_HZ) -> np.ndarray:
    """Something with a pitch, harmonics and noise: (samples,) float32."""
    t = np.arange(samples) / rate_hz
    tone = sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 8))
    return (0.1 * tone + 0.01 * np.random.default_rng(0).standard_normal(samples)).astype(np.float32)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def upstream(request, tiny_base):
    return loaded("random:tiny:base", request.param)[1]


@pytest.mark.parametrize("rate_hz", [SAMPLE_RATE_HZ, 8000, 44100])
@pytest.mark.parametrize("transcript", [TEXT, None], ids=["in-context", "x-vector"])
def test_voice_is_bit_equal_to_upstreams_clone_prompt(upstream, tiny_base, rate_hz, transcript):
    pcm = hum(rate_hz, rate_hz)
    (expected,) = upstream.create_voice_clone_prompt((pcm, rate_hz), transcript, x_vector_only_mode=transcript is None)
    voice = clone_voice(tiny_base, pcm, rate_hz, transcript, dtype=upstream.model.dtype)
    assert voice.embedding.dtype == expected.ref_spk_embedding.dtype
    assert torch.equal(voice.embedding, expected.ref_spk_embedding)
    assert voice.transcript == expected.ref_text
    if transcript is None:
        assert voice.codes is None and expected.ref_code is None
    else:
        assert torch.equal(voice.codes, expected.ref_code)


def test_a_file_gives_the_voice_upstream_makes_of_that_file(upstream, tiny_base, tmp_path):
    path = write_audio(tmp_path / "r.wav", hum(30_000))
    (expected,) = upstream.create_voice_clone_prompt(str(path), TEXT)
    voice = clone_voice(tiny_base, path, transcript=TEXT, dtype=upstream.model.dtype)
    assert torch.equal(voice.embedding, expected.ref_spk_embedding) and torch.equal(voice.codes, expected.ref_code)


def test_stereo_integers_and_float64_are_the_same_recording_and_one_frame_is_enough(tiny_base):
    pcm = np.round(hum(9600) * 2**15) / 2**15
    voice = clone_voice(tiny_base, pcm.astype(np.float32), SAMPLE_RATE_HZ, TEXT)
    integers = (pcm * 2**15).astype(np.int16)
    for audio in (pcm, np.stack((pcm, pcm), 1), integers, integers[:, None], (integers.astype(np.int32) << 16)):
        found = clone_voice(tiny_base, audio, np.int64(SAMPLE_RATE_HZ), TEXT)
        assert (found.digest, found.model_size) == (voice.digest, voice.model_size)
    assert len(clone_voice(tiny_base, hum(SAMPLES_PER_FRAME), SAMPLE_RATE_HZ, TEXT).codes) == 1


@pytest.mark.parametrize(
    "audio, rate_hz, found",
    [
        (np.zeros(9600, np.float32), SAMPLE_RATE_HZ, "silent.* its loudest sample is 0 of full scale"),
        (hum(9600) * 1e-4, SAMPLE_RATE_HZ, "silent"),
        (np.zeros(0, np.float32), SAMPLE_RATE_HZ, "got 0 samples"),
        (hum(SAMPLES_PER_FRAME - 1), SAMPLE_RATE_HZ, "at least one codec frame"),
        *((np.append(hum(9600), value).astype(np.float32), SAMPLE_RATE_HZ, "NaN or inf") for value in (np.nan, np.inf)),
        (hum(9600) * 32768, SAMPLE_RATE_HZ, "in \\[-1, 1\\]"),
        *((hum(9600).astype(kind), SAMPLE_RATE_HZ, f"got {kind}") for kind in ("complex128", "uint8")),
        (np.array(["a", "b"]), SAMPLE_RATE_HZ, "floats"),
        (np.stack((hum(9600), hum(9600))), SAMPLE_RATE_HZ, "\\(samples, channels\\), got shape \\(2, 9600\\)"),
        (np.ones((), np.float32), SAMPLE_RATE_HZ, "got shape \\(\\)"),
        *((value, SAMPLE_RATE_HZ, f"got {type(value).__name__}") for value in (list(hum(9600)), None)),
        *((hum(9600), rate_hz, f"sample_rate_hz={rate_hz}") for rate_hz in (None, 0, 99, 24e3)),
        ("no such file.wav", None, "found nothing"),
    ],
)
def test_unusable_audio_is_refused_by_name(tiny_base, audio, rate_hz, found):
    with pytest.raises(VoiceError, match=found):
        clone_voice(tiny_base, audio, rate_hz, TEXT)


def test_standard_output_stays_clean(tiny_base, capfd):
    loud = hum(9600) / np.abs(hum(9600)).max() * 1.5  # over full scale: upstream prints about it
    clone_voice(tiny_base, loud, SAMPLE_RATE_HZ, TEXT)
    assert capfd.readouterr().out == ""


def test_other_mistakes_are_refused_by_name(tiny_base, tiny, tmp_path):
    with pytest.raises(VoiceError, match="only Base checkpoints clone voices, this one is custom_voice"):
        clone_voice(tiny, hum(9600), SAMPLE_RATE_HZ)
    with pytest.raises(VoiceError, match="empty text"):
        clone_voice(tiny_base, hum(9600), SAMPLE_RATE_HZ, " ")
    path = write_audio(tmp_path / "r.wav", hum(9600))
    with pytest.raises(VoiceError, match="the file says 24000 Hz, the call 8000"):
        clone_voice(tiny_base, path, 8000)


def test_a_voice_is_saved_to_one_file_and_loaded_back_equal(tmp_path):
    for embedding, *rest in ((torch.randn(64).bfloat16(), None, None), (torch.randn(8), CODES, "naïve 你好\n")):
        voice = Voice(embedding, *rest, "1b7")
        found = Voice.load(voice.save(tmp_path / "new" / "v.safetensors"))
        assert (found.digest, found.model_size) == (voice.digest, "1b7")
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["v.safetensors"]


def test_foreign_and_torn_voice_files_are_refused_by_name(tmp_path):
    path = Voice(torch.randn(64), CODES, TEXT, "0b6").save(tmp_path / "v.safetensors")
    (tmp_path / "torn").write_bytes(path.read_bytes()[:-1])
    (tmp_path / "text").write_text("hello")
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign")
    save_file({"embedding": torch.zeros(2, 2)}, tmp_path / "wrong", {"format": "mktts-voice-1", "model_size": "0b6"})
    for bad, found in (
        *((name, "could not read") for name in ("torn", "text", "no")),
        ("foreign", "found format None with tensors \\['weight'\\]"),
        ("wrong", "embedding must be"),
    ):
        with pytest.raises(VoiceError, match=found):
            Voice.load(tmp_path / bad)


@pytest.mark.parametrize(
    "embedding, codes, transcript, found",
    [
        *((wrong, None, None, "be a floating tensor") for wrong in (torch.zeros(2, 3), CODES[0])),
        (torch.full((3,), torch.nan), None, None, "finite"),
        *((torch.zeros(3), *parts, "go together") for parts in ((CODES, None), (None, TEXT))),
        *((torch.zeros(3), wrong, TEXT, "codes must be int64") for wrong in (CODES[:, :5], CODES[:0], CODES.float())),
        (torch.zeros(3), CODES + 2048, TEXT, "codes must be in 0..2047"),
        (torch.zeros(3), CODES, "  ", "empty text"),
    ],
)
def test_a_voice_with_wrong_parts_cannot_be_made(embedding, codes, transcript, found):
    with pytest.raises(VoiceError, match=found):
        Voice(embedding, codes, transcript, "0b6")
