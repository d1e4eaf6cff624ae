"""The CUDA backend: one launch of csrc's persistent kernel makes one frame.

A short prompt goes through the kernel row by row; a long one through the oracle's PyTorch stack, whose keys and values
are dealt out into the kernel's cache. From there on the host only launches and reads codes. bfloat16 only.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.backend import Frame
from mktts.cuda_driver import Kernel
from mktts.errors import BackendUnavailable, CapacityError, EngineError, PromptError, SamplingError
from mktts.kernel_build import build_for, target_of
from mktts.kernel_pack import WARPS, choose_shape, pack_layer, pack_projection, pack_rows
from mktts.qwen3 import Qwen3Stack, inverse_frequency
from mktts.sampling import Sampling
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig, StackConfig

_POINTERS = """
    talker_tape talker_head_tape projection_tape predictor_tape predictor_head_tape projection_bias
    talker_norms talker_qk talker_final predictor_norms predictor_qk predictor_final
    talker_cos talker_sin predictor_cos predictor_sin embeddings0 embeddings inputs0 inputs
    text hidden sum kv exchange seen codes status debug trace
""".split()
_WAITS = ("", "exchange words", "", "partial sums", "", "weights", "query, key and value words", "")
_STATUS = 8  # int32 words, behind which the codes lie
_TIMEOUT_NS = 2_000_000_000
# Up to here a row at a time beats PyTorch's eager prefill, which took 16 ms of launches for any short prompt (H200).
_PREFILL_BYTES = 33_000_000_000
_EXCHANGES = 5  # of a layer (csrc/layer.cuh): what the tag advances by
_TAG_LIMIT = 1 << 16  # the exchange words carry 16 bits of the tag


class Params(ctypes.Structure):
    """csrc/state.cuh, struct Params."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int) for name in ("slots", "position", "frame", "frames")]
        + [(name, ctypes.c_uint) for name in ("tag", "seed_lo", "seed_hi", "stream_id")]
        + [(name, ctypes.c_float) for name in ("inverse_temperature0", "inverse_temperature", "penalty")]
        + [
            (name, ctypes.c_int)
            for name in "top_k0 top_k greedy0 greedy eos suppress_from min_frames keep_layers prefill".split()
        ]
        + [("timeout_ns", ctypes.c_ulonglong)]
    )


@dataclass
class MegakernelStream:
    """Everything one utterance owns, on the device but for the counters."""

    kv: Tensor  # (layers, kv heads, blocks of a group, slots, 2, head_dim) bf16
    hidden: Tensor  # (H,) bf16: normed talker state of the newest position
    sum: Tensor  # (H,) bf16: embedding sum of the newest frame
    seen: Tensor  # (vocabulary / 32,) int32: bitmap of code 0 so far
    out: Tensor  # (8 + 16,) int32: status, codes
    sampling: Sampling
    seed: int
    prompt_rows: int
    max_frames: int
    frames: int = 0
    ended: bool = False


