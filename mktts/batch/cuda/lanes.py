"""Many utterances at once on a CUDA device: a tick is one CUDA graph, of the smallest bucket that it fits into. All
work is queued on one CUDA stream of its own, so that a slot or page that changes hands while ticks still run does so
after them."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.batch import BatchSettings
from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.cuda.frame import BatchFrame, FrameWeights, PagedMemory
from mktts.batch.cuda.kernels.products import CublasProducts, FixedOrderProducts
from mktts.batch.cuda.memory import LaneMemory, shared_spaces, slot_shapes, space_shapes
from mktts.batch.cuda.stage import SETTINGS, BlockLayout, Stage, packed, uploaded
from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder, PrimedStates
from mktts.codec.packed import Precision
from mktts.common import announced, checked_int
from mktts.engine.lanes import Made
from mktts.engine.pages import Pages
from mktts.engine.scheduler import Tick, TickModel, TickSettings
from mktts.engine.stream import Segment
from mktts.errors import CapacityError, EngineError, PromptError, SamplingError
from mktts.kernel.triton_kernels import compiling
from mktts.model.backend import CODE_EMBEDDINGS
from mktts.model.cuda_graph import record
from mktts.model.prompt import AddressedRows
from mktts.model.sampling import SEED_BITS
from mktts.model.voice import Voice
from mktts.spec import ModelConfig

_MOST_WAITING = 2  # launched ticks in flight
_STAGES = 3  # one more, so that the next launch does not overwrite what was collected last
_STREAMS = 2_048
_TEXT_TABLE = "talker.model.text_embedding.weight"
_MEMORY_SHARE = 0.8  # of what is free: graphs, the working memory of prompts and whatever else runs need the rest
_SLOTS_SHARE = 0.25  # of that, at most, for slots, which take memory whether they have a stream or not


class CudaLanes:
    """See `mktts.engine.lanes.Lanes`. One thread owns it. embeddings: the sixteen embedding tables by Hub name, on the
    device."""

    name = "batch"
    alone = decodes_beside = False
    submit = None
    overlaps = True

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        slots: int,
        positions: int,
        pages: int,
        codec: CudaCodec,
        primed: Callable[[], PrimedStates] | None = None,
        settings: TickSettings | None = None,
        graphs: bool = True,
        deterministic: bool = False,
    ) -> None:
        """Allocates the device's memory, and the buckets' frames.

        tensors: by Hub name; those that the device has in this dtype are shared. slots: the engine's. positions: of the
        longest stream, prompt and frames. pages: with page 0; `LaneMemory` has what all this takes.

        codec: with slots + 1 slots. primed: makes codec states from references, when the first is needed.
        settings: its buckets are those that run. graphs: record them in `prepare`, or at a bucket's first tick;
        otherwise every tick is launched kernel by kernel.
        deterministic: a stream's codes depend neither on its neighbours nor on the bucket.

        Raises CapacityError where the device has no memory for the pages, or not even one stream could open."""
        self.config, self.device, self.dtype, self.slots = config, device, dtype, slots
        self.settings, self.model = settings or TickSettings.h200(), TickModel.h200()
        self.pages = Pages(pages, slots, positions)
        self.positions = self.pages.rows_per_slot
        self._memory = PagedMemory(self.pages, config.talker, pages, device, dtype)
        weights = FrameWeights(config, tensors, device, dtype, self._memory.positions)
        self.deterministic = deterministic
        self.precision: Precision = "fast" if codec.name.endswith("fast") else "full"
        self.embeddings = dict(zip(CODE_EMBEDDINGS, weights.embeddings, strict=True))
        self._codec, self._make_primed = codec, primed
        self._primed: PrimedStates | None = None
        (state,) = shared_spaces([slot_shapes(config, slots + 1)], device)
        products = FixedOrderProducts(device) if deterministic else CublasProducts()
        layouts = [BlockLayout(*size) for size in self.settings.buckets]
        words, most = max(layout.words for layout in layouts), max(layout.lanes for layout in layouts)
        self._block = torch.zeros(words, dtype=torch.int64, device=device)
        spaces = shared_spaces([space_shapes(config, dtype, of.lanes, of.prompt_rows) for of in layouts], device)
        self._buckets = {
            (layout.lanes, layout.prompt_rows): BatchFrame(
                weights, state, self._memory, layout, self._block, space, products, codec
            )
            for layout, space in zip(layouts, spaces, strict=True)
        }
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._settings = np.zeros((slots, SETTINGS), np.int32)
        self._prompts: dict[int, AddressedRows] = {}
        self._stages = deque(Stage(words, most) for _ in range(_STAGES))
        self._waiting: deque[Stage] = deque()
        self._kept: list[Any] = []  # until the next tick is over
        self._silent: set[int] = set()  # slots of new streams, whose codec states are cleared before the next tick
        self._after_caller()

    # ---- buckets

    def prepare(self) -> None:
        """Records the CUDA graphs of all buckets, the largest first, since the others share its memory. Takes some
        seconds, and more if kernels must be compiled."""
        if self._pool is None:
            return
        buckets = [self._buckets[size] for size in sorted(self._buckets, reverse=True)]
        with (
            announced("mktts: loading the batch engine's kernels (a new one is compiled, once)"),
            torch.cuda.stream(self._stream),
            compiling(),
        ):
            for bucket in buckets:
                bucket.run()
        with announced(f"mktts: recording {len(buckets)} CUDA graphs of the batch engine"):
            for bucket in buckets:
                self._record(bucket)

    def _record(self, bucket: BatchFrame) -> None:
        """Records a bucket's CUDA graph, once; for that it runs on padding."""
        if bucket.replay is not None or self._pool is None:
            return
        with torch.cuda.stream(self._stream):
            self._block[: bucket.layout.words].copy_(torch.from_numpy(bucket.padded))
        bucket.replay = record(bucket.run, self._pool, self._stream).replay

    # ---- streams

    def _begin_codec(self, slot: int, reference: Tensor | None) -> None:
        if reference is None:
            self._silent.add(slot)  # many new streams are cleared together
            return
        if self._primed is None:
            self._primed = self._make_primed()
        state = self._primed.of(reference)
        self._silent.discard(slot)
        self._after_caller()
        with torch.cuda.stream(self._stream):
            self._codec.enter(slot, state)
        self._kept += [reference, state]

    def forget(self, voice: Voice) -> None:
        if self._primed is not None and voice.codes is not None:
            self._primed.forget(voice.codes)

    def begin(self, slot: int, segment: Segment, anew: bool = True) -> None:
        """See `Lanes.begin`. Raises PromptError for a prompt of another shape, or longer than a stream may be."""
        prompt, sampling = segment.prompt.embeds, segment.sampling
        width, most = self.config.talker.hidden_size, self._memory.positions
        if len(prompt.shape) != 2 or not 0 < len(prompt) <= most or prompt.shape[1] != width:
            raise PromptError(f"a prompt must be (1 to {most}, {width}), got {tuple(prompt.shape)}")
        checked_int("seed", segment.seed, 0, 2**SEED_BITS - 1, SamplingError)
        self._settings[slot] = packed(sampling, int(segment.seed))
        if anew:
            self._begin_codec(slot, segment.reference)
        if isinstance(prompt, Tensor):
            prompt = AddressedRows.of(prompt.to(self.device, self.dtype).contiguous())
        self._prompts[slot] = prompt

    def leave(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    # ---- ticks

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Stage:
        """See `Lanes.launch`. Raises EngineError for a tick that does not fit its bucket or the prompts that have
        begun, or for a third one in flight, PromptError for a row that is missing, extra or misshapen; nothing is
        changed then."""
        bucket = self._buckets.get(tick.bucket)
        if bucket is None:
            raise EngineError(f"{tick.bucket} (lanes, prompt rows) is none of the buckets {sorted(self._buckets)}")
        if len(self._waiting) == _MOST_WAITING:
            raise EngineError(f"{_MOST_WAITING} launched ticks wait already: collect one first")
        prompts = self._entering(bucket.layout, tick)
        text, made_here = self._addresses(tick, rows)
        self._record(bucket)
        stage, words = self._stages.popleft(), bucket.layout.words
        stage.numbers[:words] = bucket.padded
        addresses = [prompt.addresses for prompt in prompts]
        bucket.layout.fill(stage.numbers, tick, text, self._settings, addresses)
        stage.kept = [*self._kept, *prompts, *rows, *made_here]
        self._kept = []
        self._after_caller()
        with torch.cuda.stream(self._stream):
            stage.begin(self._waiting[-1] if self._waiting else None)
            self._memory.push()
            if self._silent:
                self._codec.silence(uploaded(np.array(sorted(self._silent), np.int64), self.device))
                self._silent.clear()
            self._block[:words].copy_(stage.block[:words], non_blocking=True)
            (bucket.replay or bucket.run)()
            stage.end(bucket.space.made, bucket.space.pcm, len(tick.lanes))
        for piece in tick.pieces:
            if piece.last:
                del self._prompts[piece.slot]
        self._waiting.append(stage)
        return stage

    def collect(self, launched: Stage) -> Made:
        """See `Lanes.collect`. Raises EngineError for any but the oldest launched tick."""
        if not self._waiting or self._waiting[0] is not launched:
            raise EngineError("ticks are collected once each, in the order in which they were launched")
        made = launched.collect()
        self._stages.append(self._waiting.popleft())
        return made

    def _entering(self, layout: BlockLayout, tick: Tick) -> list[AddressedRows]:
        prompts = []
        for piece in tick.pieces:
            prompt = self._prompts.get(piece.slot)
            end = piece.start + piece.rows
            if prompt is None or piece.rows < 1 or end > len(prompt) or piece.last != (end == len(prompt)):
                of = "no prompt" if prompt is None else f"a prompt of {len(prompt)} rows"
                raise EngineError(f"{piece} does not fit slot {piece.slot}, which has {of} to enter")
            prompts.append(prompt)
        new, rows = [piece.slot for piece in tick.pieces if piece.last], sum(piece.rows for piece in tick.pieces)
        if len(tick.lanes) > layout.lanes or rows > layout.prompt_rows or tick.lanes[: tick.new_lanes].tolist() != new:
            raise EngineError(
                f"a tick of {len(tick.lanes)} lanes, the first {tick.new_lanes} of them new, and {rows} prompt "
                f"rows, which end the prompts of slots {new}, does not fit a bucket of {layout}"
            )
        return prompts

    def _addresses(self, tick: Tick, rows: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
        """The addresses of the text rows of all but the new lanes, and the rows that were copied for this tick."""
        new, width, dtype = tick.new_lanes, self.config.talker.hidden_size, self.dtype
        if len(rows) != len(tick.lanes) or any(row is not None for row in rows[:new]):
            raise PromptError(f"expected {len(tick.lanes)} rows, None for the first {new} of them, got {len(rows)}")
        index = self._block.get_device()
        addresses, made = [], []
        checked = None  # most rows are one and the same, that after the end of a text
        for lane, row in enumerate(rows[new:], new):
            if addresses and row is checked:
                addresses.append(addresses[-1])
                continue
            if row is None or row.numel() != width:
                found = None if row is None else tuple(row.shape)
                raise PromptError(f"slot {tick.lanes[lane]}: a text row must be ({width},), got {found}")
            checked = row
            if row.dtype is not dtype or row.get_device() != index or not row.is_contiguous():
                row = row.to(self.device, dtype).contiguous()
                made.append(row)
            addresses.append(row.data_ptr())
        return addresses, made

    def _after_caller(self) -> None:
        """Makes work that is queued from now on wait for what the caller's CUDA stream holds."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))


# ---- of a checkpoint, sized by the memory that is free


def cuda_lanes(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    settings: BatchSettings,
    deterministic: bool | None = None,
    embeddings: Mapping[str, Tensor] | None = None,
) -> CudaLanes:
    """Lanes, sized by the free memory, whose graphs are recorded. embeddings: the codebooks' tables by Hub name, if the
    device has them. Raises CapacityError where the memory does not hold one stream."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    plain = partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), device)
    decoder: CodecDecoder | None = plain()
    # A slot holds a state of the decoder, in fp16 at fast precision, and one more position of keys and values.
    state_bytes = int(1.02 * decoder.start().flat.nbytes) // (1 if settings.codec == "full" else 2)
    each = LaneMemory(config, dtype, settings.positions, state_bytes)
    # Talker and predictor, and the projected text rows; the text table itself stays in its file.
    weights = sum(one.numel() for name, one in tensors.items() if name.startswith("talker.") and name != _TEXT_TABLE)
    weights += len(tensors[_TEXT_TABLE]) * config.talker.hidden_size
    free = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]) - each.tick - weights * dtype.itemsize
    slots = settings.max_streams or max(1, min(_STREAMS, int(_SLOTS_SHARE * free / each.slot)))
    left = free - each.slot * (slots + 1) if settings.memory_bytes is None else settings.memory_bytes
    pages = left // each.page
    if pages < 2:
        needed = each.slot * (slots + 1) + 2 * each.page + each.tick
        raise CapacityError(
            f"the batch engine needs {needed >> 20} MiB for {slots} streams and one page of keys and "
            f"values, {max(free, 0) >> 20} MiB can be had: lower BatchSettings(max_streams=...), or free the device"
        )
    codec = CudaCodec(lambda: decoder, slots + 1, settings.codec)
    decoder = None
    lanes = CudaLanes(
        config,
        {**tensors, **(embeddings or {})},
        device,
        dtype,
        slots=slots,
        positions=min(settings.positions, config.talker.max_position_embeddings),
        pages=int(pages),
        codec=codec,
        primed=lambda: PrimedStates(plain()),
        settings=TickSettings.h200(slots),
        deterministic=deterministic is not False,
    )
    lanes.prepare()
    logging.getLogger(__name__).info(
        "batch engine: %d streams, %d pages of 64 positions (%.1f GiB), codec in %s precision",
        slots, pages, pages * each.page / 2**30, settings.codec,
    )  # fmt: skip
    return lanes
