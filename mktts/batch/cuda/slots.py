"""What the device keeps of every open stream's talker and draws, by slot. Only kernels write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mktts.spec import ModelConfig


@dataclass(frozen=True)
class Slots:
    """Tensors of `count` slots; the last slot is nobody's: padded lanes and rows work on it."""

    count: int
    positions: Tensor  # (slots,) int32: rows in the cache
    frames: Tensor  # (slots,) int32: frames drawn
    ended: Tensor  # (slots,) int32: 1 from the frame on in which end of speech was drawn
    seen: Tensor  # (slots, talker's vocabulary) uint8: code 0 was drawn
    embedding_sum: Tensor  # (slots, H) fp32: of the newest frame

    @classmethod
    def make(cls, config: ModelConfig, count: int, device: torch.device) -> Slots:
        """Slots of which none has begun."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            count=count,
            positions=zeros(count),
            frames=zeros(count),
            ended=zeros(count),
            seen=zeros(count, config.talker.vocab_size, dtype=torch.uint8),
            embedding_sum=zeros(count, config.talker.hidden_size, dtype=torch.float32),
        )

    @staticmethod
    def bytes_each(config: ModelConfig) -> int:
        """Bytes of one slot."""
        return 3 * 4 + config.talker.vocab_size + 4 * config.talker.hidden_size

    @property
    def nobody(self) -> int:
        """The slot of padded lanes and rows."""
        return self.count - 1
