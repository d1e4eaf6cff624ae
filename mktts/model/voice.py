"""A cloned voice: what a Base checkpoint hears in a reference recording, kept in one file.

The speaker encoder and the codec encoder are upstream's own modules, and upstream's own method drives them, so a
voice equals what `create_voice_clone_prompt` makes, bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mktts.audio import peak_dbfs, read_audio
from mktts.common import write_whole
from mktts.errors import VoiceError
from mktts.spec import AUDIBLE_DBFS, CODEBOOK_SIZE, FRAME_MS, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint

_FORMAT = "mktts-voice-1"
_MAX_CHANNELS = 8
_LOUDEST = 2.0  # decoders overshoot full scale a little; far beyond it, samples were never scaled to [-1, 1]


@dataclass(frozen=True, eq=False)
class Voice:
    """Speaker embedding alone (x-vector), or with the reference's codes and transcript (in-context cloning).

    In-context cloning continues the reference, which is closer to it; its codes are part of every prompt.
    """

    embedding: Tensor  # (H,) floating, on the CPU; H is the talker's hidden size
    codes: Tensor | None  # (T, 16) int64, on the CPU
    transcript: str | None
    model_size: str  # of the checkpoint that made it: "0b6" or "1b7"

    def __post_init__(self) -> None:
        embedding, codes = self.embedding, self.codes
        if not (isinstance(embedding, Tensor) and embedding.dim() == 1 and embedding.is_floating_point()):
            raise VoiceError(f"embedding must be a floating tensor (H,), got {_describe(embedding)}")
        if not embedding.isfinite().all():
            raise VoiceError("embedding must be finite, found NaN or infinity")
        if (codes is None) != (self.transcript is None):
            raise VoiceError("codes and transcript go together: give both (in-context) or neither (x-vector)")
        if codes is None:
            return
        shaped = isinstance(codes, Tensor) and codes.dim() == 2 and codes.shape[1] == NUM_CODEBOOKS and len(codes)
        if not shaped or codes.dtype != torch.int64:
            raise VoiceError(f"codes must be int64 (T >= 1, {NUM_CODEBOOKS}), got {_describe(codes)}")
        if codes.min() < 0 or codes.max() >= CODEBOOK_SIZE:
            raise VoiceError(f"codes must be in 0..{CODEBOOK_SIZE - 1}, found {int(codes.min())}..{int(codes.max())}")
        if not isinstance(self.transcript, str) or not self.transcript.strip():
            raise VoiceError("transcript must be what the reference says, got an empty text")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything in it but `model_size`, hexadecimal: equal voices, equal digests; computed once."""
        content = hashlib.sha256(repr(self.transcript).encode())
        for tensor in (self.embedding, self.codes):
            if tensor is not None:
                content.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
                content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        return content.hexdigest()

    @classmethod
    def from_audio(
        cls,
        checkpoint: Checkpoint,
        audio: np.ndarray | Path | str,
        sample_rate_hz: int | None = None,
        transcript: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Voice:
        """Makes a voice from a reference recording, in-context where `transcript` is given.

        `audio` is a file, or samples (S,) or (S, channels) with their `sample_rate_hz`: floats in [-1, 1] or signed
        integers. Channels are averaged and any rate is resampled, as upstream does. `dtype` is the speaker
        encoder's; the codec encoder runs in float32.
        Raises VoiceError for unusable audio or a checkpoint that is not Base, BackendUnavailable without qwen-tts.
        """
        if checkpoint.config.model_type != "base":
            raise VoiceError(
                f"only Base checkpoints clone voices, this one is {checkpoint.config.model_type}: "
                "use its built-in speakers, or open a Base checkpoint"
            )
        if transcript is not None and not transcript.strip():
            raise VoiceError("transcript must be what the reference says, got an empty text; for x-vector pass None")
        pcm, rate_hz = _samples(audio, sample_rate_hz)
        encoder = _reference_encoder(checkpoint, dtype, with_codes=transcript is not None)
        transcript = None if transcript is None else transcript.strip()
        with contextlib.redirect_stdout(sys.stderr):  # upstream prints a warning about samples over full scale
            (item,) = encoder.create_voice_clone_prompt((pcm, rate_hz), transcript, transcript is None)
        return cls(
            embedding=item.ref_spk_embedding.cpu().clone(),  # clone: not an inference tensor any more
            codes=None if item.ref_code is None else item.ref_code.cpu().clone(),
            transcript=transcript,
            model_size=checkpoint.config.model_size,
        )

    def save(self, path: Path | str) -> Path:
        """Writes one safetensors file, whole or not at all; the transcript and model size are in its header."""
        from safetensors.torch import save

        tensors = {"embedding": self.embedding.contiguous()}
        header = {"format": _FORMAT, "model_size": self.model_size}
        if self.codes is not None:
            tensors["codes"] = self.codes.contiguous()
            header["transcript"] = str(self.transcript)
        return write_whole(path, save(tensors, header))

    @classmethod
    def load(cls, path: Path | str) -> Voice:
        """Reads what `save` wrote. Raises VoiceError for anything else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        except (OSError, SafetensorError) as error:
            raise VoiceError(f"{path}: expected a file made by Voice.save, could not read it: {error}") from None
        if header.get("format") != _FORMAT or "embedding" not in tensors:
            raise VoiceError(
                f"{path}: expected a file made by Voice.save (format {_FORMAT}), "
                f"found format {header.get('format')!r} with tensors {sorted(tensors)[:5]}"
            )
        try:
            return cls(tensors["embedding"], tensors.get("codes"), header.get("transcript"), header["model_size"])
        except (VoiceError, KeyError) as error:
            raise VoiceError(f"{path}: {error}") from None


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
    elif isinstance(sample_rate_hz, bool) or not isinstance(sample_rate_hz, (int, np.integer)) or sample_rate_hz < 1:
        raise VoiceError(f"samples need their rate, a whole number of Hz, got sample_rate_hz={sample_rate_hz!r}")
    else:
        pcm, rate_hz = _mono(audio), int(sample_rate_hz)
    if not np.isfinite(pcm).all():
        raise VoiceError("audio must be finite, found NaN or infinity")
    if len(pcm) * SAMPLE_RATE_HZ < SAMPLES_PER_FRAME * rate_hz:
        raise VoiceError(
            f"audio must last at least one codec frame ({FRAME_MS:g} ms; 3 s or more for a good voice), "
            f"got {len(pcm)} samples at {rate_hz} Hz"
        )
    if peak_dbfs(pcm) < AUDIBLE_DBFS:
        raise VoiceError(f"audio is silent: its peak is {peak_dbfs(pcm):.0f} dBFS, expected over {AUDIBLE_DBFS:g}")
    if np.abs(pcm).max() > _LOUDEST:
        raise VoiceError(f"audio must be in [-1, 1], found a sample of {np.abs(pcm).max():g}: divide by its full scale")
    return pcm, rate_hz


def _mono(audio: np.ndarray) -> np.ndarray:
    if audio.dtype.kind not in "fi":
        raise VoiceError(f"audio must be floats in [-1, 1] or signed integers, got {audio.dtype}")
    if audio.ndim not in (1, 2) or (audio.ndim == 2 and not 1 <= audio.shape[1] <= _MAX_CHANNELS):
        raise VoiceError(f"audio must be (samples,) or (samples, channels), got shape {audio.shape}")
    full_scale = -float(np.iinfo(audio.dtype).min) if audio.dtype.kind == "i" else 1.0
    pcm = audio.astype(np.float32) if full_scale == 1 else (audio / full_scale).astype(np.float32)
    return pcm if pcm.ndim == 1 else pcm.mean(1, dtype=np.float32)


def _reference_encoder(checkpoint: Checkpoint, dtype: torch.dtype, with_codes: bool) -> Any:
    """Upstream's wrapper around the two encoders only: listening needs no talker, and an x-vector no codec."""
    from mktts.synth.upstream import import_upstream

    qwen_tts = import_upstream()
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSSpeakerEncoder

    config = Qwen3TTSConfig.from_pretrained(checkpoint.folder)
    speaker = Qwen3TTSSpeakerEncoder(config.speaker_encoder_config).to(dtype).eval()
    prefix = "speaker_encoder."
    speaker.load_state_dict(
        {name.removeprefix(prefix): t for name, t in checkpoint.tensors().items() if name.startswith(prefix)}
    )
    ears = SimpleNamespace(
        tts_model_type="base",
        speaker_encoder=speaker,
        speaker_encoder_sample_rate=config.speaker_encoder_config.sample_rate,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    listen = Qwen3TTSForConditionalGeneration.extract_speaker_embedding
    ears.extract_speaker_embedding = lambda audio, sr: listen(ears, audio, sr)
    if with_codes:
        ears.speech_tokenizer = qwen_tts.Qwen3TTSTokenizer.from_pretrained(
            checkpoint.folder / "speech_tokenizer", dtype=torch.float32
        )
    else:
        no_codes = SimpleNamespace(audio_codes=[None])
        ears.speech_tokenizer = SimpleNamespace(encode=lambda audio, sr: no_codes)
    return qwen_tts.Qwen3TTSModel(ears, processor=None)


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
