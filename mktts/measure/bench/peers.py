"""Other implementations of Qwen3-TTS, driven as their users would, to be timed beside ours.

* upstream: qwen-tts's own generate, then its codec.
* faster: faster-qwen3-tts (CUDA graphs around upstream's modules, window decoding of the codec).

Both read the same checkpoint folder and get the prompt of the same `Request`. Packages are imported on first use; an
absent or incompatible one raises BackendUnavailable with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mktts.errors import BackendUnavailable
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.spec import SAMPLE_RATE_HZ

PACKAGES = (
    "qwen-tts",
    "qwen-tts-hf",
    "faster-qwen3-tts",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "torchaudio",
)


@dataclass
class Run:
    """One utterance of a peer, times in ms from the call.

    frame_ms: (context positions, ms of that frame), codec left out. chunks: (frames, ms to its PCM on the host).
    """

    audio_s: float = 0.0
    first_pcm_ms: float | None = None
    total_ms: float = 0.0
    frame_ms: list[tuple[int, float]] = field(default_factory=list)
    chunks: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rtf(self) -> float:
        return self.total_ms / 1e3 / self.audio_s


class UpstreamPeer:
    """qwen-tts as it is, on `device` in `dtype`; it has no streaming, so its first PCM is its last."""

    name = "upstream"

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        from mktts.synth.upstream import load_upstream

        complete_transformers()
        self._model = load_upstream(folder, dtype, device)
        self._device = device

    def frames(self, request: Request, sampling: Sampling, seed: int, max_frames: int) -> Run:
        """The frames alone: each is timed from the one before it, codes handed to the host."""
        from mktts.synth.upstream import generate_codes, prompt_embeds

        context, run = len(prompt_embeds(self._model, request)[0]), Run()
        marks = [time.perf_counter()]
        generate_codes(
            self._model, request, sampling, seed, max_frames, on_frame=lambda codes: marks.append(time.perf_counter())
        )
        # The first interval holds the prompt's own pass.
        for index, (before, after) in enumerate(zip(marks[1:], marks[2:], strict=False)):
            run.frame_ms.append((context + index + 1, 1e3 * (after - before)))
        run.total_ms = 1e3 * (marks[-1] - marks[0])
        return run

    def utterance(self, request: Request, sampling: Sampling, seed: int, max_frames: int) -> Run:
        """Text to PCM on the host, the whole utterance at once."""
        from mktts.synth.upstream import decode_codes, generate_codes

        begun_s = time.perf_counter()
        pcm = decode_codes(self._model, generate_codes(self._model, request, sampling, seed, max_frames))
        elapsed_ms = 1e3 * (time.perf_counter() - begun_s)
        return Run(len(pcm) / SAMPLE_RATE_HZ, elapsed_ms, elapsed_ms)


class FasterPeer:
    """faster-qwen3-tts with its own defaults (bfloat16 throughout, a static cache of 2 048 positions); CUDA only."""

    name = "faster"

    def __init__(self, folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        complete_transformers()
        package = _import("faster_qwen3_tts")
        with _quiet():
            self._model = package.FasterQwen3TTS.from_pretrained(str(folder), device=device, dtype=dtype)
            processor = self._model.model.processor
            # As for upstream: a local folder must not swap the tokenizer's pre-tokenizer (mktts.synth.upstream).
            processor.tokenizer = type(processor.tokenizer).from_pretrained(str(folder))
        self._prompt_rows: dict[Request, int] = {}

    def stream(self, request: Request, sampling: Sampling, seed: int, max_frames: int, chunk_frames: int) -> Run:
        """Chunks of `chunk_frames` frames; a frame's time is its chunk's generation, codec left out, by their clock."""
        torch.manual_seed(seed)
        run, begun_s = Run(), time.perf_counter()
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
                context = self._context(request) + timing["total_steps_so_far"]
                run.frame_ms.append((context, timing["decode_ms"] / timing["chunk_steps"]))
        return run

    def _context(self, request: Request) -> int:
        """Prompt rows, computed once a request: role, tags, speaker and text."""
        if request not in self._prompt_rows:
            prepared = self._model._prepare_generation_custom(
                request.text.strip(), request.language, request.speaker, None, request.layout != "streaming"
            )
            self._prompt_rows[request] = prepared[3].shape[1]
        return self._prompt_rows[request]


def _their_choice(sampling: Sampling) -> dict[str, Any]:
    """faster-qwen3-tts takes the talker's settings; its predictor's are fixed to the released ones."""
    return {**asdict(sampling.talker), "repetition_penalty": sampling.repetition_penalty}


def complete_transformers() -> None:
    """Gives transformers 5 the one attribute that qwen-tts's build for it still asks for; 4 has it.

    There MimiConfig keeps its rotary base only among `rope_parameters`. 10 000 is its published default.
    """
    from mktts.synth.upstream import install_shim

    install_shim()
    config = _import("transformers").MimiConfig
    if not hasattr(config, "rope_theta"):
        config.rope_theta = 10_000.0


def _import(name: str) -> Any:
    try:
        with _quiet():
            return importlib.import_module(name)
    except Exception as error:
        raise BackendUnavailable(
            f"the package {name} is needed for this peer and cannot be imported: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Peers print banners and progress; standard output is for the figures."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
