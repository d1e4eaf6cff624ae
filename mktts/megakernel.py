"""The CUDA backend: one launch of csrc's persistent kernel makes one frame, or several. bfloat16 only.

A short prompt goes through the kernel row by row; a long one through the oracle's PyTorch stack, whose keys and values
are dealt out into the kernel's cache. From there on the host only launches and reads codes, which the kernel writes
into the host's pinned memory frame by frame.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mktts.backend import Frame
from mktts.cuda_driver import Kernel
from mktts.errors import BackendUnavailable, CapacityError, EngineError, PromptError, SamplingError
from mktts.kernel_build import build_for, target_of
from mktts.kernel_pack import WARPS, choose_shape
from mktts.kernel_params import (
    ENDED,
    FRAME_WORDS,
    MADE,
    STATUS_WORDS,
    STOP,
    WAITS,
    Params,
    StreamParams,
    pinned_words,
    point,
)
from mktts.kernel_weights import model_weights
from mktts.qwen3 import Qwen3Stack
from mktts.sampling import Sampling
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig

MAX_FRAMES_A_LAUNCH = 8  # the longest chunk of the default schedule
_TIMEOUT_NS = 2_000_000_000
_POLL_S = 20e-6  # between looks at the count of frames, while more of the same launch are to come
# Up to here a row at a time beats PyTorch's eager prefill, which took 16 ms of launches for any short prompt (H200).
_PREFILL_BYTES = 33_000_000_000
_EXCHANGES = 5  # of a layer (csrc/layer.cuh): what the tag advances by
_TAG_LIMIT = 1 << 16  # the exchange words carry 16 bits of the tag


@dataclass
class MegakernelStream:
    """Everything one utterance owns, on the device but for the counters and `out`."""

    kv: Tensor  # (layers, kv heads, blocks of a group, slots, 2, head_dim) bf16
    hidden: Tensor  # (H,) bf16: normed talker state of the newest position
    sum: Tensor  # (H,) bf16: embedding sum of the newest frame
    seen: Tensor  # (vocabulary / 32,) int32: bitmap of code 0 so far
    out: Tensor  # pinned int32: status, then a launch's frames
    sampling: Sampling
    seed: int
    prompt_rows: int
    max_frames: int
    frames: int = 0
    ended: bool = False
    codes0: list[int] = field(default_factory=list)  # code 0 of every frame


@dataclass(frozen=True)
class Debug:
    """What a step can show of its inside, on the device: see `MegakernelBackend.new_debug`."""

    logits: Tensor  # (16, talker vocabulary) bf16, as the heads gave them; codes 1 to 15 fill their own vocabulary
    hidden: Tensor  # (talker layers, H) bf16: the residual stream after every layer; untouched by the first frame


class MegakernelBackend:
    """Implements `mktts.backend.Backend` on one CUDA device.

    Raises BackendUnavailable where the device, the compiler or the checkpoint's dimensions do not serve.
    """

    name = "megakernel"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise BackendUnavailable(f"the megakernel needs a CUDA device, got {self.device}: pass backend='torch'")
        if dtype != torch.bfloat16:
            raise BackendUnavailable(f"the megakernel computes in bfloat16, got {dtype}: pass backend='torch'")
        properties = torch.cuda.get_device_properties(self.device)
        self.shape = choose_shape(config, properties.multi_processor_count)
        with torch.cuda.device(self.device):
            self._kernel = load_kernel(self.shape.defines, target_of((properties.major, properties.minor)))
            words = -(-self._kernel.constant("mktts_exchange_bytes") // 4)
            self._exchange = torch.zeros(words, dtype=torch.int32, device=self.device)
        self._status = torch.zeros(8, dtype=torch.int32, device=self.device)
        self._tag = 1
        layers = config.talker.num_hidden_layers + (NUM_CODEBOOKS - 1) * config.predictor.num_hidden_layers
        self._tags_per_frame = _EXCHANGES * layers + NUM_CODEBOOKS + 2  # one a head, the projection, the host's wish
        self._talker = Qwen3Stack(config.talker, tensors, "talker.model.", self.device, dtype)
        projected = "talker.code_predictor.small_to_mtp_projection.weight" in tensors
        self._weights = model_weights(self.shape, lambda name: tensors[name].to(self.device, dtype), projected)

    @torch.inference_mode()
    def start(self, prompt: Tensor, sampling: Sampling, seed: int | None, max_frames: int) -> MegakernelStream:
        """See `Backend.start`. Raises SamplingError for draws by torch's generator."""
        talker = self.config.talker
        if prompt.dim() != 2 or prompt.shape[0] < 2 or prompt.shape[1] != talker.hidden_size:
            raise PromptError(f"prompt must be (L >= 2, {talker.hidden_size}), got {tuple(prompt.shape)}")
        if max_frames < 1:
            raise CapacityError(f"max_frames must be at least 1, got {max_frames}")
        if getattr(sampling, "rng", "philox") != "philox":
            raise SamplingError("the megakernel draws by Philox: for rng='torch' pass backend='torch'")
        rows = len(prompt)
        if rows + max_frames > talker.max_position_embeddings:
            raise CapacityError(f"{rows} prompt rows and {max_frames} frames exceed the model's positions")
        slots = -(-(rows + max_frames) // self.shape.group) + 1
        kv = (talker.num_hidden_layers, talker.num_key_value_heads, self.shape.group, slots, 2, talker.head_dim)
        rest = torch.zeros(2, talker.hidden_size, dtype=self.dtype, device=self.device)
        state = MegakernelStream(
            kv=torch.empty(kv, dtype=self.dtype, device=self.device),
            hidden=rest[0],
            sum=rest[1],
            seen=torch.zeros(talker.vocab_size // 32, dtype=torch.int32, device=self.device),
            out=pinned_words(MAX_FRAMES_A_LAUNCH),
            sampling=sampling,
            seed=secrets.randbits(62) if seed is None else seed,
            prompt_rows=rows,
            max_frames=max_frames,
        )
        prompt = prompt.to(self.device, self.dtype).contiguous()
        if rows * self._weights["talker_tape"].nbytes <= _PREFILL_BYTES:
            self._prefill(state, prompt)
        else:
            self._prefill_at_once(state, prompt)
        return state

    def _prefill(self, state: MegakernelStream, prompt: Tensor) -> None:
        """Row by row in one launch; nothing waits for it."""
        with torch.cuda.device(self.device):
            params = self._params(state, prompt, len(prompt) * self.config.talker.num_hidden_layers * _EXCHANGES)
            params.prefill, params.frames, params.stream[0].position = 1, len(prompt), 0
            self._kernel.launch(params)

    def _prefill_at_once(self, state: MegakernelStream, prompt: Tensor) -> None:
        """All rows in PyTorch; position p of a head goes to block p % group of its group, slot p // group."""
        cache = self._talker.new_cache(len(prompt))
        state.hidden.copy_(self._talker.forward(prompt[None], cache)[0, -1])
        group = self.shape.group
        for place, tensor in enumerate((cache.keys, cache.values)):
            for block in range(group):
                rows = tensor[:, 0, :, block::group]
                state.kv[:, :, block, : rows.shape[2], place] = rows

    def step(self, state: MegakernelStream, text: Tensor | None, debug: Debug | None = None) -> Frame:
        """See `Backend.step`. Times are the kernel's own; the launch and the hand-over count as talker_ms."""
        (frame,) = self.frames(state, [text], debug)
        return frame

    def frames(
        self, state: MegakernelStream, text: Sequence[Tensor | None], debug: Debug | None = None
    ) -> Iterator[Frame]:
        """Up to MAX_FRAMES_A_LAUNCH steps in one launch, each frame yielded as soon as the host has it.

        `text`: what `step` takes, a frame each. Ends early after end-of-speech (a Frame without codes). Closing the
        iterator stops the kernel within one frame; the frames it made by then count, taken or not.
        Raises EngineError where the kernel gave up waiting.
        """
        self._check(state, text)
        begun_s = time.perf_counter()
        words = state.out.numpy()
        done = self._launch(state, text, debug)
        before, made_ms = state.frames, 0.0
        try:
            for index in range(len(text)):
                if not _made(words, index, done, more=index + 1 < len(text)):
                    break
                frame = _frame(words, index)
                state.frames = before + index + 1
                state.codes0.append(int(frame.codes[0]))
                if index == 0:  # whatever the kernel did not take is launch and hand-over
                    outside_ms = 1e3 * (time.perf_counter() - begun_s) - frame.talker_ms - frame.predictor_ms
                    frame = replace(frame, talker_ms=frame.talker_ms + max(0.0, outside_ms))
                made_ms += frame.talker_ms + frame.predictor_ms
                yield frame
        finally:
            words[STOP] = 1
            done.synchronize()
            state.frames = before + int(words[MADE])
            state.ended = bool(words[ENDED])
        if state.ended:
            yield Frame(None, max(0.0, 1e3 * (time.perf_counter() - begun_s) - made_ms), 0.0)
        elif state.frames < before + len(text):
            self._fail(state)

    @torch.inference_mode()
    def force(self, state: MegakernelStream, codes: Tensor) -> None:
        """Puts `codes` (16,) int64 in the place of the newest frame's, as if they had been drawn: for parity tests."""
        ids = codes.tolist()
        tables = [self._weights["embeddings0"], *self._weights["embeddings"]]
        total = torch.zeros_like(state.sum, dtype=torch.float32)
        for table, code in zip(tables, ids, strict=True):  # in the kernel's order
            total += table[code]
        state.sum.copy_(total)
        state.codes0[-1] = ids[0]
        bits = np.zeros(32 * len(state.seen), dtype=np.uint8)
        bits[state.codes0] = 1
        state.seen.copy_(torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)))

    @torch.inference_mode()
    def new_debug(self) -> Debug:
        """Room for what one step can show of its inside."""
        talker = self.config.talker
        logits = torch.zeros(NUM_CODEBOOKS, talker.vocab_size, dtype=self.dtype, device=self.device)
        return Debug(logits, logits.new_zeros(talker.num_hidden_layers, talker.hidden_size))

    def _check(self, state: MegakernelStream, text: Sequence[Tensor | None]) -> None:
        if not 1 <= len(text) <= MAX_FRAMES_A_LAUNCH:
            raise CapacityError(f"a launch makes 1 to {MAX_FRAMES_A_LAUNCH} frames, got {len(text)}")
        if state.ended or state.frames + len(text) > state.max_frames:
            raise CapacityError(
                f"the stream {'ended' if state.ended else 'is'} after {state.frames} of at most {state.max_frames} "
                f"frames: {len(text)} more were asked for"
            )
        width = self.config.talker.hidden_size
        for index, row in enumerate(text):
            if (row is None) != (state.frames + index == 0):
                raise PromptError("text is None exactly on the first step of a stream")
            if row is not None and row.shape != (width,):
                raise PromptError(f"text must be one row ({width},), got {tuple(row.shape)}")

    def _launch(self, state: MegakernelStream, text: Sequence[Tensor | None], debug: Debug | None) -> torch.cuda.Event:
        with torch.cuda.device(self.device), torch.inference_mode():
            rows = [state.sum if row is None else row.to(self.device, self.dtype) for row in text]
            rows = torch.stack(rows) if len(rows) > 1 else rows[0].contiguous()
            params = self._params(state, rows, len(text) * self._tags_per_frame)
            params.frames = len(text)
            if debug is not None:
                point(params, {"debug_logits": debug.logits, "debug_hidden": debug.hidden})
            state.out[:STATUS_WORDS] = 0
            self._kernel.launch(params)
            done = torch.cuda.Event()
            done.record()
        return done

    def _fail(self, state: MegakernelStream) -> None:
        state.ended = True
        _, block, thread, wait, tag = self._status[:5].tolist()
        self._status.zero_()
        self._restart_tags()  # whatever was left half exchanged
        raise EngineError(
            f"the frame kernel stopped: block {block}, thread {thread} waited in vain for {WAITS.get(wait, wait)}, "
            f"exchange {tag}; the stream is over, others can go on"
        )

    def _restart_tags(self) -> None:
        self._exchange.zero_()
        self._tag = 1

    def _params(self, state: MegakernelStream, rows: Tensor, tags: int) -> Params:
        """For a launch that takes at most `tags` exchanges. Tags never wrap between launches: a word from 65 536
        exchanges ago would look fresh."""
        if self._tag + tags >= _TAG_LIMIT:
            self._restart_tags()
        params, stream = Params(), StreamParams()
        point(params, {**self._weights, "exchange": self._exchange, "status": self._status})
        own = {"hidden": state.hidden, "sum": state.sum, "kv": state.kv, "seen": state.seen}
        point(stream, {**own, "text": rows, "out": state.out})
        talker, predictor = state.sampling.talker, state.sampling.predictor
        stream.slots, stream.frame = state.kv.shape[3], state.frames
        stream.position = state.prompt_rows + state.frames - 1
        stream.seed_lo, stream.seed_hi = state.seed & 0xFFFFFFFF, state.seed >> 32
        stream.temperature0, stream.temperature = talker.temperature, predictor.temperature
        stream.top_p0, stream.top_p = talker.top_p, predictor.top_p
        stream.top_k0, stream.top_k = talker.top_k, predictor.top_k
        stream.greedy0, stream.greedy = not talker.do_sample, not predictor.do_sample
        stream.penalty = state.sampling.repetition_penalty
        params.stream[0], params.tag, params.timeout_ns = stream, self._tag, _TIMEOUT_NS
        params.eos, params.min_frames = self.config.codec_ids.eos, MIN_NEW_FRAMES
        params.suppress_from = self.config.talker.vocab_size - SUPPRESSED_TAIL
        self._tag += tags
        return params


