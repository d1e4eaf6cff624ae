"""Talker, code predictor and sampling of many streams at once, in plain PyTorch operators on the CPU.

At these sizes an operator costs by the call, not by the row: sixteen streams that make a frame together cost little
more than two. A tick takes the newest row of every stream, and all prompt rows of streams that are new, through the
talker in one pass; each stream attends to keys and values of its own, which grow as it speaks.

Codes are those of `mktts.model.oracle.TorchBackend` up to rounding: noise, and the choice given logits, are equal by
construction; logits differ in last bits, as products of one row and of several do. On the CPU in fp32 a stream's codes
do not depend on its neighbours; see `stack` for how long sums may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.batch.plain.stack import KeysValues, LanePredictor, LaneStack, advance
from mktts.codec.layers import LEAST_ROWS, filled_up
from mktts.errors import PromptError, SamplingError
from mktts.model.backend import CODE_EMBEDDINGS, check_start
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.sampling import (
    KEY_STEPS,
    MULTIPLIERS,
    ROUNDS,
    STREAM,
    ChoiceRows,
    RestrictedRows,
    Sampling,
    checked_seed,
    exact_log,
)
from mktts.spec import NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig

_WORD, _HALF_BITS, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(9)
_HALF, _UNIT = np.float32(0.5), np.float32(2**-23)
_IDS = 4  # of one block of Philox
_CPU = torch.device("cpu")
_LANES_AT_A_TIME = 8  # so that what lies between two operators stays in the cache


class LaneNoise:
    """Which blocks of random words a frame needs: those of ids that may be chosen."""

    def __init__(self, config: ModelConfig) -> None:
        self._sizes = config.talker.vocab_size, config.predictor.vocab_size
        allowed = [*range(self._sizes[0] - SUPPRESSED_TAIL), config.codec_ids.eos]
        self._of_code0 = np.unique(np.array(allowed) // _IDS)
        later = np.arange(-(-self._sizes[1] // _IDS))
        books = np.arange(1, NUM_CODEBOOKS).repeat(len(later))
        self._blocks = np.concatenate((self._of_code0, np.tile(later, NUM_CODEBOOKS - 1))).astype(np.uint64)
        self._books = np.concatenate((np.zeros_like(self._of_code0), books)).astype(np.uint64)

    def draw(self, seeds: Sequence[int], frames: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Noise of frame `frames[i]` of the stream of `seeds[i]`: code 0 (B, V), later codes (B, 15, V), float32.

        It is 0 where code 0 must not be chosen.
        """
        lanes, size = len(seeds), self._sizes[1]
        made = np.empty((lanes, len(self._blocks), _IDS), dtype=np.float32)
        for start in range(0, lanes, _LANES_AT_A_TIME):
            some = slice(start, start + _LANES_AT_A_TIME)
            keys = np.array(seeds[some], dtype=np.uint64)[:, None]
            made[some] = self._gumbel(keys, np.array(frames[some], dtype=np.uint64)[:, None])
        count = len(self._of_code0)
        code0 = np.zeros((lanes, -(-self._sizes[0] // _IDS), _IDS), dtype=np.float32)
        code0[:, self._of_code0] = made[:, :count]
        later = made[:, count:].reshape(lanes, NUM_CODEBOOKS - 1, -1)[..., :size]
        code0 = code0.reshape(lanes, -1)[:, : self._sizes[0]]
        return torch.from_numpy(code0), torch.from_numpy(later)

    def _gumbel(self, keys: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """`keys` and `frames` (B, 1) uint64 -> (B, blocks, 4) float32. The steps of `philox` and `gumbel`."""
        k0, k1 = keys & _WORD, keys >> _HALF_BITS
        c0, c1, c2, c3 = self._blocks, self._books, frames, np.uint64(STREAM)
        for turn in range(ROUNDS):
            step0, step1 = (np.uint64(turn * step & 0xFFFFFFFF) for step in KEY_STEPS)
            first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
            c0 = (second >> _HALF_BITS) ^ (c1 ^ (k0 + step0 & _WORD))
            c2 = (first >> _HALF_BITS) ^ (c3 ^ (k1 + step1 & _WORD))
            c1, c3 = second & _WORD, first & _WORD
        u = np.empty((*c0.shape, _IDS), dtype=np.float32)
        for place, words in enumerate((c0, c1, c2, c3)):
            u[..., place] = words >> _SHIFT
        u += _HALF
        u *= _UNIT
        return -exact_log(-exact_log(u))


_PREFIXES = {"talker": "talker.", "predictor": "talker.code_predictor."}


@dataclass
class _TalkerSlot:
    """What the host knows of an open stream."""

    sampling: Sampling
    seed: int
    prompt: Tensor | None  # (L, H), until its first tick
    cache: KeysValues
    frames: int = 0
    ended: bool = False


class TorchTalker:
    """One checkpoint's model, and streams in slots. One thread at a time. `tensors` carries the Hub's names.

    embeddings: the sixteen embedding tables by Hub name, for others to read.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        slots: int,
    ) -> None:
        """Memory for a stream's positions is taken as it gets there, `stack.CHUNK_POSITIONS` at a time."""
        self.config, self.dtype = config, dtype

        def get(name: str) -> Tensor:
            return tensors[name].to(dtype)

        def stack(of: str) -> LaneStack:
            return LaneStack(Qwen3Stack(getattr(config, of), tensors, _PREFIXES[of] + "model.", _CPU, dtype))

        self._talker = stack("talker")
        groups = range(NUM_CODEBOOKS - 1)
        predictor = _PREFIXES["predictor"]
        tables = [tensors[name] for name in CODE_EMBEDDINGS]
        sizes = [len(table) for table in tables]
        # one table, so that a frame's sixteen rows are one look-up
        self._table = torch.cat([table.to(dtype) for table in tables])
        self.embeddings = dict(zip(CODE_EMBEDDINGS, self._table.split(sizes), strict=True))
        self._first_row = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self._codec_head = get("talker.codec_head.weight").t().contiguous()
        projection = predictor + "small_to_mtp_projection."
        self._predictor = LanePredictor(
            stack("predictor"),
            list(self.embeddings.values()),
            [get(f"{predictor}lm_head.{g}.weight").t().contiguous() for g in groups],
            (get(projection + "weight").t().contiguous(), get(projection + "bias"))
            if projection + "weight" in tensors
            else None,
        )
        self._noise = LaneNoise(config)
        self._limits = RestrictedRows(config.talker.vocab_size, config.codec_ids.eos, _CPU)
        self._slots: dict[int, _TalkerSlot] = {}
        self._codes = torch.zeros(slots, NUM_CODEBOOKS, dtype=torch.int64)  # the newest
        self._seen = torch.zeros(slots, config.talker.vocab_size, dtype=torch.bool)

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values that one position of a stream takes."""
        c = self.config.talker
        return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self.dtype.itemsize

    @torch.inference_mode()
    def begin(self, slot: int, prompt_embeds: Tensor, sampling: Sampling, seed: int | None) -> None:
        """A stream in `slot` behind `prompt_embeds` (L, H), which its first tick reads, in place of what was there.

        Raises PromptError for a prompt of another shape; SamplingError for a seed out of range, and for rng="torch".
        """
        check_start(prompt_embeds, self.config.talker.hidden_size, 1)
        if sampling.rng != "philox":
            raise SamplingError(
                f"the batch engine draws by counters, rng='philox'; rng={sampling.rng!r} needs backend='torch' with "
                "engine='single'"
            )
        prompt = prompt_embeds.to(self.dtype, copy=True)
        self._slots[slot] = _TalkerSlot(sampling, checked_seed(seed), prompt, KeysValues(self._talker))
        self._seen[slot] = False

    def leave(self, slot: int) -> None:
        """Ends what is in the slot, if anything, and gives its memory back."""
        self._slots.pop(slot, None)

    def ended(self, slot: int) -> bool:
        """Whether the speech has ended."""
        return self._slots[slot].ended

    @torch.inference_mode()
    def tick(self, slots: Sequence[int], rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One frame of every given slot, in any order -> its codes (16,) int64, or None: end of speech.

        rows: the text embedding (H,) added to the newest codes' embeddings; None exactly at a slot's first tick, whose
        talker input is the prompt: otherwise raises PromptError, before anything is changed.
        """
        if not slots:
            return []
        if [row is None for row in rows] != [self._slots[slot].prompt is not None for slot in slots]:
            raise PromptError(f"slots {slots}: expected no row at a slot's first tick and one at every later tick")
        order = sorted(range(len(slots)), key=lambda i: rows[i] is None)  # those that speak already, then new ones
        slots = [slots[i] for i in order]
        open_slots = [self._slots[slot] for slot in slots]
        text = [rows[i] for i in order if rows[i] is not None]
        lanes = torch.tensor(slots)
        codes = self._draw_codes(self._hidden(lanes[: len(text)], open_slots, text), lanes, open_slots)
        self._codes[lanes] = codes
        self._seen[lanes, codes[:, 0]] = True
        made: list[Tensor | None] = [None] * len(order)
        for place, slot, frame, code0 in zip(order, open_slots, codes, codes[:, 0].tolist(), strict=True):
            slot.ended = code0 == self.config.codec_ids.eos
            slot.frames += not slot.ended
            made[place] = None if slot.ended else frame
        return made

    def _draw_codes(self, hidden: Tensor, lanes: Tensor, slots: Sequence[_TalkerSlot]) -> Tensor:
        """`hidden` (B, H) -> codes (B, 16) int64."""
        count = len(slots)
        missing = LEAST_ROWS - count
        if missing > 0:  # products of few rows round in their own way: the first lane comes again
            slots = [*slots, *[slots[0]] * missing]
            lanes, hidden = torch.cat((lanes, lanes[:1].expand(missing))), filled_up(hidden)
        frames = [slot.frames for slot in slots]
        talker = ChoiceRows.of(tuple(slot.sampling.talker for slot in slots), _CPU)
        predictor = ChoiceRows.of(tuple(slot.sampling.predictor for slot in slots), _CPU)
        noise, later_noise = None, None
        if talker.draws or predictor.draws:
            noise, later_noise = self._noise.draw([slot.seed for slot in slots], frames)
        logits = (hidden @ self._codec_head).float()
        penalties = [slot.sampling.repetition_penalty for slot in slots]
        code0 = talker.choose(self._limits.restrict(logits, self._seen[lanes], penalties, frames), noise)

        def draw(book: int, logits: Tensor) -> Tensor:
            return predictor.choose(logits.float(), None if later_noise is None else later_noise[:, book - 1])

        return self._predictor.codes(hidden, code0, draw)[:count]

    def _hidden(self, lanes: Tensor, slots: Sequence[_TalkerSlot], text: Sequence[Tensor]) -> Tensor:
        """The talker's pass -> hidden states of the newest rows (B, H). The first len(text) slots speak already.

        `lanes` are those slots' indices; the others are new, and their prompts' rows ride along.
        """
        new = slots[len(text) :]
        rows = [slot.prompt for slot in new]
        if text:
            codes = F.embedding(self._codes[lanes] + self._first_row, self._table)  # (N, 16, H)
            rows.insert(0, codes.sum(1) + torch.stack([row.to(self.dtype) for row in text]))
        counts = [1] * len(text) + [len(slot.prompt) for slot in new]
        hidden = advance(self._talker, torch.cat(rows), [slot.cache for slot in slots], counts)
        for slot in new:
            slot.prompt = None
        return hidden
