"""Gumbel noise of one frame of many streams: the bits of `mktts.model.sampling.gumbel`, all lanes and books at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mktts.model.sampling import KEY_STEPS, MULTIPLIERS, ROUNDS, STREAM, exact_log
from mktts.spec import NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig

_WORD, _HALF_BITS, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(9)
_HALF, _UNIT = np.float32(0.5), np.float32(2**-23)
_IDS = 4  # of one block of Philox
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

    def draw(self, seeds: Sequence[int], frames: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
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
        return torch.from_numpy(code0).to(device), torch.from_numpy(later).to(device)

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
