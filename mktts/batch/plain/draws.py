"""From logits of many streams to codes: `mktts.model.sampling`'s steps, operator by operator, a lane a row.

Given the same logits, a lane chooses what `restrict` and `choose` choose, bit for bit, whatever its neighbours do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mktts.model.sampling import Choice
from mktts.spec import MIN_NEW_FRAMES, SUPPRESSED_TAIL


@dataclass(frozen=True)
class LaneChoices:
    """The `Choice` of every lane, as rows; what none of them needs is None."""

    greedy: Tensor | None  # (B,) bool; None where all lanes draw
    temperature: Tensor | None  # (B, 1) fp32; None where no lane draws
    top_k: Tensor | int | None  # of every lane that has one, or (B, 1) int64 where they differ; 0: off
    most: int  # the largest top_k
    nucleus: Tensor | None  # indices of the lanes that have a top_p
    drop: Tensor | None  # (lanes of `nucleus`, 1) fp32: 1 - top_p

    @staticmethod
    @lru_cache(maxsize=64)
    def of(choices: tuple[Choice, ...], device: torch.device) -> LaneChoices:
        """Of one choice a lane."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [not choice.do_sample for choice in choices]
        top_k = [choice.top_k for choice in choices]
        nucleus = [lane for lane, choice in enumerate(choices) if choice.top_p < 1 and choice.do_sample]
        return LaneChoices(
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature=None if all(greedy) else column([choice.temperature for choice in choices]),
            top_k=None if not any(top_k) else top_k[0] if len(set(top_k)) == 1 else column(top_k, torch.int64),
            most=max(top_k),
            nucleus=torch.tensor(nucleus, device=device) if nucleus else None,
            drop=column([1 - choices[lane].top_p for lane in nucleus]) if nucleus else None,
        )

    @property
    def draws(self) -> bool:
        """Whether any lane needs noise."""
        return self.temperature is not None

    def choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """`logits` (B, V) fp32, -inf marking forbidden ids, and Gumbel noise (B, V) -> ids (B,) int64."""
        if not self.draws:
            return _best(logits)
        drawn = _best(self.kept(logits).add_(noise))
        return drawn if self.greedy is None else torch.where(self.greedy, _best(logits), drawn)

    def kept(self, logits: Tensor) -> Tensor:
        """As `mktts.model.sampling.kept`, (B, V); rows of greedy lanes mean nothing."""
        scores = logits / self.temperature
        if self.top_k is not None:
            alike = isinstance(self.top_k, int)  # then nothing need be sorted, a quarter of the time
            best = torch.topk(scores, min(self.most, scores.shape[1]), sorted=not alike).values
            if alike:
                kth = best.amin(-1, keepdim=True)
            else:  # a lane without one keeps what is at least its lowest score
                at = self.top_k.clamp(1, best.shape[1]) - 1
                kth = best.gather(1, at).masked_fill_(self.top_k == 0, -torch.inf)
            scores.masked_fill_(scores < kth, -torch.inf)
        if self.nucleus is not None:
            some = scores[self.nucleus]
            ascending, order = torch.sort(some, descending=False, stable=True)
            drop = ascending.softmax(-1).cumsum(-1) <= self.drop
            drop[:, -1] = False
            scores[self.nucleus] = some.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
        return scores


def _best(scores: Tensor) -> Tensor:
    """argmax of rows: the lowest of equals, as that is, in half its time on the CPU."""
    return scores.max(-1).indices


class LaneLimits:
    """What code 0 is chosen from: `mktts.model.sampling.restrict` for lanes."""

    def __init__(self, vocab_size: int, eos: int, device: torch.device) -> None:
        forbidden = torch.zeros(2, vocab_size, dtype=torch.bool)  # in the first frames, and later
        forbidden[:, -SUPPRESSED_TAIL:] = True
        forbidden[:, eos] = torch.tensor([True, False])
        self._forbidden = forbidden.to(device)

    def restrict(self, logits: Tensor, seen: Tensor, penalties: Sequence[float], frames: Sequence[int]) -> Tensor:
        """`logits` (B, V) fp32, overwritten; `seen` (B, V) bool: code 0 of any frame so far. frames: made so far."""
        if any(penalty != 1 for penalty in penalties):
            penalty = torch.tensor(penalties, dtype=logits.dtype, device=logits.device)[:, None]
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(seen, penalised, logits)
        later = torch.tensor([int(made >= MIN_NEW_FRAMES) for made in frames], device=logits.device)
        return logits.masked_fill_(self._forbidden[later], -torch.inf)
