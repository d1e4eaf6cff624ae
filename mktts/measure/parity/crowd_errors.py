"""What crowds of streams on many lanes are compared by: see `parity.batch`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.crowd import Crowd, CrowdStream, MadeFrame
from mktts.measure.parity.forced import ForcedErrors, first_difference
from mktts.measure.parity.lanes_probe import LanesProbe
from mktts.measure.parity.probe import Observed, forced, random_rows
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

GREEDY = Sampling().greedy()
_PREFIX_ROWS = 70  # one whole page and a part of the next
_NEIGHBOUR_ROWS = 40  # of a prompt that is not compared, at most
_TEXT_IDS = 256  # random text tokens are below: every tokenizer has them


@dataclass(frozen=True)
class BatchScope:
    """lanes: of the ticks. watched: streams of each crowd that are compared. frames: of each of them. exact: frames of
    the wide-margin variant, 0 for none. contexts: prompt rows of those compared."""

    lanes: tuple[int, ...] = (8, 64, 256)
    watched: int = 8
    frames: int = 6
    exact: int = 24
    contexts: tuple[int, ...] = (16, 200, 700, 1_500, 2_000)


def crowd_streams(fp32: TorchBackend, size: int, scope: BatchScope) -> list[CrowdStream]:
    """`size` streams of which the last `scope.watched` are to be compared, every other greedy. Every fourth has a
    prefix in common with its like."""
    prefix = random_rows(fp32, _PREFIX_ROWS, size)
    watched = min(scope.watched, size)
    streams = []
    for index in range(size):
        seed = 1_000 * size + index
        place = index - (size - watched)  # among those compared
        rows = 2 + seed % _NEIGHBOUR_ROWS if place < 0 else scope.contexts[place % len(scope.contexts)] + place
        prompt, kept = random_rows(fp32, rows, seed), index % 4 == 3
        if kept and place < 0:
            prompt = torch.cat((prefix, prompt))
        kept = kept and len(prompt) > _PREFIX_ROWS
        if kept:
            prompt[:_PREFIX_ROWS] = prefix
        text = random_rows(fp32, scope.frames, 500_000 + seed)
        sampling = Sampling() if index % 2 else GREEDY
        key = ("crowd", size) if kept else None
        streams.append(CrowdStream(prompt, text, sampling, seed, key, _PREFIX_ROWS if kept else 0))
    return streams


@torch.inference_mode()
def forced_crowds(
    probe: LanesProbe,
    bf16: TorchBackend,
    fp32: TorchBackend,
    crowds: dict[int, list[CrowdStream]],
    scope: BatchScope,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """The comparisons `forced` and `free` of `parity.batch`. crowds: by number of lanes."""
    sums, budget = ForcedErrors(fp32.config), budget or Budget()
    frames: dict[str, int] = {}
    free: dict[str, Any] = {"streams": 0, "frames": 0, "equal": 0, "differences": []}
    cut = kept = 0
    for index, (size, streams) in enumerate(crowds.items()):
        within = budget.share(1 / (len(crowds) - index))
        watched = range(len(streams) - min(scope.watched, len(streams)), len(streams))
        seen: dict[int, list[Observed]] = {stream: [] for stream in watched}

        def watch(made: list[MadeFrame], seen: dict[int, list[Observed]] = seen) -> None:
            for lane, stream, frame, codes in made:
                if stream in seen:
                    seen[stream].append(probe.observed(lane, codes, frame == 0))

        crowd = Crowd(probe.lanes, streams, size, seed=size)
        crowd.play(watch)
        cut, kept = cut + crowd.cut, kept + crowd.kept
        frames[str(size)] = 0
        for place, (number, ours) in enumerate(seen.items()):
            if frames[str(size)] and within.over:
                break
            labels = [f"at {scope.contexts[place % len(scope.contexts)]}", f"of {size} lanes"]
            stream, difference = streams[number], None
            frames[str(size)] += len(ours)
            free["streams"] += (greedy := stream.sampling == GREEDY)
            for frame, (observed, near, truth, history) in enumerate(_forced(stream, ours, bf16, fp32)):
                sums.add(observed, near, truth, history, stream.sampling, labels)
                if greedy and difference is None:
                    free["frames"] += 1
                    if difference := first_difference(observed, near, truth, history, fp32.config):
                        free["differences"].append({"lanes": size, "stream": number, "frame": frame, **difference})
                    free["equal"] += difference is None
    free["passed"] = all(difference["explained"] for difference in free["differences"])
    asked = scope.frames * scope.watched
    return {
        "forced": {"frames": frames, "asked": asked, "prompts_cut": cut, "prefixes_kept": kept, **sums.found()},
        "free": free,
    }


def _forced(
    stream: CrowdStream, ours: list[Observed], bf16: TorchBackend, fp32: TorchBackend
) -> Iterator[tuple[Observed, Observed, Observed, Tensor]]:
    """Frame by frame: the model under test, both oracles that take its codes, code 0 of the frames before."""
    oracles = [(b, b.start(PromptRows(stream.prompt), stream.sampling, 0, len(stream.text))) for b in (bf16, fp32)]
    for frame, observed in enumerate(ours):
        row = stream.text[frame] if frame else None
        truth_state = oracles[1][1]
        history = truth_state.history[: truth_state.frames].clone()
        near, truth = (forced(backend, state, row, observed.codes) for backend, state in oracles)
        yield observed, near, truth, history


@torch.inference_mode()
def exact_streams(checkpoint: Checkpoint, fp32: TorchBackend, scope: BatchScope) -> list[CrowdStream]:
    """Streams whose rows the checkpoint itself makes: only for such do wide-margin weights keep their margins."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), fp32.device)
    streams = []
    for index in range(scope.watched):
        text, speaker = "Some words." + " And more." * (index // 2), checkpoint.config.default_speaker
        layout = "whole" if index % 2 else "streaming"
        prompt = builder.build(Request(text, speaker=speaker, layout=layout))
        ids = torch.randint(_TEXT_IDS, (scope.exact,), generator=torch.Generator().manual_seed(index))
        streams.append(CrowdStream(prompt.embeds, builder.text_rows(ids.tolist()), GREEDY, index))
    return streams


@torch.inference_mode()
def exact_codes(fp32: TorchBackend, streams: Sequence[CrowdStream], budget: Budget | None = None) -> list[Tensor]:
    """fp32's own codes (T, 16) of the streams; fewer frames, and fewer streams than asked, where the budget is over."""
    budget, truths = budget or Budget(), []
    for stream in streams:
        if truths and budget.over:
            break
        state, frames = fp32.start(PromptRows(stream.prompt), GREEDY, 0, len(stream.text)), []
        while len(frames) < len(stream.text) and not state.ended and not (frames and budget.over):
            codes = fp32.step(state, stream.text[len(frames)] if frames else None).codes
            frames += [] if codes is None else [codes]
        truths.append(torch.stack(frames) if frames else torch.zeros(0, NUM_CODEBOOKS, dtype=torch.int64))
    return truths


@torch.inference_mode()
def exact_crowds(
    probe: LanesProbe, sizes: Sequence[int], streams: Sequence[CrowdStream], truths: Sequence[Tensor]
) -> dict[str, Any]:
    """The comparison `exact`: all lanes of all crowds play these streams, each as often as there is room for it."""
    found: dict[str, Any] = {"streams": 0, "frames": 0, "equal": 0, "asked": len(streams[0].text)}
    for size in sizes:
        played = [replace(streams[i % len(truths)], seed=i) for i in range(size)]
        for index, codes in enumerate(Crowd(probe.lanes, played, size, seed=size).play()):
            truth = truths[index % len(truths)]
            ours = codes[: len(truth)]
            wrong = (ours != truth[: len(ours)]).nonzero()
            frames = int(wrong[0, 0]) if len(wrong) else len(ours)
            found["streams"] += 1
            found["frames"] += len(truth)
            found["equal"] += frames
            if frames < len(truth) and "first_difference" not in found:
                codebook = int(wrong[0, 1]) if len(wrong) else 0  # 0: it ended early
                found["first_difference"] = {"lanes": size, "stream": index, "frame": frames, "codebook": codebook}
    return {**found, "passed": 0 < found["frames"] == found["equal"]}
