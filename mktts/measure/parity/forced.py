"""Errors to fp32 of frames whose codes the model under test chose, and bf16 PyTorch's beside them.

Shared by the comparisons of the megakernel and of the batched frame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mktts.measure.parity.probe import LIMIT, Errors, Observed, compare, scores
from mktts.model.sampling import Choice, Sampling, distribution
from mktts.spec import NUM_CODEBOOKS, ModelConfig

_POOLED = ("logits of code 0", "logits of codes 1-15", "hidden")


class ForcedErrors:
    """Sums over frames: `add` each, then `found`."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._errors = Errors(), Errors()
        self._distances: tuple[dict[str, list[Tensor]], ...] = (defaultdict(list), defaultdict(list))

    def add(
        self,
        ours: Observed,
        bf16: Observed,
        fp32: Observed,
        history: Tensor,
        sampling: Sampling,
        labels: Sequence[str],
    ) -> None:
        """One frame of the model under test and of both oracles. history (N,): code 0 of the frames before. labels:
        what its errors are also summed under, as "at 200"."""
        truth = self._distributions(fp32, history, sampling)
        for observed, sums, distance in zip((ours, bf16), self._errors, self._distances, strict=True):
            for group, (found, expected) in enumerate(zip(observed.logits, fp32.logits, strict=True)):
                part = _POOLED[min(group, 1)]
                sums.add(found, expected, part, f"head {group}", *(f"logits {label}" for label in labels))
            if fp32.hidden is not None:
                for layer, (found, expected) in enumerate(zip(observed.hidden, fp32.hidden, strict=True)):
                    names = (f"hidden {label}" for label in labels)
                    sums.add(found, expected, "hidden", f"layer {layer}", *names)
            drawn_from = self._distributions(observed, history, sampling)
            for group, (p, q) in enumerate(zip(drawn_from, truth, strict=True)):
                distance["code 0" if group == 0 else "codes 1-15"].append((p - q).abs().sum() / 2)

    def found(self) -> dict[str, Any]:
        """pooled, by_head, by_layer (each kernel, bf16, ratio: see `probe.compare`), by_label, total_variation, and
        whether no pooled ratio is above LIMIT. Nothing passes where no frame was added."""
        by_name = compare(*self._errors)
        pooled = {name: by_name[name] for name in _POOLED if name in by_name}

        def is_numbered(name: str) -> bool:
            return name.split()[-1].isdigit() and len(name.split()) == 2

        def numbered(kind: str) -> list[dict[str, float]]:
            return [value for name, value in by_name.items() if is_numbered(name) and name.startswith(kind)]

        each = numbered("head") + numbered("layer")
        return {
            "pooled": pooled,
            "by_head": numbered("head"),
            "by_layer": numbered("layer"),
            "by_label": {n: value for n, value in by_name.items() if n not in pooled and not is_numbered(n)},
            "largest_ratio_of_a_head_or_layer": max((value["ratio"] for value in each), default=0.0),
            "total_variation": {
                name: {
                    side: {"mean": float(torch.stack(d[name]).mean()), "max": float(torch.stack(d[name]).max())}
                    for side, d in zip(("kernel", "bf16"), self._distances, strict=True)
                }
                for name in self._distances[0]
            },
            "passed": bool(pooled) and all(value["ratio"] <= LIMIT for value in pooled.values()),
        }

    def _distributions(self, observed: Observed, history: Tensor, sampling: Sampling) -> list[Tensor]:
        choices: list[Choice] = [sampling.talker] + [sampling.predictor] * (NUM_CODEBOOKS - 1)
        made_from = scores(observed.logits, history, sampling, self._config)
        return [distribution(logits, choice) for logits, choice in zip(made_from, choices, strict=True)]


def first_difference(
    ours: Observed, bf16: Observed, fp32: Observed, history: Tensor, config: ModelConfig
) -> dict[str, Any] | None:
    """The first codebook of a greedy frame in which `ours.codes` is not fp32's choice, and why; None where there is
    none. `explained`: fp32's own gap between the two ids is within twice the bf16 oracle's largest logit error in that
    head and frame."""
    greedy = Sampling().greedy()
    made_from = [scores(observed.logits, history, greedy, config) for observed in (ours, bf16, fp32)]
    for group, (kernel, near, truth) in enumerate(zip(*made_from, strict=True)):
        best, chosen = int(truth.argmax()), int(ours.codes[group])
        if best != chosen:
            kept = truth.isfinite()
            gap = float(truth[best] - truth[chosen])
            bound = 2 * float((near - truth)[kept].abs().max())
            return {
                "codebook": group,
                "ids": [best, chosen],
                "fp32_gap": gap,
                "kernel_error_of_the_two": float((kernel - truth)[[best, chosen]].abs().sum()),
                "kernel_largest_error": float((kernel - truth)[kept].abs().max()),
                "bf16_largest_error": bound / 2,
                "explained": gap <= bound,
            }
    return None
