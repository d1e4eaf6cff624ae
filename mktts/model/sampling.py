"""Samples a code from logits, in upstream's order (Hugging Face logits processors as qwen-tts 0.1.1 runs them):
repetition penalty, minimum length, suppressed ids, temperature, top-k, top-p, draw.

Our draws are counter-based: the same seed, frame and codebook give the same noise on every device. Philox4x32-10 is
from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The arithmetic after it is
that of csrc/sampling.cuh, operation by operation, so that both give the same bits."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mktts.common import checked_int, checked_number, one_of
from mktts.errors import CapacityError, PromptError, SamplingError
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig

Rng = Literal["philox", "torch"]
SEED_BITS = 64  # the size of Philox's key and of a seed of torch's generators
MAX_SEED = 2**62  # for an utterance: far below 2^64, because every segment after the first adds one
_DRAWN_SEED_BITS = 32  # short enough to read and retype
# Above and at most: what scores are divided or multiplied by. Beyond these, float32 gives infinities and NaN.
_SCALES = 1e-9, 1e9

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # fractions of the golden ratio and of the square root of 3
STREAM = 0  # the fourth counter; draws for another purpose would use another value
_WORD, _HALF_BITS, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(9)
_UNIT = np.float32(2**-23)
_IDS = 4  # ids that share one Philox block of four words

# Polynomial and split ln 2 from logf in the Cephes library (S. Moshier): (log(1 + m) - m + m^2 / 2) / m^3.
_LOG = np.array(
    [
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ],
    dtype=np.float32,
)  # fmt: skip
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_SQRT_HALF, _HALF, _ONE = np.float32(0.707106781186547524), np.float32(0.5), np.float32(1)


@dataclass(frozen=True)
class Choice:
    """How one code is chosen. `top_k=0` and `top_p=1.0` disable these filters."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        one_of("do_sample", self.do_sample, (True, False), SamplingError)
        checked_number("temperature", self.temperature, *_SCALES, SamplingError, "; for greedy set do_sample=False")
        checked_number("top_p", self.top_p, 0, 1, SamplingError)
        top_k = int(self.top_k) if isinstance(self.top_k, float) and self.top_k % 1 == 0 else self.top_k
        checked_int("top_k", top_k, 0, 2**62, SamplingError)
        object.__setattr__(self, "top_k", int(top_k))  # JSON files may hold 50.0, or a temperature of 1
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))


def _places(predictor: str, **renamed: str) -> dict[str, tuple[str, str]]:
    """Name of a setting -> (part of `Sampling`, field of `Choice`). predictor: prefix of the predictor's settings."""
    prefixes = {"talker": "", "predictor": predictor}
    places = {prefix + f.name: (part, f.name) for part, prefix in prefixes.items() for f in fields(Choice)}
    return {renamed.get(name, name): place for name, place in places.items()}


# Names in generation_config.json and qwen-tts; names in a request, where `greedy` is the opposite of `do_sample`.
_UPSTREAM = _places("subtalker_", subtalker_do_sample="subtalker_dosample")
_FLAT = _places("predictor_", do_sample="greedy", predictor_do_sample="predictor_greedy")


