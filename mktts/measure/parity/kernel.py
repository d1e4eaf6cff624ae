"""Compares the megakernel, and PyTorch in bf16, with an fp32 run of the same weights.

* forced: logits of the sixteen heads and the talker's residual stream at contexts from 16 to 2 000 rows. The model
  under test chooses the codes, and the two oracles are forced to use them, so that every logit of a frame has the same
  history on all sides. `ratio` is its relative rms error to fp32 divided by that of the bf16 oracle, and must be at
  most LIMIT. Prompt rows beyond the capacity of the megakernel's prefill go through the frame kernel.
* divergence: where greedy streams first differ from fp32's choices on ordinary weights; if one of the differences is
  not explained by rounding, it is the one reported. See `first_difference`.
* exact: greedy codes on wide-margin random weights must equal fp32's frame for frame.

`kernel="torch"` tests PyTorch in bf16 instead of the megakernel, which also runs without a GPU. until_s: the end of the
available time, of time.perf_counter. After it a comparison stops early, but it compares at least its first frames."""

import gc
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.kernel.backend import MegakernelBackend
from mktts.measure.parity.upstream import first_mismatch, our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling, restrict
from mktts.spec import NUM_CODEBOOKS, ModelConfig

LIMIT = 1.1  # largest ratio of the error to that of bf16 PyTorch
GREEDY = Sampling().greedy()
MARGIN = ":margin"  # suffix of a random checkpoint's name for its wide-margin variant
_TEXT_IDS = 256  # random text tokens are below this, so that every tokenizer has them
_ROWS_A_LAUNCH = 32  # makes 4 480 exchanges with 28 layers; exchange tags wrap at 65 536
_EACH = 4  # streams per context
_WRONG = {
    "forced": f"its error is more than {LIMIT} times bf16 PyTorch's",
    "divergence": "a greedy choice first differs from fp32's where rounding does not explain it",
    "exact": "a greedy code of the wide-margin variant is not fp32's",
}
Oracles = tuple[TorchBackend, TorchBackend]  # in bf16 and in fp32


@dataclass(frozen=True)
class Scope:
    """How much of one checkpoint is compared.

    contexts: numbers of prompt rows before the compared frames. frames: per context. exact: frames of the wide-margin
    variant; 0 leaves it out."""

    contexts: tuple[int, ...] = (16, 200, 700, 1_500, 2_000)
    frames: int = 40
    exact: int = 500


def share(until_s: float, part: float) -> float:
    """The time at which `part` (0 to 1) of the time until `until_s` has passed."""
    now_s = time.perf_counter()
    return now_s + part * max(0.0, until_s - now_s)


@dataclass(frozen=True)
class Observed:
    """One frame. codes: (16,) int64 on the host. logits: 16 of (vocabulary,) fp32, the raw outputs of the heads.
    hidden: (layers, H) fp32, the residual stream after every talker layer; None for a stream's first frame, whose
    talker state comes from the prompt."""

    codes: Tensor
    logits: list[Tensor]
    hidden: Tensor | None


Sides = tuple[Observed, Observed, Observed, Tensor]  # under test, bf16, fp32, code 0 of the frames before


@dataclass(frozen=True, eq=False)
class RowStream:
    """A prompt made of rows instead of text, for any backend. embeds: (L, H), the prompt. text: (F, H), the text rows
    of at most F frames; the first row is not used, as the prompt makes the first frame. key: names the first `prefix`
    rows of the prompt, which all streams with this key share; lanes cache them."""

    embeds: Tensor
    text: Tensor
    sampling: Sampling = GREEDY
    seed: int = 0
    key: str | None = None
    prefix: int = 0
    prefix_rows: ClassVar[int] = 0  # a backend of one stream caches no prefix
    prefix_key: ClassVar[None] = None

    @property
    def positions(self) -> int:
        """Number of positions of keys and values that the stream needs."""
        return len(self.embeds) + len(self.text)

    def row(self, t: int) -> Tensor:
        """The text row of frame t + 1."""
        return self.text[t + 1]


def random_rows(backend: TorchBackend, rows: int, seed: int) -> Tensor:
    """Random talker inputs (rows, H) in bf16: normal, with the rms of the checkpoint's embeddings."""
    table = backend.code_tables[0]
    size = table[:256].float().pow(2).mean().sqrt().cpu()
    noise = torch.randn(rows, table.shape[1], generator=torch.Generator().manual_seed(seed))
    return (size * noise).to(torch.bfloat16).to(backend.device)


def random_streams(backend: TorchBackend, rows: int, count: int, frames: int) -> list[RowStream]:
    """`count` streams of `frames` frames, every other one greedy, with prompts of `rows`, `rows` + 1, ... rows."""
    streams = []
    for index in range(count):
        prompt, text = (random_rows(backend, many, 1_000 * rows + index) for many in (rows + index, frames))
        streams.append(RowStream(prompt, text, Sampling() if index % 2 else GREEDY, index))
    return streams


