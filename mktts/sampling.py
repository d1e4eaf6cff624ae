"""From logits to a code: the settings, and exactly upstream's order of operations.

Order (Hugging Face logits processors as qwen-tts 0.1.1 runs them): repetition penalty, minimum length,
suppressed ids, temperature, top-k, top-p, softmax in fp32, draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mktts.errors import SamplingError


@dataclass(frozen=True)
class Choice:
    """How one code is chosen. `top_k=0` and `top_p=1.0` switch those filters off."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise SamplingError(
                f"temperature must be a finite number above 0, got {self.temperature}; for greedy set do_sample=False"
            )
        if self.top_k < 0 or int(self.top_k) != self.top_k:
            raise SamplingError(f"top_k must be a whole number of at least 0 (0 = off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p must be in (0, 1], got {self.top_p}")


@dataclass(frozen=True)
class Sampling:
    """Settings of one utterance; the defaults are the released checkpoints' generation_config.json."""

    talker: Choice = field(default_factory=Choice)
    predictor: Choice = field(default_factory=Choice)
    repetition_penalty: float = 1.05

    def __post_init__(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise SamplingError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}")

    def greedy(self) -> Sampling:
        """The same settings with both draws replaced by argmax."""
        return replace(
            self, talker=replace(self.talker, do_sample=False), predictor=replace(self.predictor, do_sample=False)
        )


def penalise(logits: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, as in transformers): `logits` (V,) fp32, `history` (N,) int64 ids."""
    if penalty == 1.0 or history.numel() == 0:
        return logits
    seen = logits[history]
    return logits.scatter(0, history, torch.where(seen < 0, seen * penalty, seen / penalty))


def choose(logits: Tensor, choice: Choice, generator: torch.Generator | None) -> Tensor:
    """Chooses one id from `logits` (V,) fp32, -inf marking forbidden ids. Returns () int64 on the same device."""
    if not choice.do_sample:
        return logits.argmax()
    probabilities = distribution(logits, choice)
    return torch.multinomial(probabilities[None], 1, generator=generator)[0, 0]


def distribution(logits: Tensor, choice: Choice) -> Tensor:
    """The distribution a sampled choice draws from: (V,) fp32, summing to 1."""
    scores = logits / choice.temperature if choice.temperature != 1.0 else logits
    if choice.top_k:
        kth = torch.topk(scores, min(choice.top_k, scores.numel())).values[-1]
        scores = scores.masked_fill(scores < kth, -torch.inf)  # ties with the k-th stay, as upstream
    if choice.top_p < 1:
        ascending, order = torch.sort(scores, descending=False)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - choice.top_p
        drop[-1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), -torch.inf)
    return scores.softmax(-1)
