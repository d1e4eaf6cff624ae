"""Makes a voice from a reference recording, for a Base checkpoint, by upstream's own modules and method, so that it
equals what `create_voice_clone_prompt` makes, bit for bit."""

import argparse
import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mktts.audio import first_audible_sample, read_audio
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint.arguments import add_checkpoint_arguments
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import checked_int, require_writable
from mktts.errors import VoiceError
from mktts.model.voice import Voice
from mktts.spec import AUDIBLE_DBFS, AUDIBLE_WINDOW_MS, FRAME_MS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

_MAX_CHANNELS = 8
_LOWEST_RATE_HZ = 1_000  # below it there is no voice
_LOUDEST = 2.0  # decoders overshoot full scale a little; far beyond it, samples were never scaled to [-1, 1]


def clone_voice(
    checkpoint: Checkpoint,
    audio: np.ndarray | Path | str,
    sample_rate_hz: int | None = None,
    transcript: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Voice:
    """Makes a voice from a reference recording, in-context where `transcript` is given.

    audio: a file, or samples (S,) or (S, channels) with their `sample_rate_hz`, floats in [-1, 1] or signed integers;
    channels are averaged and any rate is resampled. dtype: the speaker encoder's. Raises VoiceError for unusable audio
    or a checkpoint that is not Base, BackendUnavailable without qwen-tts."""
    if not checkpoint.config.type.clones:
        raise VoiceError(
            f"only Base checkpoints clone voices, this one is {checkpoint.config.type.name}: "
            "use its built-in speakers, or open a Base checkpoint"
        )
    if transcript is not None and not transcript.strip():
        raise VoiceError("transcript must be what the reference says, got an empty text; for x-vector pass None")
    pcm, rate_hz = _samples(audio, sample_rate_hz)
    encoder = _reference_encoder(checkpoint, dtype, with_codes=transcript is not None)
    transcript = None if transcript is None else transcript.strip()
    with contextlib.redirect_stdout(sys.stderr):  # upstream prints a warning about samples over full scale
        (item,) = encoder.create_voice_clone_prompt((pcm, rate_hz), transcript, transcript is None)
    return Voice(
        embedding=item.ref_spk_embedding.cpu().clone(),  # clone: not an inference tensor any more
        codes=None if item.ref_code is None else item.ref_code.cpu().clone(),
        transcript=transcript,
        model_size=checkpoint.config.model_size,
    )


def _samples(audio: np.ndarray | Path | str, sample_rate_hz: int | None) -> tuple[np.ndarray, int]:
    """Checked mono float32 samples and their rate."""
    if isinstance(audio, (str, Path)):
        pcm, rate_hz = read_audio(audio)
        if sample_rate_hz not in (None, rate_hz):
            raise VoiceError(
                f"{audio}: the file says {rate_hz} Hz, the call {sample_rate_hz}: leave sample_rate_hz out"
            )
    elif not isinstance(audio, np.ndarray):
        raise VoiceError(f"audio must be a file or a numpy array, got {type(audio).__name__}")
    elif audio.dtype.kind not in "fi":
        raise VoiceError(f"audio must be floats in [-1, 1] or signed integers, got {audio.dtype}")
    elif audio.ndim not in (1, 2) or (audio.ndim == 2 and not 1 <= audio.shape[1] <= _MAX_CHANNELS):
        raise VoiceError(f"audio must be (samples,) or (samples, channels), got shape {audio.shape}")
    else:
        full_scale = -float(np.iinfo(audio.dtype).min) if audio.dtype.kind == "i" else 1.0
        pcm = audio.astype(np.float32) if full_scale == 1 else (audio / full_scale).astype(np.float32)
        pcm, rate_hz = pcm if pcm.ndim == 1 else pcm.mean(1, dtype=np.float32), sample_rate_hz
    checked_int(f"the rate, sample_rate_hz={rate_hz!r},", rate_hz, _LOWEST_RATE_HZ, error=VoiceError)
    if not np.isfinite(pcm).all():
        raise VoiceError("audio must be finite, found NaN or infinity")
    if len(pcm) * SAMPLE_RATE_HZ < SAMPLES_PER_FRAME * rate_hz:
        raise VoiceError(
            f"audio must last at least one codec frame ({FRAME_MS:g} ms; 3 s or more for a good voice), "
            f"got {len(pcm)} samples at {rate_hz} Hz"
        )
    if first_audible_sample(pcm, rate_hz) is None:
        raise VoiceError(
            f"audio is silent: expected {AUDIBLE_WINDOW_MS} ms with an RMS above {AUDIBLE_DBFS:g} dBFS, found none; "
            f"its loudest sample is {np.abs(pcm).max():.1g} of full scale"
        )
    if np.abs(pcm).max() > _LOUDEST:
        raise VoiceError(f"audio must be in [-1, 1], found a sample of {np.abs(pcm).max():g}: divide by its full scale")
    return pcm, rate_hz


def _reference_encoder(checkpoint: Checkpoint, dtype: torch.dtype, with_codes: bool) -> Any:
    """Upstream's wrapper with its two encoders alone: cloning needs no talker, and an x-vector no codec."""
    from mktts.engine.upstream import import_upstream

    qwen_tts = import_upstream()
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSSpeakerEncoder

    config = Qwen3TTSConfig.from_pretrained(checkpoint.folder)
    speaker = Qwen3TTSSpeakerEncoder(config.speaker_encoder_config).to(dtype).eval()
    prefix = "speaker_encoder."
    speaker.load_state_dict(
        {name.removeprefix(prefix): t for name, t in checkpoint.tensors().items() if name.startswith(prefix)}
    )
    encoder = SimpleNamespace(
        tts_model_type=checkpoint.config.type.name,
        speaker_encoder=speaker,
        speaker_encoder_sample_rate=config.speaker_encoder_config.sample_rate,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    extract = Qwen3TTSForConditionalGeneration.extract_speaker_embedding
    encoder.extract_speaker_embedding = lambda audio, sr: extract(encoder, audio, sr)
    if with_codes:
        encoder.speech_tokenizer = qwen_tts.Qwen3TTSTokenizer.from_pretrained(
            checkpoint.folder / "speech_tokenizer", dtype=torch.float32
        )
    else:
        no_codes = SimpleNamespace(audio_codes=[None])
        encoder.speech_tokenizer = SimpleNamespace(encode=lambda audio, sr: no_codes)
    return qwen_tts.Qwen3TTSModel(encoder, processor=None)


EXAMPLES = """examples:
  python -m mktts voice me.wav -o me.safetensors --checkpoint path/to/base --ref-text "What I said."
  python -m mktts say "In my voice." -o mine.wav --checkpoint path/to/base --voice me.safetensors

Needs a base checkpoint. With the words of the recording the voice is cloned from the recording itself, without them
from its speaker embedding alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("audio", type=Path, metavar="AUDIO", help="a recording: any rate, mono or stereo")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the voice file to write")
    parser.add_argument("--ref-text", metavar="TEXT", help="what is said in the recording")
    add_checkpoint_arguments(parser, None, required=True)


def main(arguments: argparse.Namespace) -> int:
    """Writes a voice file."""
    require_writable(arguments.output)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    recorded_voice(checkpoint, arguments.audio, arguments.ref_text).save(Path(arguments.output))
    if checkpoint.is_random:
        print(RANDOM_WEIGHTS, file=sys.stderr)
    return 0


def recorded_voice(checkpoint: Checkpoint, audio: Path, ref_text: str | None) -> Voice:
    """The voice of a recording, as --ref-audio and --ref-text give it. Raises as `clone_voice`."""
    if ref_text is not None and not ref_text.strip():
        raise VoiceError("--ref-text must be what the recording says, found nothing but blanks: or leave it out")
    return clone_voice(checkpoint, audio, None, ref_text)
