"""The interface between a model and the engine, implemented by the torch oracle and the megakernel. A backend owns the
weights; the `StreamState` that it returns holds everything about one utterance. One thread owns a backend."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mktts.errors import BackendUnavailable, EngineError
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS

CODE_EMBEDDINGS = (
    "talker.model.codec_embedding.weight",
    *(f"talker.code_predictor.model.codec_embedding.{group}.weight" for group in range(NUM_CODEBOOKS - 1)),
)  # Hub names, one for each codebook
StreamState = Any  # backend-specific dataclass: KV cache, position, last codes, code-0 history, seed


@dataclass(frozen=True)
class Frame:
    """One 80 ms frame. `codes` is (16,) int64 on the host, or None at end-of-speech."""

    codes: Tensor | np.ndarray | None
    talker_ms: float
    predictor_ms: float


@dataclass(frozen=True)
class PromptRows:
    """The part of a Prompt or a ready FedPrompt that a backend reads; on its own for measurements and tests."""

    embeds: Tensor  # the talker's inputs, (L, H)
    prefix_rows: int = 0  # leading rows of `embeds` that do not depend on the text, fewer than L
    prefix_key: Hashable | None = None  # for one checkpoint, device and dtype: equal keys mean equal prefix rows


def no_number() -> EngineError:
    """The error that ends a stream whose logits are all NaN or -inf."""
    return EngineError("the model gave no number for this stream: its prompt or voice holds NaN")


class Backend(Protocol):
    """Talker and code predictor of one checkpoint.

    A backend that works asynchronously may also have `codes_to_come(state)`, the buffer for the codes of the next first
    frame; its `step` then accepts `meanwhile`, which it calls between launch and wait: see `MegakernelBackend`."""

    name: str
    embeddings: Mapping[str, Tensor]  # by name in CODE_EMBEDDINGS, (vocabulary, H) each; also read to build prompts

    def forget(self, voice: Voice) -> None:
        """Drops everything cached for prompts with this voice."""

    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> StreamState:
        """Prefills the prompt's L rows and returns a stream of up to `max_frames` frames; keys and values of the prefix
        may be cached under its key. Raises CapacityError if L + max_frames exceeds the model's positions, SamplingError
        for a seed outside [0, 2^64) or an `rng` that the backend does not support."""

    def step(self, state: StreamState, row: Tensor | None) -> Frame:
        """Makes the next frame. row (H,): the text embedding that is added to the newest frame's code embeddings; None
        exactly on the first call. Raises CapacityError after end-of-speech or `max_frames` frames."""

    def frames(self, state: StreamState, rows: Sequence[Tensor | None]) -> Iterator[Frame]:
        """Runs `step` for each of `rows`, up to end-of-speech, and yields each frame as soon as it is made. Closing the
        iterator stops the work within one frame; the stream must not be used after that."""


def device_named(name: str | torch.device) -> torch.device:
    """The device called `name`; "auto" prefers CUDA. Raises BackendUnavailable if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BackendUnavailable(f"device must be 'auto', 'cpu' or 'cuda', got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("device 'cuda' was asked for and torch sees no CUDA device: pass device='cpu'")
    if device.index is not None and device.type == "cuda" and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise BackendUnavailable(f"device {name!r} was asked for and torch sees {count}: name another")
    return device


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA, as the weights are stored; float32 on the CPU, where bfloat16 is faster only for large models
    on processors with AMX (a frame took 0.77 of float32's time at 0.6B, 1.65 of it at tiny size)."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