class MegakernelBackend:
    """Implements `mktts.backend.Backend` on one CUDA device. Draws follow Philox, so they are not the torch backend's.

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
            self._kernel = _load(self.shape.defines, target_of((properties.major, properties.minor)))
            words = -(-self._kernel.constant("mktts_exchange_bytes") // 4)
            self._exchange = torch.zeros(words, dtype=torch.int32, device=self.device)
        self._tag = 1
        layers = config.talker.num_hidden_layers + NUM_CODEBOOKS * config.predictor.num_hidden_layers
        self._tags_per_frame = _EXCHANGES * layers + NUM_CODEBOOKS + 1  # one a head, one the projection
        self._talker = Qwen3Stack(config.talker, tensors, "talker.model.", self.device, dtype)
        self._weights = self._pack(tensors)
        self._host = torch.empty(_STATUS + NUM_CODEBOOKS, dtype=torch.int32, pin_memory=True)

    @torch.inference_mode()
    def start(self, prompt: Tensor, sampling: Sampling, seed: int | None, max_frames: int) -> MegakernelStream:
        """See `Backend.start`. Raises SamplingError for top_p, which the kernel does not have yet."""
        talker = self.config.talker
        if prompt.dim() != 2 or prompt.shape[0] < 2 or prompt.shape[1] != talker.hidden_size:
            raise PromptError(f"prompt must be (L >= 2, {talker.hidden_size}), got {tuple(prompt.shape)}")
        if max_frames < 1:
            raise CapacityError(f"max_frames must be at least 1, got {max_frames}")
        if min(sampling.talker.top_p, sampling.predictor.top_p) < 1:
            raise SamplingError("the megakernel draws with temperature and top_k; for top_p pass backend='torch'")
        rows = len(prompt)
        if rows + max_frames > talker.max_position_embeddings:
            raise CapacityError(f"{rows} prompt rows and {max_frames} frames exceed the model's positions")

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        slots = -(-(rows + max_frames) // self.shape.group) + 1
        heads, head_dim = talker.num_key_value_heads, talker.head_dim
        kv = (talker.num_hidden_layers, heads, self.shape.group, slots, 2, head_dim)
        state = MegakernelStream(
            kv=zeros(*kv, dtype=self.dtype),
            hidden=zeros(talker.hidden_size, dtype=self.dtype),
            sum=zeros(talker.hidden_size, dtype=self.dtype),
            seen=zeros(talker.vocab_size // 32),
            out=zeros(_STATUS + NUM_CODEBOOKS),
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
        tags = len(prompt) * self.config.talker.num_hidden_layers * _EXCHANGES
        with torch.cuda.device(self.device):
            self._reserve_tags(tags)
            params = self._params(state, prompt, None)
            params.prefill, params.frames, params.position = 1, len(prompt), 0
            self._kernel.launch(params)
        self._tag += tags

    def _prefill_at_once(self, state: MegakernelStream, prompt: Tensor) -> None:
        """All rows in PyTorch; position p of a head goes to block p % group of its group, slot p // group."""
        cache = self._talker.new_cache(len(prompt))
        state.hidden.copy_(self._talker.forward(prompt[None], cache)[0, -1])
        group = self.shape.group
        for place, tensor in enumerate((cache.keys, cache.values)):
            for block in range(group):
                rows = tensor[:, 0, :, block::group]
                state.kv[:, :, block, : rows.shape[2], place] = rows

    @torch.inference_mode()
    def step(self, state: MegakernelStream, text: Tensor | None, debug: Tensor | None = None) -> Frame:
        """See `Backend.step`. The whole launch counts as talker_ms. `debug` (16, vocabulary) bf16 takes the logits."""
        if state.ended or state.frames >= state.max_frames:
            raise CapacityError(f"the stream ended after {state.frames} of at most {state.max_frames} frames")
        if (text is None) != (state.frames == 0):
            raise PromptError("text is None exactly on the first step of a stream")
        width = self.config.talker.hidden_size
        if text is not None and text.shape != (width,):
            raise PromptError(f"text must be one row ({width},), got {tuple(text.shape)}")
        if debug is not None:
            self._check_debug(debug)
        begun_s = time.perf_counter()
        with torch.cuda.device(self.device):
            self._reserve_tags(self._tags_per_frame)
            row = state.sum if text is None else text.to(self.device, self.dtype).reshape(-1).contiguous()
            self._kernel.launch(self._params(state, row, debug))
            self._host.copy_(state.out, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
        made, ended, failed, block, thread, wait, tag, next_tag = self._host[:_STATUS].tolist()
        elapsed_ms = 1e3 * (time.perf_counter() - begun_s)
        if failed:
            state.ended = True
            self._restart_tags()  # whatever was left half exchanged
            raise EngineError(
                f"the frame kernel stopped: block {block}, thread {thread} waited in vain for {_WAITS[wait]}, "
                f"exchange {tag}; the stream is over, others can go on"
            )
        self._tag = next_tag
        if ended:
            state.ended = True
            return Frame(None, elapsed_ms, 0.0)
        assert made == 1
        state.frames += 1
        return Frame(self._host[_STATUS:].to(torch.int64), elapsed_ms, 0.0)

    def _reserve_tags(self, tags: int) -> None:
        """Tags never wrap between launches: a word from 65 536 exchanges ago would look fresh."""
        if self._tag + tags >= _TAG_LIMIT:
            self._restart_tags()

    def _restart_tags(self) -> None:
        self._exchange.zero_()
        self._tag = 1

    def _check_debug(self, debug: Tensor) -> None:
        shape = (NUM_CODEBOOKS, self.config.talker.vocab_size)
        if (
            debug.shape != shape
            or debug.dtype != self.dtype
            or debug.device.type != "cuda"
            or not debug.is_contiguous()
        ):
            raise BackendUnavailable(
                f"debug must be a contiguous {self.dtype} tensor of shape {shape} on {self.device}, got {debug.dtype} "
                f"{tuple(debug.shape)} on {debug.device}"
            )

    def _params(self, state: MegakernelStream, row: Tensor, debug: Tensor | None) -> Params:
        params = Params()
        own = {"hidden": state.hidden, "sum": state.sum, "kv": state.kv, "seen": state.seen, "text": row}
        own |= {"status": state.out, "codes": state.out[_STATUS:], "exchange": self._exchange}
        for name, tensor in {**self._weights, **own, "debug": debug}.items():
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        talker, predictor = state.sampling.talker, state.sampling.predictor
        params.slots, params.frame, params.frames = state.kv.shape[3], state.frames, 1
        params.position = state.prompt_rows + state.frames - 1
        params.tag, params.seed_lo, params.seed_hi = self._tag, state.seed & 0xFFFFFFFF, state.seed >> 32
        params.inverse_temperature0, params.inverse_temperature = 1 / talker.temperature, 1 / predictor.temperature
        params.penalty = state.sampling.repetition_penalty
        params.top_k0, params.top_k = talker.top_k, predictor.top_k
        params.greedy0, params.greedy = not talker.do_sample, not predictor.do_sample
        params.eos, params.min_frames = self.config.codec_ids.eos, MIN_NEW_FRAMES
        params.suppress_from = self.config.talker.vocab_size - SUPPRESSED_TAIL
        params.timeout_ns = _TIMEOUT_NS
        return params

    def _pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def get(name: str) -> Tensor:
            return tensors[name].to(self.device, self.dtype)

        config, shape = self.config, self.shape
        code_predictor = "talker.code_predictor."
        groups = range(NUM_CODEBOOKS - 1)
        weights = {"talker_head_tape": pack_rows(shape, get("talker.codec_head.weight"))}
        heads = [pack_rows(shape, get(f"{code_predictor}lm_head.{g}.weight")) for g in groups]
        weights["predictor_head_tape"] = torch.stack(heads)
        embeddings = torch.stack([get(f"{code_predictor}model.codec_embedding.{g}.weight") for g in groups])
        first = get("talker.model.codec_embedding.weight")
        weights |= {"embeddings0": first, "embeddings": embeddings, "inputs0": first, "inputs": embeddings}
        name = f"{code_predictor}small_to_mtp_projection."
        if name + "weight" in tensors:
            matrix, bias = get(name + "weight"), get(name + "bias")
            weights |= {"projection_tape": pack_projection(shape, matrix), "projection_bias": bias}
            weights |= {"inputs0": F.linear(first, matrix, bias), "inputs": F.linear(embeddings, matrix, bias)}
        weights |= self._pack_stack("talker", config.talker, get, "talker.model.")
        weights |= self._pack_stack("predictor", config.predictor, get, f"{code_predictor}model.")
        return weights

    def _pack_stack(self, kind: str, stack: StackConfig, get, prefix: str) -> dict[str, Tensor]:
        tape, norms, heads = None, [], []
        for index in range(stack.num_hidden_layers):  # one layer at a time: the matrices are needed only here
            layer = _Layer(get, f"{prefix}layers.{index}.")
            packed = pack_layer(self.shape, stack, layer)
            if tape is None:
                tape = packed.new_empty(len(packed), stack.num_hidden_layers, packed.shape[1])
            tape[:, index] = packed
            norms.append(torch.stack([layer["input_layernorm.weight"], layer["post_attention_layernorm.weight"]]))
            heads.append(torch.stack([layer["self_attn.q_norm.weight"], layer["self_attn.k_norm.weight"]]))
        positions = NUM_CODEBOOKS if kind == "predictor" else stack.max_position_embeddings
        frequency = inverse_frequency(stack.head_dim, stack.rope_theta).to(self.device)
        angle = torch.outer(torch.arange(positions, device=self.device).float(), frequency)
        return {
            f"{kind}_tape": tape,
            f"{kind}_norms": torch.stack(norms),
            f"{kind}_qk": torch.stack(heads),
            f"{kind}_final": get(f"{prefix}norm.weight"),
            f"{kind}_cos": angle.cos().to(self.dtype),
            f"{kind}_sin": angle.sin().to(self.dtype),
        }


class _Layer:
    """The tensors of one layer by their names in it."""

    def __init__(self, get, prefix: str) -> None:
        self._get, self._prefix = get, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._get(self._prefix + name)


def _load(defines: dict[str, int], arch: str) -> Kernel:
    threads = 32 * WARPS + (128 if arch == "sm_90a" else 32)
    build = build_for(defines, arch)
    if build.constants["mktts_params_bytes"] != ctypes.sizeof(Params):
        raise BackendUnavailable("csrc/state.cuh and mktts/megakernel.py disagree about struct Params")
    return Kernel(build.cubin, "mktts_frames", defines["CTAS"], threads, "mktts_shared_bytes")
