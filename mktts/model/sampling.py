"""From logits to a code: the settings, and exactly upstream's order of operations.

Order (Hugging Face logits processors as qwen-tts 0.1.1 runs them): repetition penalty, minimum length,
suppressed ids, temperature, top-k, top-p, draw. Two random number generators can draw: see `Sampling`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mktts.errors import SamplingError
from mktts.spec import MIN_NEW_FRAMES, SUPPRESSED_TAIL

Rng = Literal["philox", "torch"]
SEED_BITS = 64  # Philox's key, and what torch's generators take
MAX_SEED = 2**62  # of an utterance: below 2^64 by far, since every segment after the first adds one
_FLAT_PREFIX = {"talker": "", "predictor": "predictor_"}  # of the names in `Sampling.flat`
_UPSTREAM_PREFIX = {"talker": "", "predictor": "subtalker_"}  # of the names in `Sampling.upstream`
_DRAWN_SEED_BITS = 32  # short enough to read and type again


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
        object.__setattr__(self, "top_k", int(self.top_k))  # JSON files may say 50.0, or a temperature of 1
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))


@dataclass(frozen=True)
class Sampling:
    """Settings of one utterance; the defaults are the released checkpoints' generation_config.json.

    rng: "philox" draws by counters (`mktts.model.philox`): a draw follows from seed, frame, codebook and logits
        alone, the same on every device and in every backend of ours. "torch" takes the draws that
        `torch.manual_seed(seed)` gives upstream: for comparisons with qwen-tts; of our backends only the torch one has
        it. backend="upstream" is qwen-tts itself and always draws that way.
    """

    talker: Choice = field(default_factory=Choice)
    predictor: Choice = field(default_factory=Choice)
    repetition_penalty: float = 1.05
    rng: Rng = "philox"

    def __post_init__(self) -> None:
        if self.rng not in get_args(Rng):
            raise SamplingError(f"rng must be one of {get_args(Rng)}, got {self.rng!r}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise SamplingError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}")

    def greedy(self) -> Sampling:
        """The same settings with both draws replaced by argmax."""
        return replace(
            self, talker=replace(self.talker, do_sample=False), predictor=replace(self.predictor, do_sample=False)
        )

    def upstream(self) -> dict[str, Any]:
        """The settings under the names of generation_config.json and of qwen-tts. `rng` is not among them."""
        found: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        for which, prefix in _UPSTREAM_PREFIX.items():
            found |= {_upstream_name(prefix, name): value for name, value in asdict(getattr(self, which)).items()}
        return found

    def with_upstream(self, given: Mapping[str, Any]) -> Sampling:
        """These settings with those of `given`, by the names of `upstream`; other keys have no effect.

        Raises SamplingError for a value out of range, TypeError or ValueError for one of another type.
        """
        changes: dict[str, Any] = {}
        for which, prefix in _UPSTREAM_PREFIX.items():
            names = {field.name: _upstream_name(prefix, field.name) for field in fields(Choice)}
            choice = {name: given[key] for name, key in names.items() if key in given}
            changes[which] = replace(getattr(self, which), **choice)
        penalty = given.get("repetition_penalty", self.repetition_penalty)
        return replace(self, **changes, repetition_penalty=penalty)

    def flat(self) -> dict[str, Any]:
        """The settings under the names of a request: `greedy`, `temperature`, `top_k` and `top_p` of the talker, the
        same with `predictor_` before them of the code predictor, and `repetition_penalty`. `rng` is not among them.
        """
        found: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        for which, prefix in _FLAT_PREFIX.items():
            choice = asdict(getattr(self, which))
            found[f"{prefix}greedy"] = not choice.pop("do_sample")
            found |= {f"{prefix}{name}": value for name, value in choice.items()}
        return found

    def with_flat(self, given: Mapping[str, Any]) -> Sampling:
        """These settings with those of `given` in their place, by the names of `flat`; None leaves one as it is.

        Raises SamplingError for an unknown name or a value out of range.
        """
        if unknown := given.keys() - self.flat().keys():
            raise SamplingError(f"expected sampling settings of {', '.join(self.flat())}; got {', '.join(unknown)}")
        given = {name: value for name, value in given.items() if value is not None}
        changes: dict[str, Any] = {}
        for which, prefix in _FLAT_PREFIX.items():
            names = {field.name: prefix + field.name for field in fields(Choice)}
            choice = {name: given[flat] for name, flat in names.items() if flat in given}
            if (greedy := given.get(f"{prefix}greedy")) is not None:
                choice["do_sample"] = not greedy
            changes[which] = replace(getattr(self, which), **choice)
        penalty = given.get("repetition_penalty", self.repetition_penalty)
        return replace(self, **changes, repetition_penalty=penalty)


def _upstream_name(prefix: str, name: str) -> str:
    return "subtalker_dosample" if prefix and name == "do_sample" else prefix + name


def drawn_seed() -> int:
    """A fresh seed for an utterance or a text."""
    return secrets.randbits(_DRAWN_SEED_BITS)


def checked_seed(seed: int | None) -> int:
    """`seed`, or a fresh one for None. Raises SamplingError outside [0, 2^64)."""
    if seed is None:
        return secrets.randbits(SEED_BITS)
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 1 << SEED_BITS:
        raise SamplingError(f"seed must be a whole number of at least 0 and below 2^{SEED_BITS}, got {seed!r}")
    return int(seed)


def penalise(logits: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, as in transformers): `logits` (V,) fp32, `history` (N,) int64 ids."""
    if penalty == 1.0 or history.numel() == 0:
        return logits
    seen = logits[history]
    return logits.scatter(0, history, torch.where(seen < 0, seen * penalty, _divide(seen, penalty)))


