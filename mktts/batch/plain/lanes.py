"""The lanes in plain PyTorch operators: for the CPU, where operators of these sizes cost by the call, not the row."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mktts.batch.lanes import Made
from mktts.batch.pages import PAGE_ROWS, Copy, Pages
from mktts.batch.plain.codec import CodecLanes
from mktts.batch.plain.talker import TorchTalker
from mktts.batch.scheduler import TickSettings
from mktts.batch.tick import Tick
from mktts.batch.tick_model import TickModel
from mktts.codec.decoder import CodecDecoder
from mktts.codec.primed import PrimedStates
from mktts.errors import PromptError
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ModelConfig

_FAILED = -1  # code 0 of a lane whose input was no number


class TorchLanes:
    """See `mktts.batch.lanes.Lanes`. A tick is over when `launch` returns; prompts enter whole; no prefix is shared."""

    name = "batch"
    overlaps = False
    deterministic = True  # in fp32; see `lane_stack` for how long sums may be
    precision = "full"
    settings = TickSettings.cpu()
    model = TickModel.cpu()

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        decoder: CodecDecoder,
        slots: int,
        positions: int,
        memory_bytes: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """positions: of one segment. memory_bytes: that keys and values may take; they take it as they grow."""
        self.slots = slots
        self._talker = TorchTalker(config, tensors, decoder.device, dtype, slots, positions)
        self._codec = CodecLanes(decoder, slots)
        self._primed = PrimedStates(decoder)
        pages = min(memory_bytes // (PAGE_ROWS * self._talker.position_bytes), slots * -(-positions // PAGE_ROWS))
        self.pages = Pages(int(pages) + 1, slots, self._talker.positions, max_kept=0)
        self._talker_slot: dict[int, int] = {}
        self._codec_slot: dict[int, int] = {}

    @property
    def embeddings(self) -> Mapping[str, Tensor]:
        """The sixteen embedding tables by Hub name."""
        return self._talker.embeddings

    def enter(self, slot: int, reference: Tensor | None) -> None:
        """See Lanes."""
        self._codec_slot[slot] = self._codec.start(None if reference is None else self._primed.of(reference))

    def forget(self, reference: Tensor) -> None:
        """See Lanes."""
        self._primed.forget(reference)

    def begin(self, slot: int, prompt: Tensor, sampling: Sampling, seed: int, copies: Sequence[Copy] = ()) -> None:
        """See Lanes."""
        if not prompt.isfinite().all():
            raise PromptError("the prompt holds values that are not finite: is the voice's embedding damaged?")
        self._free_talker(slot)
        most = self._talker.positions - len(prompt)
        self._talker_slot[slot] = self._talker.start(prompt, sampling, seed, most)

    def copy(self, copies: Sequence[Copy]) -> None:
        """See Lanes."""

    def leave(self, slot: int) -> None:
        """See Lanes."""
        self._free_talker(slot)
        if slot in self._codec_slot:
            self._codec.free(self._codec_slot.pop(slot))

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Made:
        """See Lanes."""
        begun_s = time.perf_counter()
        count = len(rows)
        codes = np.zeros((count, NUM_CODEBOOKS), np.int64)
        pcm = np.zeros((count, SAMPLES_PER_FRAME), np.float32)
        ended = np.zeros(count, bool)
        sound = [i for i, row in enumerate(rows) if row is None or bool(row.isfinite().all())]
        codes[:, 0] = _FAILED
        slots = [int(tick.lanes[i]) for i in sound]
        made = self._talker.tick([self._talker_slot[slot] for slot in slots], [rows[i] for i in sound])
        speaking = []
        for i, slot, frame in zip(sound, slots, made, strict=True):
            ended[i] = frame is None
            codes[i] = 0 if frame is None else frame.numpy()
            if frame is not None:
                speaking.append((i, slot))
        if speaking:
            lanes = [i for i, _ in speaking]
            decoded = self._codec.decode(
                [self._codec_slot[slot] for _, slot in speaking], torch.from_numpy(codes[lanes])
            )
            pcm[lanes] = decoded.cpu().numpy()
        return Made(codes, ended, pcm, time.perf_counter() - begun_s)

    def collect(self, launched: Made) -> Made:
        """See Lanes."""
        return launched

    def _free_talker(self, slot: int) -> None:
        if slot in self._talker_slot:
            self._talker.free(self._talker_slot.pop(slot))