@torch.inference_mode()
def spoken_stream(checkpoint: Checkpoint, backend: TorchBackend, frames: int) -> RowStream:
    """A greedy stream of the checkpoint's own rows: wide-margin weights keep their margins only with these."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), backend.device)
    request = Request("Some words.", speaker=checkpoint.config.default_speaker, layout="streaming")
    ids = torch.randint(_TEXT_IDS, (frames,), generator=torch.Generator().manual_seed(0))
    return RowStream(builder.build(request).embeds, builder.text_rows(ids.tolist()))


@torch.inference_mode()
def forced(backend: TorchBackend, state: TorchStream, row: Tensor | None, codes: Tensor) -> Observed:
    """Runs one frame of the oracle like `TorchBackend.step`, but with `codes` (16,) instead of drawn ones."""
    layers: list[Tensor] = []  # output of each layer, (R, H)
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

    backend.later_codes([state], ids[:1], None, draw)
    state.seen[ids[0]] = True
    return Observed(codes, logits, hidden)


def vocabularies(config: ModelConfig) -> list[int]:
    """The vocabulary size of each of the sixteen heads."""
    return [config.talker.vocab_size] + [config.predictor.vocab_size] * (NUM_CODEBOOKS - 1)


def replayed(stream: RowStream, frames: Iterable[Observed], bf16: TorchBackend, fp32: TorchBackend) -> Iterator[Sides]:
    """Yields each frame of the model under test, with the frames of both oracles that are forced to use its codes."""
    oracles = [(backend, backend.start(stream, stream.sampling, 0, len(stream.text))) for backend in (bf16, fp32)]
    said: list[int] = []
    for index, ours in enumerate(frames):
        row = stream.row(index - 1) if index else None
        near, exact = (forced(backend, state, row, ours.codes) for backend, state in oracles)
        yield ours, near, exact, torch.tensor(said, dtype=torch.int64, device=fp32.device)
        said.append(int(ours.codes[0]))


class ErrorRatio:
    """Pools relative rms errors to fp32 by name, of ours and of bf16: sqrt(sum (found - fp32)^2 / sum fp32^2)."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = defaultdict(float)

    def add(self, ours: Tensor, bf16: Tensor, fp32: Tensor, name: str) -> None:
        """Adds a tensor of all three sides under a name."""
        parts = torch.stack([part.double().pow(2).sum() for part in (ours - fp32, bf16 - fp32, fp32)])
        self._sums[name] = self._sums[name] + parts

    def add_frame(self, ours: Observed, bf16: Observed, fp32: Observed) -> None:
        """Adds the logits of a frame of all three sides, and its hidden states if it has any."""
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
    """The scores whose maxima are the sixteen greedy codes. history: (N,), code 0 of the earlier frames."""
    return [restrict(logits[0], history, GREEDY.repetition_penalty, config.codec_ids.eos), *logits[1:]]


def first_difference(sides: Sides, config: ModelConfig) -> dict[str, Any] | None:
    """The first codebook of a greedy frame whose code is not fp32's choice, or None.
    explained: whether rounding can be the cause: fp32's gap between the two ids is at most twice the bf16 oracle's
    largest logit error in that head and frame."""
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


# ---- the comparisons


class KernelUnderTest:
    """The megakernel or PyTorch in bf16, observed frame by frame while it chooses its own codes."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._debug = backend.new_debug() if hasattr(backend, "new_debug") else None  # None for PyTorch

    @torch.inference_mode()
    def start(self, prompt: Prompt | PromptRows | RowStream, sampling: Sampling, seed: int, max_frames: int) -> Any:
        """Starts a stream with a prompt of any length: rows beyond the prefill's capacity follow by `put_rows`."""
        embeds = prompt.embeds
        at_once = len(embeds) if self._debug is None else self.backend._prefill.capacity
        rest = embeds[at_once:]
        state = self.backend.start(PromptRows(embeds[:at_once]), sampling, seed, len(rest) + max_frames)
        if len(rest):
            for rows in rest.to(self.backend.device, self.backend.dtype).contiguous().split(_ROWS_A_LAUNCH):
                self.backend.put_rows(state, rows, state.prompt_rows).synchronize()
                state.prompt_rows += len(rows)
        state.max_frames = max_frames
        return state

    def step(self, state: Any, row: Tensor | None) -> Observed | None:
        """Runs the next frame; None at end of speech."""
        if self._debug is None:
            codes = self.backend.step(state.copy(), row).codes
            return None if codes is None else forced(self.backend, state, row, codes)
        frame = self.backend.step(state, row, self._debug)
        if frame.codes is None:
            return None
        sizes = vocabularies(self.backend.config)
        logits = [head[:size].float() for head, size in zip(self._debug.logits, sizes, strict=True)]
        return Observed(frame.codes, logits, None if row is None else self._debug.hidden.float())

    def frames(self, stream: RowStream) -> Iterator[Observed]:
        state = self.start(stream, stream.sampling, stream.seed, len(stream.text))
        for index in range(len(stream.text)):
            frame = self.step(state, stream.row(index - 1) if index else None)
            if frame is None:
                return
            yield frame


