"""`python -m mktts cards`: the kernel as other cards would run it, on the card that is here.

For each of CASES the kernel is compiled to PTX of that card's architecture, which the driver translates for this one,
with the blocks that the card's multiprocessors give and no more shared memory than it has. `equal`: greedy codes on
wide-margin random weights are an fp32 run's, frame for frame. `error_ratio`: the relative rms error to fp32 of logits
and of the talker's residual stream, over bf16 PyTorch's own, in the first frames: of rows in the wrong place margins
alone would say little. `frame_ms` is the median time of a step, hand-over
included, on this card: it says what fewer blocks and older code cost, not how fast that card is. Each row has its
revision and the kernel's fingerprint. A case that takes longer than CASE_S ends the program with all stacks: its row
says so, and another run may take the rest (`--cards`). Rows of the same kernel that a run does not make again stay.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.checkpoint.random.weights import random_tensors, widen_margins
from mktts.checkpoint.tensors import expected_tensors
from mktts.common import write_json
from mktts.errors import BackendUnavailable, MetricsError
from mktts.kernel.build import TARGETS, Card, build_for, card_of, fingerprint
from mktts.kernel.grid import choose_shape
from mktts.measure.environment import head
from mktts.measure.inspection import config_at
from mktts.measure.machine import kernel_missing
from mktts.measure.parity.probe import Errors, Observed, forced, probe_of
from mktts.model.backend import Backend, PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import ModelConfig

FRAMES = 60
OUTPUT = Path("mktts-cards.json")
MODELS = ("0.6b", "small", "tiny-projected", "1.7b")
CASE_S = 180.0
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
OWN = "this card"
# The largest model on those with the least memory a block, beside the card that is here.
CARDS_OF_1P7B = ("RTX 4090", "L4", "RTX 5090")
EXAMPLES = """examples:
  python -m mktts cards
  python -m mktts cards --models tiny-projected --output cards.json
  python -m mktts cards --models 1.7b --cards "RTX 4090,L4"
  python -m mktts cards --compile-only

Exit status: 0 where all codes were equal, 1 where some were not or nothing could run."""
_TEXT = "Some words, spoken in the streaming layout, and a few more."
_WARM_FRAMES = 10  # before steps are timed
FORCED_FRAMES = 4  # whose errors are compared


@dataclass(frozen=True)
class Model:
    """A model of wide-margin random weights, a prompt in bf16, and the codes (frames, 16) that an fp32 run makes.

    exact: that run's first frames. bf16_error: of bf16 PyTorch in them, relative.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    prompt: Prompt
    codes: Tensor
    exact: list[Observed]
    bf16_error: float

    @classmethod
    def make(cls, name: str, device: str = "cuda", frames: int = FRAMES) -> Model:
        """`name` of MODELS: the shapes of the voice in the box, or random:NAME."""
        checkpoint = open_checkpoint(name if name == SMALL else f"random:{name}:margin")
        config, tensors = checkpoint.config, checkpoint.tensors()
        if name == SMALL:
            tensors = random_tensors(expected_tensors(config), 0, torch.bfloat16)
            widen_margins(tensors, config, 0)
        builder = PromptBuilder(config, tensors, checkpoint.tokenizer(), device, torch.bfloat16)
        prompt = builder.build(Request(_TEXT, speaker=config.default_speaker, layout="streaming"))
        fp32, bf16 = (TorchBackend(config, tensors, device, dtype) for dtype in (torch.float32, torch.bfloat16))
        codes = run(fp32, prompt, frames).codes
        exact, rounded = (_forced(backend, prompt, codes[:FORCED_FRAMES]) for backend in (fp32, bf16))
        return cls(config, tensors, prompt, codes, exact, error_of(rounded, exact))


@dataclass(frozen=True)
class Run:
    """Greedy codes (frames, 16) of one stream, and what each step took."""

    codes: Tensor
    steps_ms: list[float]