@dataclass(frozen=True)
class Sampling:
    """Settings of one utterance; the defaults are the released checkpoints' generation_config.json.

    rng: "philox" is counter-based (`gumbel`): a draw depends only on seed, frame, codebook and logits,
        and is the same on every device and in each of our backends. "torch" reproduces the draws that
        `torch.manual_seed(seed)` gives upstream, for comparisons with qwen-tts; only the torch backend supports
        it. backend="upstream" is qwen-tts itself and always draws that way."""

    talker: Choice = Choice()
    predictor: Choice = Choice()
    repetition_penalty: float = 1.05
    rng: Rng = "philox"

    def __post_init__(self) -> None:
        one_of("rng", self.rng, get_args(Rng), SamplingError)
        checked_number("repetition_penalty", self.repetition_penalty, *_SCALES, SamplingError)
        for part in (self.talker, self.predictor):
            if not isinstance(part, Choice):
                raise SamplingError(f"talker and predictor must be a Choice each, got {part!r}")

    def greedy(self) -> Sampling:
        """The same settings with both draws replaced by argmax."""
        talker, predictor = (replace(choice, do_sample=False) for choice in (self.talker, self.predictor))
        return replace(self, talker=talker, predictor=predictor)

    def upstream(self) -> dict[str, Any]:
        """The settings under the names of generation_config.json and of qwen-tts. `rng` is not among them."""
        return self._named(_UPSTREAM)

    def with_upstream(self, given: Mapping[str, Any]) -> Sampling:
        """Returns these settings updated from `given`, by the names of `upstream`; other keys are ignored. Raises
        SamplingError for a value out of range, TypeError or ValueError for one of the wrong type."""
        return self._changed(_UPSTREAM, given)

    def flat(self) -> dict[str, Any]:
        """The settings under the names of a request: `greedy`, `temperature`, `top_k` and `top_p` for the talker, the
        same with the prefix `predictor_` for the code predictor, and `repetition_penalty`. `rng` is not among them."""
        return self._named(_FLAT)

    def with_flat(self, given: Mapping[str, Any]) -> Sampling:
        """Returns these settings updated from `given`, by the names of `flat`; None leaves a setting unchanged. Raises
        SamplingError for an unknown name or a value out of range."""
        known = ("repetition_penalty", *_FLAT)
        if unknown := [name for name in given if name not in known]:
            raise SamplingError(f"expected sampling settings of {', '.join(known)}; got {', '.join(unknown)}")
        return self._changed(_FLAT, {name: value for name, value in given.items() if value is not None})

    def _named(self, places: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        found: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        for name, (part, key) in places.items():
            value = getattr(getattr(self, part), key)
            found[name] = not value if name.endswith("greedy") else value
        return found

    def _changed(self, places: Mapping[str, tuple[str, str]], given: Mapping[str, Any]) -> Sampling:
        changes: dict[str, dict[str, Any]] = {"talker": {}, "predictor": {}}
        for name in places.keys() & given.keys():
            part, key = places[name]
            changes[part][key] = not given[name] if name.endswith("greedy") else given[name]
        parts = {part: replace(getattr(self, part), **change) for part, change in changes.items()}
        penalty = given.get("repetition_penalty")
        return replace(self, **parts, repetition_penalty=self.repetition_penalty if penalty is None else penalty)


def drawn_seed() -> int:
    """Draws a new seed for an utterance or a text."""
    return secrets.randbits(_DRAWN_SEED_BITS)


def check_start(embeds: Tensor, width: int, seed: int, max_frames: int) -> None:
    """Checks the arguments of `Backend.start`. Raises PromptError for rows that are not (L >= 2, width), SamplingError
    for a seed outside [0, 2^64), CapacityError if `max_frames` is below 1."""
    if embeds.dim() != 2 or embeds.shape[0] < 2 or embeds.shape[1] != width:
        raise PromptError(f"prompt must be (L >= 2, {width}), got {tuple(embeds.shape)}")
    checked_int("seed", seed, 0, 2**SEED_BITS - 1, SamplingError)
    checked_int("max_frames", max_frames, 1, error=CapacityError)


def restrict(logits: Tensor, history: Tensor, penalty: float, eos: int) -> Tensor:
    """Applies `RestrictedRows` to a copy of one row `logits` (V,) fp32. history: code 0 of every frame, (N,) int64."""
    seen = torch.zeros(1, len(logits), dtype=torch.bool, device=logits.device)
    seen[0, history] = True
    rows = RestrictedRows(len(logits), eos, logits.device)
    return rows.restrict(logits[None].clone(), seen, [penalty], [len(history)])[0]


def choose(logits: Tensor, choice: Choice, randomness: Tensor | torch.Generator | None) -> Tensor:
    """Chooses one id, () int64, from `logits` (V,) fp32, where -inf marks forbidden ids; ties go to the lowest id.
    randomness: Gumbel noise (V,) fp32 (`gumbel`), or the generator for rng="torch"; a greedy choice needs neither."""
    return ChoiceRows.of((choice,), logits.device).choose(logits[None], randomness)[0]


@dataclass(frozen=True)
class ChoiceRows:
    """The choices of B rows of logits; a field is None if no row needs it. No row affects the bits of another."""

    draws: bool  # whether any row needs noise
    greedy: Tensor | None  # (B,) bool; None if all rows sample
    temperature: Tensor  # (B, 1) fp32
    top_k: Tensor | int | None  # an int if all rows have the same, otherwise (B, 1) int64; 0 disables it for a row
    most: int  # the largest top_k
    nucleus: Tensor | None  # indices of the rows with top_p below 1
    drop: Tensor | None  # (rows of `nucleus`, 1) fp32: 1 - top_p

    @staticmethod
    @lru_cache(maxsize=64)
    def of(choices: tuple[Choice, ...], device: torch.device) -> ChoiceRows:
        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [not choice.do_sample for choice in choices]
        top_k = [choice.top_k for choice in choices]
        nucleus = [lane for lane, choice in enumerate(choices) if choice.top_p < 1 and choice.do_sample]
        return ChoiceRows(
            draws=not all(greedy),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature=column([choice.temperature for choice in choices]),
            top_k=None if not any(top_k) else top_k[0] if len(set(top_k)) == 1 else column(top_k, torch.int64),
            most=max(top_k),
            nucleus=torch.tensor(nucleus, device=device) if nucleus else None,
            drop=column([1 - choices[lane].top_p for lane in nucleus]) if nucleus else None,
        )

    def choose(self, logits: Tensor, noise: Tensor | torch.Generator | None) -> Tensor:
        """Chooses ids (B,) int64 from `logits` (B, V) fp32, where -inf marks forbidden ids. noise: Gumbel noise (B, V),
        or, for a single row, the generator for rng="torch"; None if no row samples."""
        # `max` returns the lowest id of a tie, as argmax does, in half the time on a CPU.
        if not self.draws:
            return logits.max(-1).indices
        if isinstance(noise, torch.Generator):
            return torch.multinomial(self.kept(logits, stable=False).softmax(-1), 1, generator=noise)[:, 0]
        drawn = self.kept(logits).add_(noise).max(-1).indices
        return drawn if self.greedy is None else torch.where(self.greedy, logits.max(-1).indices, drawn)

    def kept(self, logits: Tensor, stable: bool = True) -> Tensor:
        """Scores (B, V) fp32: logits / temperature, with -inf for ids that top-k or top-p exclude; undefined for greedy
        rows. Ids that tie with the k-th are kept. Among equal scores at the border of top-p, a stable sort excludes
        lower ids first; with an unstable one, as upstream has it, the choice depends on the sorting routine."""
        scores = logits / self.temperature
        if self.top_k is not None:
            alike = isinstance(self.top_k, int)  # no sorting is needed, which takes a quarter of the time
            best = torch.topk(scores, min(self.most, scores.shape[1]), sorted=not alike).values
            if alike:
                kth = best.amin(-1, keepdim=True)
            else:  # a row without top_k excludes nothing: its threshold is -inf
                at = self.top_k.clamp(1, best.shape[1]) - 1
                kth = best.gather(1, at).masked_fill_(self.top_k == 0, -torch.inf)
            scores.masked_fill_(scores < kth, -torch.inf)
        if self.nucleus is not None:
            some = scores[self.nucleus]
            ascending, order = torch.sort(some, descending=False, stable=stable)
            drop = ascending.softmax(-1).cumsum(-1) <= self.drop
            drop[:, -1] = False
            scores[self.nucleus] = some.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
        return scores


class RestrictedRows:
    """Prepares the logits of code 0: applies the repetition penalty (Keskar et al. 2019, as in transformers), and sets
    control ids to -inf: all but `eos`, and `eos` too until MIN_NEW_FRAMES frames are made."""

    def __init__(self, vocab_size: int, eos: int, device: torch.device) -> None:
        forbidden = torch.zeros(2, vocab_size, dtype=torch.bool)  # row 0: in the first frames; row 1: later
        forbidden[:, -SUPPRESSED_TAIL:] = True
        forbidden[:, eos] = torch.tensor([True, False])
        self._forbidden = forbidden.to(device)

    def restrict(self, logits: Tensor, seen: Tensor, penalties: Sequence[float], frames: Sequence[int]) -> Tensor:
        """`logits` (B, V) fp32, which may be overwritten. seen: codes 0 so far, (B, V) bool. frames: made so far."""
        if any(penalty != 1 for penalty in penalties):
            # a tensor, because for a Python number torch on CUDA multiplies by the rounded reciprocal
            penalty = torch.tensor(penalties, dtype=logits.dtype, device=logits.device)[:, None]
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(seen, penalised, logits)
        later = torch.tensor([int(made >= MIN_NEW_FRAMES) for made in frames], device=logits.device)
        return logits.masked_fill_(self._forbidden[later], -torch.inf)


def distribution(logits: Tensor, choice: Choice) -> Tensor:
    """The distribution upstream draws from, (V,) fp32. Philox draws follow it except for ties at top-p's border."""
    return ChoiceRows.of((choice,), logits.device).kept(logits[None], stable=False)[0].softmax(-1)


def philox(
    counters: Sequence[np.ndarray | int], key: tuple[np.ndarray | int, np.ndarray | int]
) -> tuple[np.ndarray, ...]:
    """Philox4x32-10: four counters and the key's two words, which broadcast to one shape S -> four words of shape S.
    All are 32-bit values, held as uint64."""
    c0, c1, c2, c3, k0, k1 = (np.asarray(part, dtype=np.uint64) for part in (*counters, *key))
    for turn in range(ROUNDS):
        step0, step1 = (np.uint64(turn * step & 0xFFFFFFFF) for step in KEY_STEPS)
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0 = (second >> _HALF_BITS) ^ (c1 ^ (k0 + step0 & _WORD))
        c2 = (first >> _HALF_BITS) ^ (c3 ^ (k1 + step1 & _WORD))
        c1, c3 = second & _WORD, first & _WORD
    return np.broadcast_arrays(c0, c1, c2, c3)


def exact_log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive normal float32, from additions and multiplications that are each rounded once, so
    that every machine gives the same bits. The error is below 1e-7: absolute, or relative if the result exceeds 1."""
    bits = x.view(np.uint32)
    m = ((bits & np.uint32(0x007FFFFF)) | np.uint32(0x3F000000)).view(np.float32)  # x = m * 2^exponent, m in [1/2, 1)
    small = m < _SQRT_HALF
    exponent = ((bits >> np.uint32(23)).astype(np.int32) - np.int32(126) - small).astype(np.float32)
    m += m * small  # exact, as is the next line: m in [sqrt(1/2) - 1, sqrt(2) - 1)
    m -= _ONE
    square = m * m
    y = np.full_like(m, _LOG[0])
    for coefficient in _LOG[1:]:
        y *= m
        y += coefficient
    y *= m
    y *= square
    y += exponent * _LN2_LOW
    square *= -_HALF
    y += square
    m += y
    m += exponent * _LN2_HIGH
    return m


def gumbel(seed: int, frame: int, books: range, size: int) -> np.ndarray:
    """Gumbel noise of one frame: (len(books), size) float32. The argmax of score + noise is a draw from softmax(score).

    The key is `seed`, in [0, 2^64). Counters are (id // 4, codebook, frame, STREAM); an id uses word id % 4. The word's
    top 23 bits k give u = (k + 1/2) 2^-23, exact and inside (0, 1), and the noise -log(-log(u))."""
    blocks = np.arange(-(-size // _IDS))
    return _gumbel(seed, frame, blocks, np.array(books)[:, None]).reshape(len(books), -1)[:, :size]


def _gumbel(seeds: np.ndarray | int, frames: np.ndarray | int, blocks: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Noise for the four ids of every block: arguments that broadcast to a shape S -> (*S, 4) float32."""
    seeds = np.asarray(seeds, dtype=np.uint64)
    words = philox((blocks, books, frames, STREAM), (seeds & _WORD, seeds >> _HALF_BITS))
    u = np.empty((*words[0].shape, _IDS), dtype=np.float32)
    for place, of_place in enumerate(words):
        u[..., place] = of_place >> _SHIFT
    u += _HALF
    u *= _UNIT
    return -exact_log(-exact_log(u))


_STREAMS_AT_A_TIME = 8  # few enough to keep intermediate results in the cache


class FrameNoise:
    """Gumbel noise (`gumbel`) of complete frames, only for the ids that may be chosen."""

    def __init__(self, config: ModelConfig) -> None:
        self._sizes = config.talker.vocab_size, config.predictor.vocab_size
        allowed = [*range(self._sizes[0] - SUPPRESSED_TAIL), config.codec_ids.eos]
        self._of_code0 = np.unique(np.array(allowed) // _IDS)
        later = np.arange(-(-self._sizes[1] // _IDS))
        books = np.arange(1, NUM_CODEBOOKS).repeat(len(later))
        self._blocks = np.concatenate((self._of_code0, np.tile(later, NUM_CODEBOOKS - 1)))
        self._books = np.concatenate((np.zeros_like(self._of_code0), books))

    def draw(self, seeds: Sequence[int], frames: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Noise of frame `frames[i]` of the stream with `seeds[i]`: for code 0 (B, V), 0 for forbidden ids, and for the
        later codes (B, 15, V), float32."""
        made = np.empty((len(seeds), len(self._blocks), _IDS), dtype=np.float32)
        for start in range(0, len(seeds), _STREAMS_AT_A_TIME):
            some = slice(start, start + _STREAMS_AT_A_TIME)
            keys, turns = (np.array(part[some], dtype=np.uint64)[:, None] for part in (seeds, frames))
            made[some] = _gumbel(keys, turns, self._blocks, self._books)
        count = len(self._of_code0)
        code0 = np.zeros((len(seeds), -(-self._sizes[0] // _IDS), _IDS), dtype=np.float32)
        code0[:, self._of_code0] = made[:, :count]
        later = made[:, count:].reshape(len(seeds), NUM_CODEBOOKS - 1, -1)[..., : self._sizes[1]]
        return torch.from_numpy(code0.reshape(len(seeds), -1)[:, : self._sizes[0]]), torch.from_numpy(later)
