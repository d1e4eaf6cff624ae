"""Other implementations of Qwen3-TTS, driven as their users would, timed beside ours.

* faster: faster-qwen3-tts (CUDA graphs around upstream's modules, window decoding of the codec)
* upstream: qwen-tts's own generate, then its codec: what all are measured against

Both read the same checkpoint folder and get the prompt of the same `Request`. An absent or incompatible package raises
BackendUnavailable with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mktts.checkpoint import Checkpoint
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.bench.sections import (
    STEADY_FRAMES,
    BenchSettings,
    Measured,
    request_of,
    sentence_of,
    steady_frame_ms,
)
from mktts.measure.environment import provided_by
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import FRAME_MS, SAMPLE_RATE_HZ

PACKAGES = (
    "qwen-tts", "qwen-tts-hf", "faster-qwen3-tts", "transformers", "tokenizers", "huggingface-hub", "torchaudio",
)  # fmt: skip


@dataclass
class PeerRun:
    """One utterance of a peer, times in ms from the call.

    frame_ms: (frames so far, ms of that frame), codec left out. chunks: (frames, ms to its PCM on the host).
    """

    audio_s: float = 0.0
    first_pcm_ms: float | None = None
    total_ms: float = 0.0
    frame_ms: list[tuple[int, float]] = field(default_factory=list)
    chunks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rtf(self) -> float:
        return self.total_ms / 1e3 / self.audio_s


class FasterPeer:
    """faster-qwen3-tts with its own defaults (bfloat16 throughout, a static cache of 2 048 positions); CUDA only."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        from mktts.synth.upstream import install_shim

        install_shim()
        try:
            with _quiet():
                package = importlib.import_module("faster_qwen3_tts")
        except Exception as error:
            raise BackendUnavailable(
                f"the package faster_qwen3_tts is needed and cannot be imported: {type(error).__name__}: {error}"
            ) from error
        with _quiet():
            self._model = package.FasterQwen3TTS.from_pretrained(str(folder), device=device, dtype=dtype)
            processor = self._model.model.processor
            # As for upstream: a local folder must not swap the tokenizer's pre-tokenizer (mktts.synth.upstream).
            processor.tokenizer = type(processor.tokenizer).from_pretrained(str(folder))

    def stream(self, request: Request, sampling: Sampling, seed: int, max_frames: int, chunk_frames: int) -> PeerRun:
        """Chunks of `chunk_frames` frames; a frame's time is its chunk's generation, codec left out, by their clock."""
        torch.manual_seed(seed)
        run, begun_s = PeerRun(), time.perf_counter()
        with _quiet():
            for pcm, rate_hz, timing in self._model.generate_custom_voice_streaming(
                text=request.text.strip(),
                speaker=request.speaker,
                language=request.language,
                non_streaming_mode=request.layout != "streaming",  # None: whole, upstream's default for a custom voice
                max_new_tokens=max_frames,
                chunk_size=chunk_frames,
                **_their_choice(sampling),
            ):
                run.total_ms = 1e3 * (time.perf_counter() - begun_s)
                run.first_pcm_ms = run.first_pcm_ms or run.total_ms
                run.audio_s += len(pcm) / rate_hz
                run.chunks.append((timing["chunk_steps"], run.total_ms))
                run.frame_ms.append((timing["total_steps_so_far"], timing["decode_ms"] / timing["chunk_steps"]))
        return run


def _their_choice(sampling: Sampling) -> dict[str, Any]:
    """faster-qwen3-tts takes the talker's settings; its predictor's are fixed to the released ones."""
    return {**asdict(sampling.talker), "repetition_penalty": sampling.repetition_penalty}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Peers print banners and progress; standard output is for the figures."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


# ---- sections


