"""The one interface between a model and the engine, implemented by the torch oracle and the megakernel. A backend owns
weights; everything about one utterance lives in the `StreamState` it returns. One thread owns a backend."""

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
)  # by Hub name, a codebook each
StreamState = Any  # backend-specific dataclass: KV cache, position, last codes, code-0 history, seed


@dataclass(frozen=True)
class Frame:
    """One 80 ms frame. `codes` is (16,) int64 on the host, or None when the talker said end-of-speech."""

    codes: Tensor | np.ndarray | None
    talker_ms: float
    predictor_ms: float


@dataclass(frozen=True)
class PromptRows:
    """Rows as a prompt, for measurements and tests; what a backend reads of a Prompt or a ready FedPrompt."""

    embeds: Tensor  # the talker's inputs, (L, H)
    prefix_rows: int = 0  # leading rows of `embeds` that no text changes, fewer than L
    prefix_key: Hashable | None = None  # equal keys of one checkpoint, device and dtype: equal prefix rows


def no_number() -> EngineError:
    """What ends a stream none of whose logits is a number."""
    return EngineError("the model gave no number for this stream: its prompt or voice holds NaN")


class Backend(Protocol):
    """Talker and code predictor of one checkpoint.

    One whose frames are made beside the host may also have `codes_to_come(state)`, where the next first frame writes
    its codes, and then its `step` takes `meanwhile`, a call between launch and wait: see `MegakernelBackend`."""

    name: str
    embeddings: Mapping[str, Tensor]  # CODE_EMBEDDINGS, (vocabulary, H) each; prompts read them too

    def forget(self, voice: Voice) -> None:
        """Lets go of what is kept for prompts with this voice."""

    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> StreamState:
        """Prefills the prompt's L rows and returns a stream that can make up to `max_frames` frames; what was computed
        for the prefix may be kept under its key. Raises CapacityError where L + max_frames exceeds the model's
        positions, SamplingError for a seed outside [0, 2^64) or draws that the backend does not make."""

    def step(self, state: StreamState, row: Tensor | None) -> Frame:
        """Makes the next frame. row (H,): the text embedding that is added to the newest frame's code embeddings; None
        exactly on the first call. Raises CapacityError after end-of-speech or `max_frames` frames."""

    def frames(self, state: StreamState, rows: Sequence[Tensor | None]) -> Iterator[Frame]:
        """As many steps as there are `rows`, ending early after end-of-speech, each frame as it is made. Closing the
        iterator ends the work within one frame; the stream then must not be used again."""


def device_named(name: str | torch.device) -> torch.device:
    """The device of a name; "auto" is CUDA where there is a device. Raises BackendUnavailable for any other."""
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
    """bfloat16 on CUDA, as the weights are stored; float32 on the CPU, where bfloat16 pays only for large models on a
    processor with units for it (AMX: 0.77 of float32's time a frame at 0.6B, 1.65 at tiny size)."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
