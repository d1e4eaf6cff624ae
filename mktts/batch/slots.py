"""What the device keeps of every open stream, by slot, and what the host says to a tick."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mktts.model.sampling import Choice, Sampling
from mktts.spec import NUM_CODEBOOKS, ModelConfig

_OF_A_CHOICE = ("greedy", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Slots:
    """Tensors of `count` slots; the last slot is nobody's: padded lanes and rows work on it.

    Settings (by choice: 0 the talker's, 1 the predictor's) and seeds are written by the host, all else by kernels.
    """

    count: int
    positions: Tensor  # (slots,) int32: rows in the cache
    frames: Tensor  # (slots,) int32: frames drawn
    seeds: Tensor  # (slots, 2) int32: low and high word
    greedy: tuple[Tensor, Tensor]  # (slots,) int32 each
    temperature: tuple[Tensor, Tensor]  # (slots,) fp32
    top_k: tuple[Tensor, Tensor]  # (slots,) int32
    top_p: tuple[Tensor, Tensor]  # (slots,) fp32
    penalty: Tensor  # (slots,) fp32
    seen: Tensor  # (slots, talker's vocabulary) uint8: code 0 was drawn
    codes: Tensor  # (slots, 16) int32: the newest frame
    embedding_sum: Tensor  # (slots, H) fp32: of the newest frame
    table: Tensor  # (slots, pages a slot) int32

    @classmethod
    def make(cls, config: ModelConfig, count: int, pages_a_slot: int, device: torch.device) -> Slots:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def pair(value: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            first, second = (torch.full((count,), value, dtype=dtype, device=device) for _ in range(2))
            return first, second

        return cls(
            count=count,
            positions=zeros(count),
            frames=zeros(count),
            seeds=zeros(count, 2),
            greedy=pair(1, torch.int32),
            temperature=pair(1, torch.float32),
            top_k=pair(0, torch.int32),
            top_p=pair(1, torch.float32),
            penalty=torch.ones(count, device=device),
            seen=zeros(count, config.talker.vocab_size, dtype=torch.uint8),
            codes=zeros(count, NUM_CODEBOOKS),
            embedding_sum=zeros(count, config.talker.hidden_size, dtype=torch.float32),
            table=torch.full((count, pages_a_slot), 0, dtype=torch.int32, device=device),
        )

    @property
    def nobody(self) -> int:
        """The slot of padded lanes and rows."""
        return self.count - 1

    def set(self, slot: int, sampling: Sampling, seed: int, pages: np.ndarray) -> None:
        """Writes a new stream's settings, seed and page table (n,) int32. Queued on the current CUDA stream."""
        for index, choice in enumerate((sampling.talker, sampling.predictor)):
            values: Choice = choice
            for name, value in zip(
                _OF_A_CHOICE, (not values.do_sample, values.temperature, values.top_k, values.top_p), strict=True
            ):
                getattr(self, name)[index][slot] = value
        self.penalty[slot] = sampling.repetition_penalty
        words = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32)
        self.seeds[slot] = torch.from_numpy(words)
        self.table[slot, : len(pages)] = torch.from_numpy(pages)
