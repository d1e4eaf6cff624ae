"""The lanes in plain PyTorch operators, for the CPU, where operators of these sizes cost by the call, not by the row.
With a core to spare, talker and codec have a thread each: while the codec decodes one tick, the talker makes the codes
of the next one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState, PrimedStates
from mktts.engine.lanes import Made
from mktts.engine.pages import PAGE_ROWS, Pages
from mktts.engine.scheduler import Tick, TickModel, TickSettings
from mktts.engine.stream import Segment
from mktts.model.backend import no_number
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.qwen3 import LEAST_ROWS, KVCache, LayerWeights, Linear, Place, Qwen3Stack, attended
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ModelConfig, StackConfig

_LANES_AT_A_TIME = 16  # beyond that an operator gains nothing, and its results no longer fit the cache


class CodecLanes:
    """The codec states of all slots, each as the bytes of a `CodecState`, and `decode`, which makes the next frame of
    any of them. One thread at a time."""

    def __init__(self, decoder: CodecDecoder, slots: int) -> None:
        self._decoder = decoder
        # A state as int64 words, since wide ones are copied faster: its parts start at multiples of 16 bytes, and the
        # last is an int64.
        self._silence = decoder.start().flat.view(torch.int64)
        # the system gives memory to a slot when its first stream uses it
        self._rows = self._silence.new_empty(slots, len(self._silence))
        self._gathered = self._silence.new_empty(min(slots, _LANES_AT_A_TIME), len(self._silence))
        self._states: dict[int, CodecState] = {}  # by rows of these: making their views costs as much as an operator

    @torch.inference_mode()
    def decode(
        self, codes: Tensor, slots: Sequence[int], entering: Iterable[tuple[int, CodecState | None]] = ()
    ) -> tuple[np.ndarray, float]:
        """The next frame of each slot, once each: codes (B, 16) int64 -> PCM (B, 1920) float32 in [-1, 1], and the
        seconds it took. entering: slots that begin anew before that, with silence or with a copy of a state."""
        begun_s = time.perf_counter()
        for slot, primed in entering:
            self._rows[slot] = self._silence if primed is None else primed.flat.view(torch.int64)
        lanes, pcm = torch.tensor(slots, dtype=torch.int64), torch.empty(len(slots), SAMPLES_PER_FRAME)
        for first in range(0, len(slots), _LANES_AT_A_TIME):
            group = slice(first, first + _LANES_AT_A_TIME)
            some = lanes[group]
            rows = self._gathered[: len(some)]
            if len(some) not in self._states:
                self._states[len(some)] = CodecState(rows.view(torch.uint8), self._decoder.layout)
            torch.index_select(self._rows, 0, some, out=rows)
            pcm[group] = self._decoder.advance(codes[group, None], self._states[len(some)])
            self._rows.index_copy_(0, some, rows)
        return pcm.numpy(), time.perf_counter() - begun_s


class CallersThread(Executor):
    """Does work at once, in the thread that submits it."""

    def submit(self, work: Callable, /, *arguments: object) -> Future:
        done: Future = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


_BESIDE_LANES = 2  # from so many lanes on the codec runs beside the talker; one stream has nothing to do meanwhile
_BESIDE_TICK_S = 0.04  # a tick can be heard when both of its halves are over, each as long as a tick

# A tick without its PCM; the lanes that speak; whether the codec runs beside the next tick's talker; PCM and seconds.
_Said = tuple[Made, list[int], bool, Future[tuple[np.ndarray, float]]]


class TorchLanes:
    """See `mktts.engine.lanes.Lanes`. Prompts enter whole; no prefix is shared. embeddings: as in `Backend`. A tick
    goes through the talker's thread and then the codec's, together with the streams that begin in it, so that both
    threads see everything in the same order."""

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
        """positions: of one segment. memory_bytes: for keys and values, at most; they take it as they grow. threads:
        one each for talker and codec, with operators of one thread; otherwise both use the caller's."""
        self.slots, self._threads, self.overlaps = slots, threads, False
        if threads:
            self.settings = replace(self.settings, max_tick_s=_BESIDE_TICK_S)
        self._talked_s = time.perf_counter()  # when the talker's newest tick ended
        # operators in each of them use one thread
        workers = (ThreadPoolExecutor(1, name, torch.set_num_threads, (1,)) for name in ("mktts-talker", "mktts-codec"))
        self._talking, self._decoding = workers if threads else (CallersThread(), CallersThread())
        self._entering: list[tuple[int, CodecState | None]] = []  # slots of streams that began since the last tick
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
        if not segment.prompt.embeds.isfinite().all():
            raise no_number()
        if anew:
            primed = None if segment.reference is None else self._primed.of(segment.reference)
            self._entering.append((slot, primed))
        self._streams[slot] = self._backend.start(segment.prompt, segment.sampling, segment.seed)

    def leave(self, slot: int) -> None:
        self._streams.pop(slot, None)

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Future[_Said]:
        slots = tick.lanes.tolist()
        self.overlaps = self._threads and len(slots) >= _BESIDE_LANES
        streams, entering, self._entering = [self._streams[slot] for slot in slots], self._entering, []
        return self._talking.submit(self._talk, slots, streams, rows, entering, self.overlaps)

    def collect(self, launched: Future[_Said]) -> Made:
        made, speaking, beside, decoded = launched.result()
        made.pcm[speaking], codec_s = decoded.result()
        return made._replace(took_s=max(made.took_s, codec_s) if beside else made.took_s + codec_s)

    def _talk(
        self,
        slots: Sequence[int],
        streams: Sequence[TorchStream],
        rows: Sequence[Tensor | None],
        entering: Sequence[tuple[int, CodecState | None]],
        beside: bool,
    ) -> _Said:
        """Makes the codes of a tick, on the talker's thread, and submits them to be decoded."""
        begun_s = time.perf_counter()
        idle_s = begun_s - self._talked_s if beside else 0.0
        talking = [i for i, stream in enumerate(streams) if not stream.ended]
        codes = torch.zeros(len(rows), NUM_CODEBOOKS, dtype=torch.int64)
        if talking:
            codes[talking] = self._backend.tick([streams[i] for i in talking], [rows[i] for i in talking])
        ended = np.array([stream.ended for stream in streams])
        speaking = [i for i in talking if not streams[i].ended and codes[i, 0] >= 0]
        self._talked_s = time.perf_counter()  # before `submit`, which decodes here if there is no thread for it
        decoded = self._decoding.submit(self._codec.decode, codes[speaking], [slots[i] for i in speaking], entering)
        pcm = np.zeros((len(codes), SAMPLES_PER_FRAME), np.float32)
        return Made(codes.numpy(), ended, pcm, self._talked_s - begun_s, idle_s), speaking, beside, decoded