def run(backend: Backend, prompt: Prompt, frames: int = FRAMES) -> Run:
    """Up to `frames` frames, fewer where speech ends."""
    state = backend.start(prompt, Sampling().greedy(), 0, frames)
    codes, steps_ms = [], []
    for index in range(frames):
        begun_s = time.perf_counter()
        frame = backend.step(state, prompt.row(index - 1) if index else None)
        steps_ms.append(1e3 * (time.perf_counter() - begun_s))
        if frame.codes is None:
            break
        codes.append(frame.codes)
    return Run(torch.stack(codes), steps_ms)


def error_of(found: list[Observed], exact: list[Observed]) -> float:
    """Relative rms error of logits and residual streams, pooled head by head and layer by layer, then averaged."""
    errors = Errors()
    for ours, theirs in zip(found, exact, strict=True):
        for book, (logits, reference) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
            errors.add(logits, reference, f"head {book}")
        if ours.hidden is not None and theirs.hidden is not None:
            for layer, (hidden, reference) in enumerate(zip(ours.hidden, theirs.hidden, strict=True)):
                errors.add(hidden, reference, f"layer {layer}")
    return statistics.fmean(errors.relative().values())


def _forced(backend: TorchBackend, prompt: Prompt, codes: Tensor) -> list[Observed]:
    state = backend.start(prompt, Sampling().greedy(), 0, len(codes))
    rows = [None, *(prompt.row(index) for index in range(len(codes) - 1))]
    return [forced(backend, state, row, chosen) for row, chosen in zip(rows, codes, strict=True)]


def _observed(backend: Backend, prompt: Prompt) -> list[Observed]:
    """Its own first frames."""
    probe = probe_of(backend)
    state = probe.start(PromptRows(prompt.embeds), Sampling().greedy(), 0, FORCED_FRAMES)
    seen = [probe.step(state, prompt.row(index - 1) if index else None) for index in range(FORCED_FRAMES)]
    return [frame for frame in seen if frame is not None]