def load_kernel(defines: dict[str, int], arch: str) -> Kernel:
    """Compiles or takes from the cache. Raises BackendUnavailable."""
    threads = 32 * WARPS + (128 if arch == "sm_90a" else 32)
    build = build_for(defines, arch)
    if build.constants["mktts_params_bytes"] != ctypes.sizeof(Params):
        raise BackendUnavailable("csrc/state.cuh and mktts/kernel_params.py disagree about struct Params")
    return Kernel(build.cubin, "mktts_frames", defines["CTAS"], threads, "mktts_shared_bytes")


def _made(words: np.ndarray, index: int, done: torch.cuda.Event, more: bool) -> bool:
    """Waits for frame `index` of a launch; False where the launch is over without it."""
    if not more:
        done.synchronize()
    while words[MADE] <= index and not done.query():
        time.sleep(_POLL_S)
    return bool(words[MADE] > index)


def _frame(words: np.ndarray, index: int) -> Frame:
    own = words[STATUS_WORDS + index * FRAME_WORDS :][:FRAME_WORDS]
    talker_ms, predictor_ms = (1e-6 * own[NUM_CODEBOOKS : NUM_CODEBOOKS + 2]).tolist()
    return Frame(torch.from_numpy(own[:NUM_CODEBOOKS].astype(np.int64)), talker_ms, predictor_ms)