# ---- the talker's and the predictor's stack


@dataclass(frozen=True)
class FoldedWeights:
    """One layer of a `FoldedStack`; D: head_dim; K: key and value heads, each with G query heads. Heads are ordered by
    key head: its G query heads, itself, its value head."""

    qkv: Linear  # H -> K (G + 2) D
    head_norm: Tensor  # (K, G + 1, D)
    o: Linear
    gate_up: Linear
    down: Linear


class _LayerMemory:
    """Working memory of one layer of a `FoldedStack`, with all views of it, each made once: making a view costs as much
    as an operator."""

    def __init__(self, stack: FoldedStack, heads: Tensor, count: int, like: _LayerMemory | None = None) -> None:
        """heads: (R, K, G + 2, D), of which attention reads the first `count` rows. like: for as many rows; its memory
        that is in use only between two operators is used here too."""
        self.heads, self.flat = heads, heads.flatten(1)
        self.turned = heads[:count, :, :-1]  # queries and keys, normed and rotated
        self.unit = self.turned.new_empty(self.turned.shape) if like is None else like.unit
        self.gated = heads.new_empty(len(heads), 2 * stack.config.intermediate_size) if like is None else like.gated
        self.gate, self.up = self.gated.chunk(2, -1)
        # (count, K, G + 1, D / 2) complex, the same memory
        self.pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (self.unit, self.turned)]
        # for one position of a frame: queries (B K, G, D), keys (B K, D, positions) and values (B K, positions, D)
        self.attends: tuple[Tensor, Tensor, Tensor] | None = None
        # for each row that is its stream's only one: keys and values (2, 1, K, 1, D), and queries (1, K, G, D)
        self.single: list[tuple[Tensor, Tensor]] = []


