"""Looks inside one frame: logits of all sixteen heads and the talker's residual stream, of the kernel or the oracle.

Teacher forcing goes from the model under test to the oracles: it chooses the codes, and they are made to take them, so
that every logit of a frame has the same history on all sides. `Errors` and `compare` say how far two of them are from
the third.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.kernel.backend import MegakernelBackend
from mktts.model.backend import Backend, PromptRows, StreamState
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.sampling import Sampling, restrict
from mktts.spec import NUM_CODEBOOKS, ModelConfig

LIMIT = 1.1  # of the kernel's error over the bf16 oracle's
_TEXT_IDS = 256  # random text tokens are below: every tokenizer has them
_ROWS_A_LAUNCH = 32  # at 28 layers 4 480 exchanges; their tags start again at 65 536


@dataclass(frozen=True)
class Observed:
    """One frame. `hidden` is None for a stream's first: its talker state comes from the prompt."""

    codes: Tensor  # (16,) int64 on the host
    logits: list[Tensor]  # 16 of (vocabulary,) fp32, as the heads gave them
    hidden: Tensor | None  # (layers, H) fp32: the residual stream after every talker layer


class Probe(Protocol):
    """A backend that shows what it does."""

    backend: Backend
    rows_at_once: int | None  # of a prompt, at most; None: any number

    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> StreamState:
        """As `Backend.start`; rows beyond `rows_at_once` go through the model one by one."""

    def step(self, state: StreamState, row: Tensor | None) -> Observed | None:
        """As `Backend.step`; None at end-of-speech."""


class KernelProbe:
    """The megakernel. The one place that knows how it hands out its inside."""

    def __init__(self, backend: MegakernelBackend) -> None:
        self.backend = backend
        self.rows_at_once = backend._prefill.capacity
        self._debug = backend.new_debug()

    @torch.inference_mode()
    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> StreamState:
        """A prompt of any length: what prefill does not take goes the way of the few rows after a kept prefix."""
        first, rest = prompt.embeds[: self.rows_at_once], prompt.embeds[self.rows_at_once :]
        room = len(rest) + max_frames  # in the stream's cache
        state = self.backend.start(PromptRows(first), sampling, seed, room)
        if len(rest):
            for rows in rest.to(self.backend.device, self.backend.dtype).contiguous().split(_ROWS_A_LAUNCH):
                self.backend.put_rows(state, rows, state.prompt_rows).synchronize()
                state.prompt_rows += len(rows)
        state.max_frames = max_frames
        return state

    def step(self, state: StreamState, row: Tensor | None) -> Observed | None:
        frame = self.backend.step(state, row, self._debug)
        if frame.codes is None:
            return None
        sizes = vocabularies(self.backend.config)
        logits = [head[:size].float() for head, size in zip(self._debug.logits, sizes, strict=True)]
        return Observed(frame.codes, logits, None if row is None else self._debug.hidden.float())


class TorchProbe:
    """The torch backend in the kernel's place: what runs where there is no GPU, and the bf16 oracle free-running."""

    rows_at_once: int | None = None

    def __init__(self, backend: TorchBackend) -> None:
        self.backend = backend

    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> TorchStream:
        return self.backend.start(prompt, sampling, seed, max_frames)

    def step(self, state: TorchStream, row: Tensor | None) -> Observed | None:
        codes = self.backend.step(state.copy(), row).codes
        if codes is None:
            return None
        return forced(self.backend, state, row, codes)


def probe_of(backend: Backend) -> Probe:
    return KernelProbe(backend) if isinstance(backend, MegakernelBackend) else TorchProbe(backend)


@torch.inference_mode()
def forced(backend: TorchBackend, state: TorchStream, row: Tensor | None, codes: Tensor) -> Observed:
    """The oracle's frame with `codes` (16,) for its choices: as `TorchBackend.step`, with nothing drawn."""
    with _layers(backend.talker) as layers:
        if row is not None:
            backend._advance(state, row)
        hidden = torch.cat(layers)[:, -1].float() if layers else None
    logits = [backend.code0_logits(state)]
    ids = codes.to(backend.device)
    cache = backend.predictor.new_cache(NUM_CODEBOOKS)
    x = torch.cat((state.hidden, backend.code_tables[0][ids[0]][None, None]), 1)
    for group, head in enumerate(backend.heads, start=1):
        if backend.projection is not None:
            x = F.linear(x, *backend.projection)
        logits.append(F.linear(backend.predictor.forward(x, cache), head)[0, -1].float())
        x = backend.code_tables[group][ids[group]][None, None]
    state.history[state.frames] = ids[0]
    state.codes = ids
    state.frames += 1
    return Observed(codes, logits, hidden)


def scores(logits: list[Tensor], history: Tensor, sampling: Sampling, config: ModelConfig) -> list[Tensor]:
    """What the sixteen choices are made from; `history` (N,) is code 0 of the frames before."""
    return [restrict(logits[0], history, sampling.repetition_penalty, config.codec_ids.eos), *logits[1:]]


def vocabularies(config: ModelConfig) -> list[int]:
    """Ids of each of the sixteen heads."""
    return [config.talker.vocab_size] + [config.predictor.vocab_size] * (NUM_CODEBOOKS - 1)


def spoken_rows(checkpoint: Checkpoint, backend: TorchBackend, frames: int, seed: int) -> tuple[Tensor, Tensor]:
    """A prompt (L, H) and `frames` text rows (frames, H) as the checkpoint itself makes them, of random text tokens.

    Wide-margin weights keep their margins for such rows only.
    """
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), backend.device)
    prompt = builder.build(Request("Some words.", speaker=checkpoint.config.default_speaker, layout="streaming"))
    ids = torch.randint(_TEXT_IDS, (frames,), generator=torch.Generator().manual_seed(seed))
    return prompt.embeds, builder.text_rows(ids.tolist())


def random_rows(backend: TorchBackend, rows: int, seed: int) -> Tensor:
    """`rows` talker inputs (rows, H) that look like the checkpoint's own: normal, of its embeddings' size, in bf16."""
    table = backend.code_tables[0]
    size = table[:256].float().pow(2).mean().sqrt().cpu()
    noise = torch.randn(rows, table.shape[1], generator=torch.Generator().manual_seed(seed))
    return (size * noise).to(torch.bfloat16).to(backend.device)


@contextmanager
def _layers(stack: Qwen3Stack) -> Iterator[list[Tensor]]:
    """Collects what every layer of a pass returns, (1, T, H) each."""
    seen: list[Tensor] = []
    compute = stack.layer

    def watched(*arguments) -> Tensor:
        seen.append(compute(*arguments))
        return seen[-1]

    stack.layer = watched
    try:
        yield seen
    finally:
        del stack.layer


# ---- relative errors


class Errors:
    """Relative rms errors to a reference, pooled by name: sqrt(sum (found - reference)^2 / sum reference^2)."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, found: Tensor, reference: Tensor, *names: str) -> None:
        error, size = (found - reference).double().pow(2).sum(), reference.double().pow(2).sum()
        for name in names:
            self._sums[name][0] += error
            self._sums[name][1] += size

    def relative(self) -> dict[str, float]:
        return {name: math.sqrt(float(error) / float(size)) for name, (error, size) in self._sums.items()}


def compare(kernel: Errors, bf16: Errors) -> dict[str, dict[str, float]]:
    """name -> kernel, bf16, ratio."""
    theirs = bf16.relative()
    return {
        name: {"kernel": ours, "bf16": theirs[name], "ratio": ours / theirs[name] if theirs[name] else float(ours > 0)}
        for name, ours in kernel.relative().items()
    }
