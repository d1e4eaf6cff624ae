"""Errors to fp32 of the model under test, next to those of bf16 PyTorch: the measure of the kernel. Teacher
forcing goes from the model under test to the two oracles: it chooses the codes, and they are made to take them, so that
every logit of a frame has the same history on all sides."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling, restrict
from mktts.spec import NUM_CODEBOOKS, ModelConfig

LIMIT = 1.1  # of the error over bf16 PyTorch's
GREEDY = Sampling().greedy()
_TEXT_IDS = 256  # random text tokens are below: every tokenizer has them


@dataclass(frozen=True)
class Observed:
    """One frame. codes: (16,) int64 on the host. logits: 16 of (vocabulary,) fp32, as the heads gave them. hidden:
    (layers, H) fp32, the residual stream after every talker layer; None for a stream's first, whose talker state comes
    from the prompt."""

    codes: Tensor
    logits: list[Tensor]
    hidden: Tensor | None


Sides = tuple[Observed, Observed, Observed, Tensor]  # under test, bf16, fp32, code 0 of the frames before


class Budget:
    """Seconds from now on. A comparison asks `over` between frames and makes fewer where it is; the first is made."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end_s = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end_s - time.perf_counter())

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def share(self, part: float) -> Budget:
        """A budget of `part` (0 to 1) of what is left, from now on."""
        return Budget(self.left_s * part)


UNLIMITED = Budget()


@dataclass(frozen=True, eq=False)
class RowStream:
    """A stream of rows instead of words: a prompt for any backend. embeds: of the prompt, (L, H). text: (F, H), F the
    frames it may have; its first row is not used, the prompt makes that frame. key: of the prompt's first `prefix`
    rows, which all streams with that key have; lanes keep them."""

    embeds: Tensor
    text: Tensor
    sampling: Sampling = GREEDY
    seed: int = 0
    key: str | None = None
    prefix: int = 0
    prefix_rows: ClassVar[int] = 0  # a backend of one stream keeps nothing
    prefix_key: ClassVar[None] = None

    @property
    def positions(self) -> int:
        """Positions that its keys and values take."""
        return len(self.embeds) + len(self.text)

    def row(self, t: int) -> Tensor:
        """The text row of frame t + 1."""
        return self.text[t + 1]


def random_rows(backend: TorchBackend, rows: int, seed: int) -> Tensor:
    """`rows` talker inputs (rows, H) that look like the checkpoint's own: normal, of its embeddings' size, in bf16."""
    table = backend.code_tables[0]
    size = table[:256].float().pow(2).mean().sqrt().cpu()
    noise = torch.randn(rows, table.shape[1], generator=torch.Generator().manual_seed(seed))
    return (size * noise).to(torch.bfloat16).to(backend.device)


def random_streams(backend: TorchBackend, rows: int, count: int, frames: int) -> list[RowStream]:
    """`count` streams of `frames` frames, every other greedy; prompts of `rows` rows, each one more than the last."""
    streams = []
    for index in range(count):
        prompt, text = (random_rows(backend, many, 1_000 * rows + index) for many in (rows + index, frames))
        streams.append(RowStream(prompt, text, Sampling() if index % 2 else GREEDY, index))
    return streams


@torch.inference_mode()
def spoken_stream(checkpoint: Checkpoint, backend: TorchBackend, frames: int) -> RowStream:
    """A greedy stream of rows that the checkpoint makes: wide-margin weights keep their margins for such only."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), backend.device)
    request = Request("Some words.", speaker=checkpoint.config.default_speaker, layout="streaming")
    ids = torch.randint(_TEXT_IDS, (frames,), generator=torch.Generator().manual_seed(0))
    return RowStream(builder.build(request).embeds, builder.text_rows(ids.tolist()))


@torch.inference_mode()
def forced(backend: TorchBackend, state: TorchStream, row: Tensor | None, codes: Tensor) -> Observed:
    """The oracle's frame with `codes` (16,) for its choices: as `TorchBackend.step`, with nothing drawn."""
    layers: list[Tensor] = []  # what each of them returns, (R, H)
    talker, compute = backend.talker, backend.talker.layer

    def watched(*arguments) -> Tensor:
        layers.append(compute(*arguments))
        return layers[-1]

    if row is not None:
        talker.layer = watched
        try:
            backend._advance([state], [row])
        finally:
            del talker.layer
    hidden = torch.stack([rows[-1] for rows in layers]).float() if layers else None
    logits, ids = [backend.code0_logits(state)], codes.to(backend.device)

    def draw(book: int, given: Tensor) -> Tensor:
        logits.append(given[0])
        return ids[book : book + 1]

    state.codes = backend.predicted(state.hidden[0], ids[:1], draw)[0]
    state.seen[ids[0]] = True
    state.frames += 1
    return Observed(codes, logits, hidden)