def case_of(model: Model, card: Card) -> dict[str, Any]:
    """One row of the document. Raises BackendUnavailable as the kernel does."""
    from mktts.kernel.backend import MegakernelBackend

    backend = MegakernelBackend(model.config, model.tensors, card=card)
    made = run(backend, model.prompt)
    same = min(len(made.codes), len(model.codes))
    differ = (made.codes[:same] != model.codes[:same]).any(1).nonzero()
    return {
        "arch": card.arch,
        "multiprocessors": card.multiprocessors,
        "blocks": backend.shape.blocks,
        "shared_bytes": backend.shared_bytes,
        "equal": torch.equal(made.codes, model.codes),
        "frames": int(differ[0]) if len(differ) else same,
        "error_ratio": error_of(_observed(backend, model.prompt), model.exact) / model.bf16_error,
        "frame_ms": statistics.median(made.steps_ms[_WARM_FRAMES:] or made.steps_ms),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", metavar="NAME,...", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--cards",
        metavar="NAME,...",
        help=f"of {OWN}, {', '.join(CASES)} (default: all; at 1.7b {', '.join(CARDS_OF_1P7B)} and {OWN})",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="fill the cache of kernels; without a GPU, an H100 is this card. With one, also the driver's own cache",
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FILE", help="the document (default: %(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints a row a case, and writes the document."""
    why = kernel_missing()
    if why and not arguments.compile_only:
        raise BackendUnavailable(f"the kernel cannot run here: {why}")
    own = Card.like("sm_90a", 132) if why else card_of(torch.device("cuda"))
    names = _named("--models", arguments.models, MODELS)
    chosen = _named("--cards", arguments.cards, (OWN, *CASES)) if arguments.cards else None
    cases = [(name, card_name, card) for name in names for card_name, card in _cards(name, own, chosen).items()]
    if arguments.compile_only:
        return _compile(cases)
    about = {**head("cuda"), "frames": FRAMES}
    mark = {"revision": about["revision"], "kernel": fingerprint()}
    made = [case[:2] for case in cases]
    rows = [row for row in _rows(arguments.output, mark["kernel"]) if (row["model"], row["card"]) not in made]
    kept, model, of = len(rows), None, None
    for name, card_name, card in cases:
        faulthandler.dump_traceback_later(CASE_S, exit=True, file=sys.__stderr__)
        if of != name:
            model = None  # its memory is free before the next one is made
            model, of = Model.make(name), name
        rows.append({"model": name, "card": card_name, **mark, **_failed(card, f"no end within {CASE_S:.0f} s")})
        write_json(arguments.output, {**about, "cases": rows}, sort_keys=False)
        faulthandler.dump_traceback_later(CASE_S, exit=True, file=sys.__stderr__)
        rows[-1] = {"model": name, "card": card_name, **mark, **_tried(model, card)}
        print(_line(rows[-1]), flush=True)
        write_json(arguments.output, {**about, "cases": rows}, sort_keys=False)  # also where time runs out
        gc.collect()
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    return 0 if len(rows) > kept and all(row["equal"] for row in rows[kept:]) else 1


def _named(option: str, given: str, known: Sequence[str]) -> list[str]:
    """The names of a list with commas. Raises MetricsError for one that is not known."""
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        raise MetricsError(f"{option} takes {', '.join(known)}, got {', '.join(unknown)}")
    return names


def _config(name: str) -> ModelConfig:
    return open_checkpoint(name).config if name == SMALL else config_at(name)


def _cards(name: str, own: Card, chosen: Sequence[str] | None) -> dict[str, Card]:
    """Those to try a model on whose blocks find room on the card that is here."""
    if chosen is None:
        chosen = (OWN, *(CARDS_OF_1P7B if name == "1.7b" else CASES))
    cards = {card: own if card == OWN else CASES[card] for card in chosen}
    config = _config(name)
    return {
        card_name: card
        for card_name, card in cards.items()
        if choose_shape(config, card.multiprocessors).blocks <= own.multiprocessors
    }


def _rows(output: Path, kernel: str) -> list[dict[str, Any]]:
    """Of an earlier document, those that the same kernel gave."""
    rows = json.loads(output.read_text(encoding="utf-8"))["cases"] if output.exists() else []
    return [row for row in rows if row.get("kernel") == kernel]


def _compile(cases: list[tuple[str, str, Card]]) -> int:
    """Each kernel in a process of its own, as many at once as there are processors."""
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1), get_context("spawn")) as pool:
        for (name, card_name, card), took_s in zip(cases, pool.map(_compile_one, cases), strict=True):
            print(f"{name:15} {card_name:18} {card.arch:11} {took_s:5.1f} s", flush=True)
    return 0


def _compile_one(case: tuple[str, str, Card]) -> float:
    """Compiles a kernel, and has the driver translate it where there is one; the seconds that took."""
    from mktts.kernel.launch import Launcher

    name, _, card = case
    begun_s, defines = time.perf_counter(), choose_shape(_config(name), card.multiprocessors).defines
    if kernel_missing():
        build_for(defines, card)
    else:
        Launcher("frame.cu", "mktts_frames", defines, torch.device("cuda"), card)
    return time.perf_counter() - begun_s


def _tried(model: Model, card: Card) -> dict[str, Any]:
    """`case_of`, or what it raised: the other cards still count."""
    try:
        return case_of(model, card)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc(file=sys.stderr)
        return _failed(card, f"{type(error).__name__}: {error}")


def _failed(card: Card, why: str) -> dict[str, Any]:
    return {"arch": card.arch, "multiprocessors": card.multiprocessors, "equal": False, "error": why}


def _line(case: dict[str, Any]) -> str:
    named = "{model:15} {card:18} {arch:11} {multiprocessors:3} multiprocessors".format(**case)
    if "error" in case:
        return f"{named}  {case['error'][:120]}"
    found = "{blocks:3} blocks  {frames:2} frames equal  error {error_ratio:.2f} of bf16's".format(**case)
    return f"{named}  {found}  {case['frame_ms']:6.2f} ms"
