"""Many utterances on a CUDA device at once: one frame each a tick, one CUDA graph of the smallest bucket that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mktts.batch.frame import PAGE_ROWS, Frame
from mktts.batch.products import products_for
from mktts.batch.slots import Slots
from mktts.batch.weights import FrameWeights
from mktts.errors import CapacityError, SamplingError
from mktts.model.cuda_graph import record
from mktts.model.sampling import Sampling, checked_seed
from mktts.spec import NUM_CODEBOOKS, ModelConfig

LANES = (8, 32, 64, 128, 256, 512)
PROMPT_ROWS = (0, 64, 256, 1024)


@dataclass
class _Open:
    """A slot in use. prompt: (L, H) until its first frame."""

    prompt: Tensor | None
    pages: list[int]
    max_frames: int
    frames: int = 0


class CudaLanes:
    """Talker, predictor and draws of many utterances. Not thread-safe: one thread owns it."""

    name = "batch"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        max_streams: int,
        positions: int,
        pages: int,
        embeddings: list[Tensor] | None = None,
        graphs: bool = True,
        deterministic: bool = False,
    ) -> None:
        """positions: of the longest stream, prompt and frames. pages: of PAGE_ROWS positions, shared by all streams.

        deterministic: a stream's codes depend neither on its neighbours nor on the bucket.
        """
        self.config, self.device = config, device
        self._weights = FrameWeights.load(config, tensors, device, dtype, positions, embeddings)
        self._slots = Slots.make(config, max_streams + 1, -(-positions // PAGE_ROWS), device)
        c = config.talker
        shape = (pages + 1, c.num_hidden_layers, c.num_key_value_heads, 2, PAGE_ROWS, c.head_dim)
        self._pages = torch.zeros(shape, dtype=dtype, device=device)
        self._free_pages = list(range(pages, 0, -1))  # page 0 is nobody's
        self._free_slots = list(range(max_streams - 1, -1, -1))
        self._open: dict[int, _Open] = {}
        self._graphs = graphs
        self._products = products_for(device, dtype, deterministic)
        self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._buckets: dict[tuple[int, int], tuple[Frame, object]] = {}
        self._codes = torch.zeros(LANES[-1], NUM_CODEBOOKS, dtype=torch.int32, pin_memory=True)

    def start(self, prompt: Tensor, sampling: Sampling, seed: int | None, max_frames: int) -> int:
        """A slot for an utterance of `prompt` (L, H) and up to `max_frames` frames, whose memory is reserved.

        Raises CapacityError where no slot or page is free, SamplingError for rng="torch".
        """
        if sampling.rng != "philox":
            raise SamplingError(f"the batch engine draws with rng='philox', got {sampling.rng!r}")
        rows = len(prompt) + max_frames
        needed = -(-rows // PAGE_ROWS)
        if len(prompt) > PROMPT_ROWS[-1]:
            raise CapacityError(f"a prompt may have {PROMPT_ROWS[-1]} rows, got {len(prompt)}")
        if not self._free_slots or needed > len(self._free_pages) or needed > self._slots.table.shape[1]:
            raise CapacityError(
                f"a stream of {rows} rows needs a slot and {needed} pages; free are {len(self._free_slots)} slots and "
                f"{len(self._free_pages)} pages: wait for a stream to end, or lower max_frames"
            )
        slot = self._free_slots.pop()
        pages = [self._free_pages.pop() for _ in range(needed)]
        self._slots.set(slot, sampling, checked_seed(seed), np.array(pages, dtype=np.int32))
        self._open[slot] = _Open(prompt, pages, max_frames)
        return slot

    def free(self, slot: int) -> None:
        """Gives the slot and its pages back."""
        self._free_pages += self._open.pop(slot).pages
        self._free_slots.append(slot)

    def tick(self, slots: Sequence[int], rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One frame of each slot: codes (16,) int64 on the host, or None at end-of-speech.

        rows: the text row (H,) added to the previous frame's codes, None exactly at a slot's first frame.
        """
        prompts = [self._open[slot].prompt for slot in slots]
        frame, replay = self._bucket(len(slots), sum(len(p) for p in prompts if p is not None))
        self._place(frame, slots, rows, prompts)
        replay()
        codes = self._codes[: len(slots)]
        codes.copy_(self._slots.codes[frame.lanes[: len(slots)].long()], non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        found: list[Tensor | None] = []
        for slot, row in zip(slots, codes.long(), strict=True):
            state = self._open[slot]
            state.prompt = None
            state.frames += 1
            found.append(None if int(row[0]) == self._weights.eos else row)
        return found

    def _place(
        self, frame: Frame, slots: Sequence[int], rows: Sequence[Tensor | None], prompts: Sequence[Tensor | None]
    ) -> None:
        """Writes what the bucket's work reads: one block of numbers, the text rows, the prompts' rows."""
        count, padded = len(slots), frame.lane_count
        block = np.zeros((4, padded), dtype=np.int32)
        block[0], block[1] = self._slots.nobody, 1
        block[0, :count] = slots
        block[1, :count] = [p is not None for p in prompts]
        block[2, :count] = [0 if p is None else len(p) for p in prompts]
        block[3] = np.arange(padded)
        prompt_slot = np.full(frame.prompt_rows, self._slots.nobody, dtype=np.int32)
        prompt_pos = np.zeros(frame.prompt_rows, dtype=np.int32)
        at = 0
        for lane, prompt in enumerate(prompts):
            if prompt is not None:
                end = at + len(prompt)
                frame.prompt[at:end] = prompt
                prompt_slot[at:end] = slots[lane]
                prompt_pos[at:end] = np.arange(len(prompt))
                block[3, lane] = padded + end - 1
                at = end
        device = torch.from_numpy(block).pin_memory().to(self.device, non_blocking=True)
        frame.lanes.copy_(device[0])
        frame.fresh.copy_(device[1])
        frame.start_rows.copy_(device[2])
        frame.selected.copy_(device[3])
        if frame.prompt_rows:
            frame.prompt_slot.copy_(torch.from_numpy(prompt_slot))
            frame.prompt_pos.copy_(torch.from_numpy(prompt_pos))
        lanes = [lane for lane, row in enumerate(rows) if row is not None]
        if lanes:
            frame.text[torch.tensor(lanes, device=self.device)] = torch.stack([rows[lane] for lane in lanes])

    def _bucket(self, lanes: int, prompt_rows: int) -> tuple[Frame, object]:
        size = (
            next(size for size in LANES if size >= lanes),
            next(size for size in PROMPT_ROWS if size >= prompt_rows),
        )
        if size not in self._buckets:
            frame = Frame(self._weights, self._slots, self._pages, *size, self._products)
            run = record(frame.run, self._pool, self._side).replay if self._graphs else frame.run
            self._buckets[size] = (frame, run)
        return self._buckets[size]