def _at_context(checkpoint: Checkpoint, frame_ms: Sequence[tuple[int, float]], settings: BenchSettings) -> list[float]:
    """The ms of those (frames so far, ms) that are around the context, prompt included."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cpu", torch.bfloat16)
    rows = len(builder.build(request_of(checkpoint, settings)).embeds)
    near = [ms for made, ms in frame_ms if abs(rows + made - settings.context) <= settings.around]
    if not near:
        raise MetricsError(f"the peer's utterance ended before context {settings.context - settings.around}")
    return near


def faster(settings: BenchSettings) -> Measured:
    """First PCM at a chunk of 1 frame, a frame at the context, and RTF at its default and at chunks of 8 and 1.

    Chunks of 8 frames, as ours come once a stream runs, give the frame with its codec.
    """
    checkpoint = settings.open()
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    peer = FasterPeer(checkpoint.folder, settings.device, settings.torch_dtype)
    yield {"faster_package": provided_by("faster_qwen3_tts")}
    for chunk in (1, 8, 12):
        peer.stream(request, sampling, 0, 26, chunk)  # captures its graphs; chunks of every length it will decode
    for name, said in (("faster_ttfc_ms", request), ("faster_ttfc_sentence_ms", sentence_of(checkpoint))):
        peer.stream(said, sampling, 0, 1, 1)
        first = [peer.stream(said, sampling, seed, 1, 1) for seed in range(settings.samples // 10)]
        yield name, [run.first_pcm_ms for run in first], "ms, chunk of 1 frame"
    for name, chunk in (("faster_rtf", 12), ("faster_rtf_chunk_8", 8), ("faster_rtf_chunk_1", 1)):
        seeds = range(settings.peer_utterances)
        runs = [peer.stream(request, sampling, seed, settings.frames, chunk) for seed in seeds]
        yield name, [run.rtf for run in runs], f"compute s / audio s, chunks of {chunk}"
        if chunk == STEADY_FRAMES:
            steady_ms = [ms for run in runs for ms in steady_frame_ms(run.chunks)]
            yield "faster_frame_with_codec_ms", steady_ms, f"ms, chunks of {STEADY_FRAMES} frames"
    long = peer.stream(request, sampling, 0, settings.context + settings.around, 12)
    yield "faster_frame_ms", _at_context(checkpoint, long.frame_ms, settings), "ms, mean of 12 frames, codec left out"


def upstream(settings: BenchSettings) -> Measured:
    """A frame at the context, and whole utterances: it does not stream, so its first PCM is its last."""
    from mktts.synth.upstream import decode_codes, generate_codes, load_upstream

    checkpoint = settings.open()
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    model = load_upstream(checkpoint.folder, settings.torch_dtype, settings.device)
    yield {"upstream_package": provided_by("qwen_tts")}

    def utterance(seed: int, frames: int) -> tuple[float, float]:
        """(ms from text to PCM on the host, seconds of audio)"""
        begun_s = time.perf_counter()
        pcm = decode_codes(model, generate_codes(model, request, sampling, seed, frames))
        return 1e3 * (time.perf_counter() - begun_s), len(pcm) / SAMPLE_RATE_HZ

    utterance(0, 8)
    runs = [utterance(seed, settings.frames) for seed in range(settings.peer_utterances)]
    yield "upstream_rtf", [ms / 1e3 / audio_s for ms, audio_s in runs], "compute s / audio s"
    whole = [ms / 1e3 / audio_s * FRAME_MS for ms, audio_s in runs]
    yield "upstream_frame_with_codec_ms", whole, "ms, a whole utterance over its frames: it does not stream"
    yield "upstream_first_pcm_ms", [ms for ms, _ in runs], "ms; the whole utterance: it does not stream"
    marks_s: list[float] = []
    last = settings.context + settings.around
    generate_codes(model, request, sampling, 0, last, on_frame=lambda codes: marks_s.append(time.perf_counter()))
    # The first frame's interval holds the prompt's own pass.
    frame_ms = [(i, 1e3 * (b - a)) for i, (a, b) in enumerate(zip(marks_s, marks_s[1:], strict=False), 1)]
    yield "upstream_frame_ms", _at_context(checkpoint, frame_ms, settings), "ms"