def restrict(logits: Tensor, history: Tensor, penalty: float, eos: int) -> Tensor:
    """What code 0 is chosen from: `logits` (V,) fp32 penalised, with -inf where an id is forbidden. Returns a copy.

    `history` (N,) int64 is code 0 of every frame so far. Ids above the codebook are forbidden but for `eos`, and that
    is until MIN_NEW_FRAMES frames are made.
    """
    scores = penalise(logits, history, penalty).clone()
    end = scores[eos].clone()
    scores[-SUPPRESSED_TAIL:] = -torch.inf
    scores[eos] = end if len(history) >= MIN_NEW_FRAMES else -torch.inf
    return scores


def choose(logits: Tensor, choice: Choice, randomness: Tensor | torch.Generator | None) -> Tensor:
    """Chooses one id from `logits` (V,) fp32, -inf marking forbidden ids. Returns () int64 on the same device.

    randomness: Gumbel noise (V,) fp32 on that device (`mktts.model.philox.gumbel`): the id with the largest score +
    noise wins, the lowest of equals, which is a draw from softmax(kept scores). Or the generator of rng="torch". Greedy
    needs neither.
    """
    if not choice.do_sample:
        return logits.argmax()
    if isinstance(randomness, Tensor):
        return (kept(logits, choice) + randomness).argmax()
    return torch.multinomial(distribution(logits, choice)[None], 1, generator=randomness)[0, 0]


def distribution(logits: Tensor, choice: Choice) -> Tensor:
    """What upstream draws from: (V,) fp32, summing to 1. Philox's draws follow it but for ties at top-p's border."""
    return kept(logits, choice, stable=False).softmax(-1)


def kept(logits: Tensor, choice: Choice, stable: bool = True) -> Tensor:
    """Scores (V,) fp32: logits / temperature, and -inf for what top-k and top-p leave out. Ties with the k-th stay.

    Of equal scores at top-p's border a stable sort leaves out the lower ids first. An unstable one, which upstream
    has, leaves out whichever the processor's sorting network put first: nothing another device could repeat.
    """
    scores = _divide(logits, choice.temperature)
    if choice.top_k:
        kth = torch.topk(scores, min(choice.top_k, scores.numel())).values[-1]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if choice.top_p < 1:
        ascending, order = torch.sort(scores, descending=False, stable=stable)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - choice.top_p
        drop[-1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), -torch.inf)
    return scores


def _divide(numbers: Tensor, by: float) -> Tensor:
    """Rounded once on every device: by a Python number, torch on CUDA multiplies by the rounded reciprocal instead."""
    return numbers / torch.full((), by, dtype=numbers.dtype, device=numbers.device)