def vocabularies(config: ModelConfig) -> list[int]:
    """Ids of each of the sixteen heads."""
    return [config.talker.vocab_size] + [config.predictor.vocab_size] * (NUM_CODEBOOKS - 1)


def replayed(stream: RowStream, frames: Iterable[Observed], bf16: TorchBackend, fp32: TorchBackend) -> Iterator[Sides]:
    """Frame by frame what the model under test did, and both oracles that are made to take its codes."""
    oracles = [(backend, backend.start(stream, stream.sampling, 0, len(stream.text))) for backend in (bf16, fp32)]
    said: list[int] = []
    for index, ours in enumerate(frames):
        row = stream.row(index - 1) if index else None
        near, exact = (forced(backend, state, row, ours.codes) for backend, state in oracles)
        yield ours, near, exact, torch.tensor(said, dtype=torch.int64, device=fp32.device)
        said.append(int(ours.codes[0]))


class ErrorRatio:
    """Relative rms errors to fp32, pooled by name: sqrt(sum (found - fp32)^2 / sum fp32^2) of ours and of bf16."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = defaultdict(float)

    def add(self, ours: Tensor, bf16: Tensor, fp32: Tensor, name: str) -> None:
        """Adds one tensor of all three under a name."""
        parts = torch.stack([part.double().pow(2).sum() for part in (ours - fp32, bf16 - fp32, fp32)])
        self._sums[name] = self._sums[name] + parts

    def add_frame(self, ours: Observed, bf16: Observed, fp32: Observed) -> None:
        """Adds what a frame did on all three sides: its logits, and its hidden states where it has some."""
        if fp32.hidden is not None:
            self.add(ours.hidden, bf16.hidden, fp32.hidden, "hidden")
        for book, logits in enumerate(zip(ours.logits, bf16.logits, fp32.logits, strict=True)):
            self.add(*logits, "logits of codes 1-15" if book else "logits of code 0")

    def found(self) -> dict[str, dict[str, float]]:
        """Name -> kernel (ours), bf16, and the ratio of the two errors."""
        found = {}
        for name, sums in self._sums.items():
            ours, bf16, size = sums.tolist()
            kernel, near = math.sqrt(ours / size), math.sqrt(bf16 / size)
            found[name] = {"kernel": kernel, "bf16": near, "ratio": kernel / near if near else float(kernel > 0)}
        return found


def scores(logits: Sequence[Tensor], history: Tensor, config: ModelConfig) -> list[Tensor]:
    """What sixteen greedy choices are made from; `history` (N,) is code 0 of the frames before."""
    return [restrict(logits[0], history, GREEDY.repetition_penalty, config.codec_ids.eos), *logits[1:]]


def first_difference(sides: Sides, config: ModelConfig) -> dict[str, Any] | None:
    """The first codebook of a greedy frame in which the code is not fp32's choice, and why; None where there is none.
    explained: fp32's own gap between the two ids is within twice the bf16 oracle's largest logit error in that head and
    frame."""
    ours, *oracles, history = sides
    made_from = [scores(side.logits, history, config) for side in oracles]
    for group, (near, truth) in enumerate(zip(*made_from, strict=True)):
        best, chosen = int(truth.argmax()), int(ours.codes[group])
        if best == chosen:
            continue
        kept = truth.isfinite()
        gap, bf16_error = float(truth[best] - truth[chosen]), float((near - truth)[kept].abs().max())
        explained = gap <= 2 * bf16_error
        return {"codebook": group, "fp32_gap": gap, "bf16_largest_error": bf16_error, "explained": explained}
    return None