class _FrameCache(KVCache):
    """The keys and values of a frame for B streams, in the memory in which a `FoldedStack` makes all its heads."""

    def __init__(self, stack: FoldedStack, heads: Tensor) -> None:
        """heads: (layers, 16, B, K, G + 2, D)."""
        streams, memory = heads.shape[2], None
        super().__init__(heads[..., -2:, :].permute(0, 4, 2, 3, 1, 5), NUM_CODEBOOKS)
        self.steps = []  # for every position: the rotations of its rows, and the memory of every layer
        for position in range(NUM_CODEBOOKS):
            layers = []
            for of_layer in heads:
                rows = of_layer[: position + 1].flatten(1, 2).transpose(0, 1)  # (B K, positions, G + 2, D)
                memory = _LayerMemory(stack, of_layer[position], streams, memory)
                memory.attends = rows[:, -1, :-2], rows[:, :, -2].transpose(1, 2), rows[:, :, -1]
                layers.append(memory)
            self.steps.append((stack.turns([position] * streams), layers))


class FoldedStack(Qwen3Stack):
    """A `Qwen3Stack`, the same up to rounding, for fp32 on a CPU: half as many operators, and no row depends on others.
    Norm weights are multiplied into the matrices behind them; the halves of a head are interleaved, so that its
    rotation is one complex product. A pass may overwrite the rows that it is given."""

    exact = False
    linear = staticmethod(Linear.packed)

    def __init__(
        self, config: StackConfig, tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(config, tensors, prefix, device, dtype)
        c = config
        self.norm = self.norm * math.sqrt(c.hidden_size)
        self._floor = {n: torch.tensor(math.sqrt(n * c.rms_norm_eps)) for n in (c.hidden_size, c.head_dim)}
        w = self.layers[0]
        packed = all(linear.weight.is_mkldnn for linear in (w.qkv, w.o, w.gate_up, w.down))
        self._least = 1 if packed else LEAST_ROWS  # the fewest rows of a pass
        heads = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads + 2, c.head_dim
        self._memory = self.norm.new_empty(c.num_hidden_layers, NUM_CODEBOOKS, 0, *heads)  # one for all frames
        self._frames: dict[int, _FrameCache] = {}  # by number of streams

    def _read(self, get: Callable[[str], Tensor], index: int) -> FoldedWeights:
        c, w = self.config, LayerWeights.read(get, index)
        kinds, group = (c.num_key_value_heads, -1, c.head_dim), c.num_attention_heads // c.num_key_value_heads
        by_head = torch.cat([part.view(*kinds, c.hidden_size) for part in (w.q, w.k, w.v)], 1)  # (K, G + 2, D, H)
        by_head[:, :-1] = _interleaved(by_head[:, :-1], 2)
        head_norm = _interleaved(torch.stack([*[w.q_norm] * group, w.k_norm]), 1)
        # `_unit` leaves out sqrt(D) for queries and for keys, and attention would divide by it: one remains, here
        head_norm[-1] *= math.sqrt(c.head_dim)
        length = math.sqrt(c.hidden_size)
        return FoldedWeights(
            qkv=Linear.packed(by_head.flatten(0, 2) * (w.input_norm * length)),
            head_norm=head_norm.repeat(c.num_key_value_heads, 1, 1),
            o=Linear.packed(w.o),
            gate_up=Linear.packed(torch.cat((w.gate, w.up)) * (w.post_norm * length)),
            down=Linear.packed(w.down),
        )

    def new_cache(self, positions: int, streams: int | None = None, grows: bool = False) -> KVCache:
        if streams is None:
            return super().new_cache(positions, grows=grows)
        streams = max(streams, self._least)
        layers, positions, most, *heads = self._memory.shape
        if streams > most:
            self._memory = self._memory.new_empty(layers, positions, streams, *heads)
            self._frames.clear()
        if streams not in self._frames:
            self._frames[streams] = _FrameCache(self, self._memory[:, :, :streams])
        self._frames[streams].length = 0
        return self._frames[streams]

    def advance(self, x: Tensor, caches: Sequence[KVCache], counts: Sequence[int]) -> Tensor:
        frame, count = caches[0], x.shape[0]
        if isinstance(frame, _FrameCache):  # it may have more streams than were asked for
            x = filled_up(x, counts[0] * self._least)
            count = x.shape[0]
            if counts[0] == 1:
                turns, layers = frame.steps[frame.length]
                frame.length += 1
                for w, memory in zip(self.layers, layers, strict=True):
                    x = self.layer(w, x, turns, (), memory)
                return self.final(x)
        x = filled_up(x, self._least)
        self._pass = memory = _LayerMemory(self, x.new_empty(x.shape[0], *self._memory.shape[3:]), count)
        if 1 in counts:
            newest = memory.heads[:, :, -2:].transpose(1, 2)[:, :, None, :, None]
            memory.single = list(zip(newest.unbind(), memory.heads[:, None, :, :-2].unbind(), strict=True))
        return super().advance(x, caches, counts)[:count]

    def layer(
        self,
        w: FoldedWeights,
        x: Tensor,
        turns: tuple[Tensor, ...],
        places: Sequence[Place],
        memory: _LayerMemory | None = None,
    ) -> Tensor:
        """One layer over rows `x` (R, H), which it overwrites. memory: for a frame's position, without `places`."""
        memory = memory or self._pass
        w.qkv(self._unit(x), out=memory.flat)
        self._unit(memory.turned, out=memory.unit).mul_(w.head_norm)
        torch.mul(memory.pairs[0], turns[0], out=memory.pairs[1])
        if memory.attends is not None:  # the heads that share keys are the rows of one small product
            queries, keys, values = memory.attends
            rows = torch.bmm(torch.bmm(queries, keys).softmax(-1), values).view(x.shape[0], -1)
        else:
            parts, at = [], 0
            for place in places:
                count = place.keys.shape[0] * place.count
                if count == 1:  # heads that share keys are rows of one head
                    newest, query = memory.single[at]
                    place.new.copy_(newest)
                    parts.append(F.scaled_dot_product_attention(query, place.keys, place.values, scale=1.0).flatten(1))
                else:
                    heads = memory.heads[at : at + count]
                    parts.append(attended(heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1], place, 1.0))
                at += count
            rows = filled_up(torch.cat(parts), self._least)
        x = w.o(rows, onto=x)
        w.gate_up(self._unit(x), out=memory.gated)
        return w.down(F.silu(memory.gate, inplace=True).mul_(memory.up), onto=x)

    def _turn_table(self, positions: int) -> tuple[Tensor, ...]:
        """The rotations of all positions: (positions, 1, 1, D / 2) complex."""
        angle = torch.outer(torch.arange(positions).float(), self._inverse_frequency)
        return (torch.complex(angle.cos(), angle.sin())[:, None, None],)

    def final(self, x: Tensor) -> Tensor:
        return self._unit(x).mul_(self.norm)

    def _unit(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """RMSNorm over the last dimension, times 1 / sqrt(n): three operators in place of six."""
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor[x.shape[-1]])
        return torch.div(x, length, out=out)


def filled_up(x: Tensor, least: int) -> Tensor:
    """Rows (R, ...), with the first one again up to `least`, so that a BLAS computes each of them in the same way."""
    missing = least - x.shape[0]
    return x if missing <= 0 else torch.cat((x, x[:1].expand(missing, *x.shape[1:])))


def _interleaved(x: Tensor, dim: int) -> Tensor:
    """Entries 0, 1, 2, ... of `dim` become those that were at 0, n / 2, 1, n / 2 + 1, ..."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)
