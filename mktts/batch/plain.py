"""The lanes in plain PyTorch operators: for the CPU, where operators of these sizes cost by the call, not the row. With
a core to spare, talker and codec have a thread each: while the codec decodes one tick, the talker makes the next one's
codes."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mktts.batch.folded import FoldedStack
from mktts.codec.decoder import CodecDecoder, CodecState, PrimedStates
from mktts.engine.lanes import Made
from mktts.engine.pages import PAGE_ROWS, Pages
from mktts.engine.scheduler import Tick, TickModel, TickSettings
from mktts.engine.stream import Segment
from mktts.model.backend import no_number
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ModelConfig

_LANES_AT_A_TIME = 16  # beyond, an operator gains nothing and its results leave the cache


class CodecLanes:
    """Codec states by slot, each in the bytes of a `CodecState`, and `decode`: the next frame of any. One thread at a
    time."""

    def __init__(self, decoder: CodecDecoder, slots: int) -> None:
        self._decoder = decoder
        # A state as int64 words, since wide ones move fast: its parts start at multiples of 16 bytes, and the last is
        # an int64.
        self._silence = decoder.start().flat.view(torch.int64)
        # memory that no stream has used is not taken yet
        self._rows = self._silence.new_empty(slots, len(self._silence))
        self._gathered = self._silence.new_empty(min(slots, _LANES_AT_A_TIME), len(self._silence))
        self._views: dict[int, tuple[Tensor, ...]] = {}  # of so many rows of these: they cost what work does

    @torch.inference_mode()
    def decode(
        self, codes: Tensor, slots: Sequence[int], entering: Iterable[tuple[int, CodecState | None]] = ()
    ) -> tuple[np.ndarray, float]:
        """The next frame of each slot, once each: codes (B, 16) int64 -> PCM (B, 1920) float32 in [-1, 1], and the
        seconds it took. entering: slots that begin before that with silence, or with a copy of a state."""
        begun_s = time.perf_counter()
        for slot, primed in entering:
            self._rows[slot] = self._silence if primed is None else primed.flat.view(torch.int64)
        lanes, pcm = torch.tensor(slots, dtype=torch.int64), torch.empty(len(slots), SAMPLES_PER_FRAME)
        for first in range(0, len(slots), _LANES_AT_A_TIME):
            group = slice(first, first + _LANES_AT_A_TIME)
            some = lanes[group]
            rows = self._gathered[: len(some)]
            if len(some) not in self._views:
                self._views[len(some)] = self._decoder.layout.views(rows.view(torch.uint8))
            torch.index_select(self._rows, 0, some, out=rows)
            pcm[group] = self._decoder.together(codes[group, None], self._views[len(some)])
            self._rows.index_copy_(0, some, rows)
        return pcm.numpy(), time.perf_counter() - begun_s


class CallersThread(Executor):
    """Work is done when it is submitted, by who submits it."""

    def submit(self, work: Callable, /, *arguments: object) -> Future:
        done: Future = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


_BESIDE_LANES = 2  # one stream alone has nothing to do beside its codec
_BESIDE_TICK_S = 0.04  # a tick can be heard when both halves are over, each as long as a tick


class _Said(NamedTuple):
    """A tick whose codes are made. beside: the codec works beside the next tick's talker. idle_s: for which the talker
    had nothing to do before. decoded: gives what `CodecLanes.decode` does, of the lanes `speaking`."""

    codes: np.ndarray
    ended: np.ndarray
    speaking: list[int]
    beside: bool
    took_s: float
    idle_s: float
    decoded: Future[tuple[np.ndarray, float]]


class TorchLanes:
    """See `mktts.engine.lanes.Lanes`. Prompts enter whole; no prefix is shared. embeddings: as of `Backend`. A tick
    goes through the talker's thread and from there to the codec's, with the streams that are new to it, so that both
    do all in the same order."""

    name = "batch"
    alone = decodes_beside = False
    submit = None
    deterministic = True  # in fp32; see `mktts.model.qwen3`
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
        *,
        threads: bool = False,
    ) -> None:
        """positions: of one segment. memory_bytes: that keys and values may take; they take it as they grow. threads:
        of their own for talker and codec, each with operators of one thread; otherwise the caller's."""
        self.slots, self._threads, self.overlaps = slots, threads, False
        if threads:
            self.settings = replace(self.settings, max_tick_s=_BESIDE_TICK_S)
        self._talked_s = time.perf_counter()  # when the talker's newest tick ended
        # each with operators of one thread
        workers = (ThreadPoolExecutor(1, name, torch.set_num_threads, (1,)) for name in ("mktts-talker", "mktts-codec"))
        self._talking, self._decoding = workers if threads else (CallersThread(), CallersThread())
        self._entering: list[tuple[int, CodecState | None]] = []  # slots of streams that are new since the last tick
        stacks = FoldedStack if dtype == torch.float32 else Qwen3Stack
        self._backend = TorchBackend(config, tensors, "cpu", dtype, stacks=stacks)
        self._streams: dict[int, TorchStream] = {}  # by slot
        self.embeddings = self._backend.embeddings
        self._codec = CodecLanes(decoder, slots)
        self._primed = PrimedStates(decoder)
        positions = min(positions, config.talker.max_position_embeddings)
        position_bytes = config.talker.kv_bytes_per_position // torch.bfloat16.itemsize * dtype.itemsize
        pages = min(memory_bytes // (PAGE_ROWS * position_bytes), slots * -(-positions // PAGE_ROWS))
        self.pages = Pages(int(pages) + 1, slots, positions, max_kept=0)
        self.positions = self.pages.rows_per_slot

    def forget(self, voice: Voice) -> None:
        if voice.codes is not None:
            self._primed.forget(voice.codes)

    def begin(self, slot: int, segment: Segment, anew: bool = True) -> None:
        """See Lanes."""
        prompt = segment.prompt.embeds
        if not prompt.isfinite().all():
            raise no_number()
        if anew:
            primed = None if segment.reference is None else self._primed.of(segment.reference)
            self._entering.append((slot, primed))
        self._streams[slot] = self._backend.open(prompt, segment.sampling, segment.seed)

    def leave(self, slot: int) -> None:
        self._streams.pop(slot, None)

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Future[_Said]:
        slots = tick.lanes.tolist()
        self.overlaps = self._threads and len(slots) >= _BESIDE_LANES
        streams, entering, self._entering = [self._streams[slot] for slot in slots], self._entering, []
        return self._talking.submit(self._talk, slots, streams, rows, entering, self.overlaps)

    def collect(self, launched: Future[_Said]) -> Made:
        said = launched.result()
        pcm = np.zeros((len(said.codes), SAMPLES_PER_FRAME), np.float32)
        pcm[said.speaking], codec_s = said.decoded.result()
        took_s = max(said.took_s, codec_s) if said.beside else said.took_s + codec_s
        return Made(said.codes, said.ended, pcm, took_s, said.idle_s if said.beside else 0.0)

    def _talk(
        self,
        slots: Sequence[int],
        streams: Sequence[TorchStream],
        rows: Sequence[Tensor | None],
        entering: Sequence[tuple[int, CodecState | None]],
        beside: bool,
    ) -> _Said:
        """Codes of a tick, on the talker's thread; their decoding is asked for."""
        begun_s = time.perf_counter()
        idle_s = begun_s - self._talked_s
        talking = [i for i, stream in enumerate(streams) if not stream.ended]
        codes = torch.zeros(len(rows), NUM_CODEBOOKS, dtype=torch.int64)
        if talking:
            codes[talking] = self._backend.tick([streams[i] for i in talking], [rows[i] for i in talking])
        ended = np.array([stream.ended for stream in streams])
        speaking = [i for i in talking if not streams[i].ended and codes[i, 0] >= 0]
        self._talked_s = time.perf_counter()  # in the caller's thread the codec works at once, by a clock of its own
        decoded = self._decoding.submit(self._codec.decode, codes[speaking], [slots[i] for i in speaking], entering)
        return _Said(codes.numpy(), ended, speaking, beside, self._talked_s - begun_s, idle_s, decoded)