def oracles_of(checkpoint: Checkpoint, device: str) -> Oracles:
    config, tensors = checkpoint.config, checkpoint.tensors()
    return TorchBackend(config, tensors, device, torch.bfloat16), TorchBackend(config, tensors, device, torch.float32)


@torch.inference_mode()
def forced_frames(
    loads: Mapping[int, Iterable[tuple[RowStream, Iterable[Observed]]]], oracles: Oracles, until_s: float = math.inf
) -> dict[str, Any]:
    """Runs the comparisons `forced` and `divergence`. loads: streams and their observed frames, by context or by number
    of lanes. After `until_s` each load still compares two frames, as a stream's first has no talker step."""
    errors, frames, differences, compared = ErrorRatio(), {}, [], 0
    for index, (size, streams) in enumerate(loads.items()):
        within_s, made, apart = share(until_s, 1 / (len(loads) - index)), 0, set()
        played = (
            (number, stream, frame, sides)
            for number, (stream, seen) in enumerate(streams)
            for frame, sides in enumerate(replayed(stream, seen, *oracles))
        )
        for number, stream, frame, sides in played:
            errors.add_frame(*sides[:3])
            made += 1
            if stream.sampling == GREEDY and number not in apart:
                compared += 1
                if difference := first_difference(sides, oracles[1].config):
                    apart.add(number)
                    differences.append({"load": size, "stream": number, "frame": frame, **difference})
            if made >= 2 and time.perf_counter() > within_s:
                break
        frames[str(size)] = made
    pooled = errors.found()
    passed = bool(pooled) and all(value["ratio"] <= LIMIT for value in pooled.values())
    explained = all(difference["explained"] for difference in differences)
    worst = min(differences, key=lambda difference: difference["explained"], default={})
    return {
        "forced": {"frames": frames, "pooled": pooled, "passed": passed},
        "divergence": {"frames": compared, "diverged": bool(differences), **worst, "passed": explained},
    }


def exact_codes(tested: Any, fp32: TorchBackend, stream: RowStream, until_s: float = math.inf) -> dict[str, Any]:
    """Runs the comparison `exact`. tested: a backend. The result's `frames` counts equal frames from the beginning."""
    asked = len(stream.text)
    truth = our_codes(fp32, stream, GREEDY, 0, asked, until_s)
    ours = our_codes(tested, stream, GREEDY, 0, len(truth) if time.perf_counter() > until_s else asked)
    mismatch = first_mismatch(ours, truth)
    found = {"frames": mismatch[0] if mismatch else len(truth), "asked": asked, "equal": mismatch is None}
    first = {"first_difference": {"frame": mismatch[0], "codebook": mismatch[1]}} if mismatch else {}
    return {**found, **first, "passed": mismatch is None and len(truth) > 0}


def parity_of(
    source: str, scope: Scope, kernel: str, device: str, *, revision: str | None = None, until_s: float = math.inf
) -> dict[str, Any]:
    """Runs all comparisons of one checkpoint; `exact` uses the wide-margin variant, which only random ones have.

    kernel: "megakernel" or "torch". Every comparison reports its number of frames; `passed`: whether all passed."""
    margin = source.startswith("random:") and scope.exact > 0

    def backend_of(checkpoint: Checkpoint, bf16: TorchBackend) -> Any:
        if kernel == "torch":
            return bf16
        return MegakernelBackend(checkpoint.config, checkpoint.tensors(), device)

    checkpoint = open_checkpoint(source, revision)
    oracles = oracles_of(checkpoint, device)
    tested, frames = KernelUnderTest(backend_of(checkpoint, oracles[0])), max(2, -(-scope.frames // _EACH))
    loads = {
        rows: [(one, tested.frames(one)) for one in random_streams(oracles[1], rows, _EACH, frames)]
        for rows in scope.contexts
    }
    found = forced_frames(loads, oracles, share(until_s, 0.6 if margin else 0.8))
    del tested, oracles, loads
    release()
    if margin:
        checkpoint = open_checkpoint(source + MARGIN, revision)
        bf16, fp32 = oracles_of(checkpoint, device)
        stream = spoken_stream(checkpoint, fp32, scope.exact)
        found["exact"] = exact_codes(backend_of(checkpoint, bf16), fp32, stream, share(until_s, 0.8))
        del bf16, fp32
        release()
    return {**found, "passed": all(value["passed"] for value in found.values())}


def release() -> None:
    """Frees the memory of a comparison before the next one; without CUDA there is no cache to empty."""
    gc.collect()
    torch.cuda.empty_cache()


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """Summarises the result of `parity_of` as a section; the comparisons are recorded next to the sections."""
    forced = found["forced"]
    section = {"frames": sum(forced["frames"].values())}
    section["ratio"] = {name: value["ratio"] for name, value in forced["pooled"].items()}
    reasons = [why for name, why in _WRONG.items() if name in found and not found[name]["passed"]]
    return section | ({"reason": reasons[0]} if reasons else {})
