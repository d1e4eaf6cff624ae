"""The oracle's frame as two CUDA graphs in plain PyTorch: how fast the operators themselves can be, without launches.

The talker's cache has a fixed length and a mask; position, history and draws live in static tensors, so that a replay
needs nothing from the host but the next text row. On the CPU the same code runs eagerly, operator by operator. Used to
measure against (`python -m mktts bench --peers`), not to speak with: one stream at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.errors import CapacityError, EngineError, PromptError
from mktts.model.backend import Frame, PromptRows, check_start
from mktts.model.cuda_graph import record
from mktts.model.oracle import TorchBackend
from mktts.model.qwen3 import LayerWeights, rms_norm, rotate
from mktts.model.sampling import Choice, Sampling, distribution
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL


@dataclass
class GraphStream:
    """What the host counts about the one open stream; everything else is the backend's static tensors."""

    max_frames: int
    frames: int = 0
    ended: bool = False


class GraphOracle:
    """`start` and `step` of `mktts.model.backend.Backend` over the weights of a TorchBackend, for one stream at a time.

    positions: of the talker's cache, all of which every frame reads. Draws come from torch's default generator of the
    device, the one that graphs advance by themselves; they are not the torch backend's. Greedy codes are, up to
    rounding: attention here is two matrix products around an fp32 softmax.
    """

    name = "graph"

    @torch.inference_mode()
    def __init__(self, oracle: TorchBackend, positions: int = 512) -> None:
        self.oracle, self.config, self.positions = oracle, oracle.config, positions
        self.device, self.dtype = oracle.device, oracle.dtype
        talker, stack = self.config.talker, oracle.talker

        def zeros(*size: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        cache = (talker.num_hidden_layers, talker.num_key_value_heads, positions, talker.head_dim)
        self._keys, self._values = zeros(*cache), zeros(*cache)
        self._cos, self._sin = stack.rotary(0, positions)
        self._places = torch.arange(positions, device=self.device)
        self._position = zeros(1, dtype=torch.int64)  # of the talker's next input
        self._frames = zeros(1, dtype=torch.int64)
        self._row = zeros(talker.hidden_size)
        self._hidden = zeros(1, 1, talker.hidden_size)
        self._seen = zeros(talker.vocab_size, dtype=torch.bool)
        self._codes = zeros(NUM_CODEBOOKS, dtype=torch.int64)
        eos = self.config.codec_ids.eos
        self._forbidden = zeros(2, talker.vocab_size, dtype=torch.bool)  # with and without end-of-speech
        self._forbidden[:, -SUPPRESSED_TAIL:] = True
        self._forbidden[:, eos] = torch.tensor([True, False], device=self.device)
        self._predictor_cache = oracle.predictor.new_cache(NUM_CODEBOOKS)
        self._host = torch.zeros(NUM_CODEBOOKS, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._sampling: Sampling | None = None  # of the captured graphs
        self._run: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._stream: GraphStream | None = None

    @torch.inference_mode()
    def start(self, prompt: PromptRows, sampling: Sampling, seed: int | None, max_frames: int) -> GraphStream:
        """See `Backend.start`. Ends the stream before; other sampling settings capture new graphs (seconds)."""
        embeds = prompt.embeds
        check_start(embeds, self.config.talker.hidden_size, max_frames)
        if len(embeds) + max_frames > self.positions:
            raise CapacityError(f"{len(embeds)} prompt rows and {max_frames} frames exceed {self.positions} positions")
        if self._sampling != sampling:
            self._run, self._sampling = self._capture(sampling), sampling
        if seed is not None:
            torch.manual_seed(seed)
        cache = self.oracle.talker.new_cache(len(embeds))
        self._hidden.copy_(self.oracle.talker.forward(embeds.to(self.device, self.dtype)[None], cache)[:, -1:])
        self._keys[:, :, : len(embeds)] = cache.keys[:, 0]
        self._values[:, :, : len(embeds)] = cache.values[:, 0]
        self._position.fill_(len(embeds))
        self._frames.zero_()
        self._seen.zero_()
        self._stream = GraphStream(max_frames)
        return self._stream

    @torch.inference_mode()
    def step(self, state: GraphStream, row: Tensor | None) -> Frame:
        """See `Backend.step`. Raises EngineError for a stream that a later `start` ended."""
        if state is not self._stream or self._run is None:
            raise EngineError("this stream ended when another was started: a GraphOracle has one at a time")
        if state.ended or state.frames >= state.max_frames:
            raise CapacityError(f"the stream ended after {state.frames} of at most {state.max_frames} frames")
        if (row is None) != (state.frames == 0):
            raise PromptError("the text row is None exactly on the first step of a stream")
        talker, codes = self._run
        clock = _Clock(self.device)
        if row is not None:
            self._row.copy_(row)
            talker()
        clock.lap()
        codes()
        clock.lap()
        self._host.copy_(self._codes, non_blocking=True)
        talker_ms, predictor_ms = clock.laps_ms()
        if int(self._host[0]) == self.config.codec_ids.eos:
            state.ended = True
            return Frame(None, talker_ms, predictor_ms)
        state.frames += 1
        return Frame(self._host.clone(), talker_ms, predictor_ms)

    def _capture(self, sampling: Sampling) -> tuple[Callable[[], None], Callable[[], None]]:
        """The two halves of a frame; on CUDA as replays of graphs, else as they are. Leaves the state in disorder."""

        def codes() -> None:
            self._choose_codes(sampling)

        if self.device.type != "cuda":
            return self._advance, codes
        with torch.cuda.device(self.device):
            pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # the two never run at the same time
            self._position.zero_()
            return record(self._advance, pool, side).replay, record(codes, pool, side).replay

    def _advance(self) -> None:
        """Talker step over embedding sum and text row; fills `_hidden`."""
        rows = [table[self._codes[g : g + 1]] for g, table in enumerate(self.oracle.code_tables)]
        x = torch.cat(rows)[None].sum(1, keepdim=True) + self._row
        cos, sin = (table.index_select(0, self._position) for table in (self._cos, self._sin))
        bias = torch.zeros(self.positions, device=self.device).masked_fill(self._places > self._position, -torch.inf)
        stack = self.oracle.talker
        for w, keys, values in zip(stack.layers, self._keys, self._values, strict=True):
            x = stack.layer(w, x, partial(self._attend, w, cos, sin, bias, keys, values))
        self._hidden.copy_(rms_norm(x, stack.norm, stack.config.rms_norm_eps))
        self._position.add_(1)

    def _attend(
        self, w: LayerWeights, cos: Tensor, sin: Tensor, bias: Tensor, keys: Tensor, values: Tensor, h: Tensor
    ) -> Tensor:
        c = self.config.talker
        kv_heads, head_dim = c.num_key_value_heads, c.head_dim
        q = rms_norm(F.linear(h, w.q).view(kv_heads, -1, head_dim), w.q_norm, c.rms_norm_eps)
        k = rms_norm(F.linear(h, w.k).view(kv_heads, 1, head_dim), w.k_norm, c.rms_norm_eps)
        keys.index_copy_(1, self._position, rotate(k, cos, sin))
        values.index_copy_(1, self._position, F.linear(h, w.v).view(kv_heads, 1, head_dim))
        scores = torch.matmul(rotate(q, cos, sin), keys.transpose(1, 2)).float() * head_dim**-0.5 + bias
        return torch.matmul(scores.softmax(-1).to(self.dtype), values).reshape(1, 1, -1)

    def _choose_codes(self, sampling: Sampling) -> None:
        """Code 0 from `_hidden`, then the fifteen of the predictor, whose positions are the same in every frame."""
        oracle = self.oracle
        logits = F.linear(self._hidden, oracle.codec_head)[0, 0].float()
        penalty = sampling.repetition_penalty
        logits = torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        forbidden = self._forbidden.index_select(0, (self._frames >= MIN_NEW_FRAMES).long())
        code = _draw(logits.masked_fill(forbidden[0], -torch.inf), sampling.talker)
        codes = [code]
        self._seen.index_fill_(0, code, True)
        self._predictor_cache.length = 0
        x = torch.cat((self._hidden, oracle.code_tables[0][code][None]), 1)
        for group, head in enumerate(oracle.heads, start=1):
            if oracle.projection is not None:
                x = F.linear(x, *oracle.projection)
            logits = F.linear(oracle.predictor.forward(x, self._predictor_cache), head)[0, -1].float()
            codes.append(_draw(logits, sampling.predictor))
            x = oracle.code_tables[group][codes[-1]][None]
        self._codes.copy_(torch.cat(codes))
        self._frames.add_(1)


def _draw(logits: Tensor, choice: Choice) -> Tensor:
    """One id (1,) int64 without asking the host. p / e with e exponential is largest at id i with probability p_i."""
    if not choice.do_sample:
        return logits.argmax()[None]
    probabilities = distribution(logits, choice)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax()[None]


class _Clock:
    """Laps of work queued on a device; on CUDA by events, so that the laps cost no waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []
        self.lap()

    def lap(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def laps_ms(self) -> tuple[float, ...]:
        """Milliseconds between the laps, after everything queued so far is done."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return tuple(1e3 * (b - a) for a, b in pairs)
        torch.cuda.current_stream().synchronize()
        return tuple(a.elapsed_time(b) for a, b in pairs)
