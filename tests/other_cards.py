"""The kernel as other cards would run it, on the card that is here: what test_build.py runs.

For each of CASES the kernel is compiled to PTX of that card's architecture, which the driver translates for this one,
with its blocks and no more shared memory than it has. `equal`: greedy codes on wide-margin random weights are an fp32
run's, frame for frame. `error_ratio`: the relative rms error to fp32 of logits and of the talker's residual stream,
over bf16 PyTorch's own, in the first frames. `frame_ms`: median of a step, hand-over included, on this card."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.checkpoint.random.weights import random_tensors, widen_margins
from mktts.checkpoint.tensors import expected_tensors
from mktts.common import write_json
from mktts.kernel.build import CSRC, TARGETS, Card
from mktts.measure.environment import head
from mktts.measure.parity.kernel import ErrorRatio, KernelUnderTest, Observed, Oracles, RowStream, replayed
from mktts.model.backend import Backend
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import ModelConfig

FRAMES = 60
MODELS = ("0.6b", "small", "tiny-projected", "1.7b")
# PTX of 12.x runs on no Hopper: these cards' grids and memory in compute_90's, which takes the same branches of csrc.
_BLACKWELL_BYTES = TARGETS["sm_120"]
CASES = {
    "RTX 3050 (laptop)": Card.like("compute_86", 16),
    "RTX 4060": Card.like("compute_89", 24),
    "RTX 3070": Card.like("compute_86", 46),
    "L4": Card.like("compute_89", 58),
    "RTX A6000": Card.like("compute_86", 84),
    "A100": Card.like("compute_80", 108),
    "RTX 4090": Card.like("compute_89", 128),
    "Jetson Orin": Card.like("compute_87", 16),
    "H100 PCIe": Card.like("sm_90a", 114),
    "DGX Spark": Card("compute_90", 48, _BLACKWELL_BYTES),
    "RTX 5090": Card("compute_90", 170, _BLACKWELL_BYTES),
}
# The largest model on those with the least memory a block.
CARDS_OF_1P7B = ("RTX 4090", "L4", "RTX 5090")
_TEXT = "Some words, spoken in the streaming layout, and a few more."
FORCED_FRAMES = 4  # whose errors are compared


@dataclass(frozen=True)
class Model:
    """A model of wide-margin random weights, a prompt in bf16, and the codes (frames, 16) that an fp32 run makes.
    oracles: PyTorch in bf16 and in fp32."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    prompt: Prompt
    codes: Tensor
    oracles: Oracles

    @classmethod
    def make(cls, name: str, device: str = "cuda", frames: int = FRAMES) -> Model:
        """`name` of MODELS: the shapes of the voice in the box, or random:NAME."""
        checkpoint = open_checkpoint(name if name == SMALL else f"random:{name}:margin")
        config, tensors = checkpoint.config, checkpoint.tensors()
        if name == SMALL:
            tensors = random_tensors(expected_tensors(config), 0, torch.bfloat16)
            widen_margins(tensors, config)
        builder = PromptBuilder(config, tensors, checkpoint.tokenizer(), device, torch.bfloat16)
        prompt = builder.build(Request(_TEXT, speaker=config.default_speaker, layout="streaming"))
        bf16, fp32 = (TorchBackend(config, tensors, device, dtype) for dtype in (torch.bfloat16, torch.float32))
        return cls(config, tensors, prompt, run(fp32, prompt, frames)[0], (bf16, fp32))

    @property
    def first(self) -> RowStream:
        """The first frames' rows."""
        rows = [self.prompt.row(max(0, index - 1)) for index in range(FORCED_FRAMES)]
        return RowStream(self.prompt.embeds, torch.stack(rows))


def run(backend: Backend, prompt: Prompt, frames: int = FRAMES) -> tuple[Tensor, list[float]]:
    """Greedy codes (T, 16) of one stream, T <= `frames` where speech ends, and what each step took in ms."""
    state = backend.start(prompt, Sampling().greedy(), 0, frames)
    codes, steps_ms = [], []
    for index in range(frames):
        begun_s = time.perf_counter()
        frame = backend.step(state, prompt.row(index - 1) if index else None)
        steps_ms.append(1e3 * (time.perf_counter() - begun_s))
        if frame.codes is None:
            break
        codes.append(frame.codes)
    return torch.stack(codes), steps_ms


def errors_of(model: Model, seen: Iterable[Observed]) -> tuple[float, float]:
    """Relative rms error to fp32 of logits and residual streams in the first frames, pooled head by head and layer by
    layer, then averaged; and that of bf16 PyTorch, which takes the same codes."""
    errors = ErrorRatio()
    for *sides, _ in replayed(model.first, seen, *model.oracles):
        for book, logits in enumerate(zip(*(side.logits for side in sides), strict=True)):
            errors.add(*logits, f"head {book}")
        if sides[0].hidden is not None:
            for layer, hidden in enumerate(zip(*(side.hidden for side in sides), strict=True)):
                errors.add(*hidden, f"layer {layer}")
    found = errors.found().values()
    return statistics.fmean(error["kernel"] for error in found), statistics.fmean(error["bf16"] for error in found)


def error_ratio(model: Model, seen: Iterable[Observed]) -> float:
    """The first of `errors_of` over the second."""
    ours, rounded = errors_of(model, seen)
    return ours / rounded


def fingerprint(folder: Path = CSRC) -> str:
    """Twelve hex digits of what csrc/ has the compiler do: its sources without comments and blank lines."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".cuh"))
    lines = (re.sub(r"\s*//.*", "", line) for path in files for line in path.read_text(encoding="utf-8").splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:12]


def case_of(model: Model, card: Card) -> dict[str, Any]:
    """One row of the document. Raises BackendUnavailable as the kernel does."""
    from mktts.kernel.backend import MegakernelBackend

    backend = MegakernelBackend(model.config, model.tensors, card=card)
    codes, steps_ms = run(backend, model.prompt)
    same = min(len(codes), len(model.codes))
    differ = (codes[:same] != model.codes[:same]).any(1).nonzero()
    return {
        "arch": card.arch,
        "multiprocessors": card.multiprocessors,
        "blocks": backend.shape.blocks,
        "shared_bytes": backend._launcher.shared_bytes,
        "equal": torch.equal(codes, model.codes),
        "frames": int(differ[0]) if len(differ) else same,
        "error_ratio": error_ratio(model, KernelUnderTest(backend).frames(model.first)),
        "frame_ms": statistics.median(steps_ms[10:] or steps_ms),
    }


def record_case(path: Path, name: str, card_name: str, row: dict[str, Any]) -> None:
    """Puts a row of `case_of` into the document at `path`, with its revision and the kernel's fingerprint. Rows of the
    same kernel that are not made again stay."""
    about = {**head("cuda"), "frames": FRAMES}
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []
    kernel = fingerprint()
    kept = [old for old in rows if old.get("kernel") == kernel and (old["model"], old["card"]) != (name, card_name)]
    made = {"model": name, "card": card_name, "revision": about["revision"], "kernel": kernel, **row}
    write_json(path, {**about, "cases": [*kept, made]}, sort_keys=False)
