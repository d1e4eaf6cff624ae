"""The lanes in plain PyTorch operators: for the CPU, where operators of these sizes cost by the call, not the row. With
a core to spare, talker and codec have a thread each: while the codec decodes one tick, the talker makes the next one's
codes."""

import time
from collections.abc import Callable, Mapping, Sequence
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
        self._silence = _words(decoder.start())
        # words of a state, since wide ones move fast; memory that no stream has used is not taken yet
        self._rows = self._silence.new_empty(slots, len(self._silence))
        self._gathered = self._silence.new_empty(min(slots, _LANES_AT_A_TIME), len(self._silence))
        self._states: dict[int, CodecState] = {}  # of so many rows of these: their views cost what work does

    @torch.inference_mode()
    def enter(self, slot: int, primed: CodecState | None) -> None:
        """`slot` begins with silence, or with a copy of `primed`."""
        self._rows[slot] = self._silence if primed is None else _words(primed)

    @torch.inference_mode()
    def decode(self, codes: Tensor, slots: Sequence[int]) -> Tensor:
        """The next frame of each slot, once each: codes (B, 16) int64 -> PCM (B, 1920) float32 in [-1, 1]."""
        lanes, pcm = torch.tensor(list(slots)), []
        for some, their_codes in zip(lanes.split(_LANES_AT_A_TIME), codes.split(_LANES_AT_A_TIME), strict=True):
            rows = self._gathered[: len(some)]
            if len(some) not in self._states:
                self._states[len(some)] = CodecState(rows.view(torch.uint8), self._decoder.layout)
            torch.index_select(self._rows, 0, some, out=rows)
            pcm.append(self._decoder.advance(their_codes[:, None], self._states[len(some)]))
            self._rows.index_copy_(0, some, rows)
        return torch.cat(pcm)


def _words(state: CodecState) -> Tensor:
    """The memory of a state as int64 words: its parts start at multiples of 16 bytes, and the last is an int64."""
    return state.flat.view(torch.int64)


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
    """A tick whose codes are made. idle_s: for which the talker had nothing to do before. decoded: gives PCM (n, 1920)
    of the lanes `speaking`, and the seconds it took."""

    codes: np.ndarray
    ended: np.ndarray
    speaking: list[int]
    took_s: float
    idle_s: float
    decoded: Future[tuple[np.ndarray, float]] | None


class _Launched(NamedTuple):
    said: Future[_Said]
    beside: bool  # the codec works beside the next tick's talker
    entered: list[Future[Future]]  # of streams before it: through the talker's thread to the codec's


class TorchLanes:
    """See `mktts.engine.lanes.Lanes`. Prompts enter whole; no prefix is shared. embeddings: as of `Backend`. Everything
    goes through the talker's thread and from there to the codec's, so that both do it in the same order."""

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
        self._entered: list[Future[Future]] = []  # since the last tick
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
        """See Lanes. Waits for the talker of a tick that runs: the next one needs it, and is planned at its end."""
        prompt = segment.prompt.embeds
        if not prompt.isfinite().all():
            raise no_number()
        if anew:
            primed = None if segment.reference is None else self._primed.of(segment.reference)
            self._entered.append(self._talking.submit(self._decoding.submit, self._codec.enter, slot, primed))
        stream = self._backend.start(segment.prompt, segment.sampling, segment.seed)
        self._talking.submit(self._streams.__setitem__, slot, stream).result()

    def leave(self, slot: int) -> None:
        self._talking.submit(self._streams.pop, slot, None)

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> _Launched:
        slots = tick.lanes.tolist()
        self.overlaps = self._threads and len(slots) >= _BESIDE_LANES
        entered, self._entered = self._entered, []
        return _Launched(self._talking.submit(self._talk, slots, list(rows)), self.overlaps, entered)

    def collect(self, launched: _Launched) -> Made:
        codes, ended, speaking, took_s, idle_s, decoded = launched.said.result()
        pcm = np.zeros((len(codes), SAMPLES_PER_FRAME), np.float32)
        for entered in launched.entered:
            entered.result().result()  # a stream that did not enter is why its frame has no place
        if decoded is not None:
            pcm[speaking], codec_s = decoded.result()
            took_s = max(took_s, codec_s) if launched.beside else took_s + codec_s
        return Made(codes, ended, pcm, took_s, idle_s if launched.beside else 0.0)

    # ---- on the talker's thread

    def _talk(self, slots: Sequence[int], rows: Sequence[Tensor | None]) -> _Said:
        """Codes of a tick; its decoding is asked for."""
        begun_s = time.perf_counter()
        idle_s = begun_s - self._talked_s
        streams = [self._streams[slot] for slot in slots]
        talking = [i for i, stream in enumerate(streams) if not stream.ended]
        codes = torch.zeros(len(rows), NUM_CODEBOOKS, dtype=torch.int64)
        if talking:
            codes[talking] = self._backend.tick([streams[i] for i in talking], [rows[i] for i in talking])
        ended = np.array([stream.ended for stream in streams])
        speaking = [i for i in talking if not streams[i].ended and codes[i, 0] >= 0]
        decoded = None
        if speaking:
            decoded = self._decoding.submit(self._decode, [slots[i] for i in speaking], codes[speaking])
        self._talked_s = time.perf_counter()
        return _Said(codes.numpy(), ended, speaking, self._talked_s - begun_s, idle_s, decoded)

    # ---- on the codec's thread

    def _decode(self, slots: Sequence[int], codes: Tensor) -> tuple[np.ndarray, float]:
        begun_s = time.perf_counter()
        pcm = self._codec.decode(codes, slots)
        return pcm.numpy(), time.perf_counter() - begun_s
