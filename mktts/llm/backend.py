"""Backends of `TextDecoder`: a text model (embedding, stack, head) in plain PyTorch, which is the reference, and
csrc/text.cu with one launch per token, on a CUDA device in bfloat16. A backend owns the weights. All state of a text is
in the object that `start` returns, so any number of texts can be interleaved. A backend is owned by one thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.kernel import launch
from mktts.kernel.build import card_of
from mktts.kernel.grid import choose_text_shape
from mktts.kernel.prefill import Prefill, kept_of_cache
from mktts.kernel.tape import pack_wide_head, stack_weights
from mktts.llm.checkpoint import EMBEDDING, HEAD, STACK, TextConfig
from mktts.model.qwen3 import KVCache, Qwen3Stack
from mktts.model.sampling import Choice, choose, gumbel

Tensors = Mapping[str, Tensor]  # by name
TextState = Any  # a backend's state of one text: KV cache, position, newest token, seed
After = tuple[TextState, int] | None  # state of an earlier text, and how many of its tokens the prompt begins with


@dataclass
class TorchTextState:
    """The state of one text. Overwrite `last` between steps to force a token (teacher forcing)."""

    cache: KVCache
    hidden: Tensor  # (1, H) after the final norm, of the newest position in the cache
    last: int | None  # the newest token, while it is not in the cache yet
    choice: Choice
    seed: int
    tokens: int = 0  # number generated so far; frame counter of the next draw


class TorchTextBackend:
    """The reference. Greedy on the CPU, it gives the same tokens as Qwen3ForCausalLM.generate of transformers."""

    name = "torch"

    def __init__(self, config: TextConfig, tensors: Tensors, device: torch.device | str, dtype: torch.dtype) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.stack = Qwen3Stack(config.stack, tensors, STACK, self.device, dtype)
        self.embedding = tensors[EMBEDDING].to(self.device, dtype)
        self.head = self.embedding if config.tied else tensors[HEAD].to(self.device, dtype)

    @torch.inference_mode()
    def start(self, prompt: Tensor, choice: Choice, seed: int, max_tokens: int, after: After = None) -> TorchTextState:
        """Prefills `prompt`, (L,) int64 ids, L >= 1, for up to `max_tokens` new tokens.

        after: a state, which is not changed, and how many of its tokens (its prompt, then all generated ones but the
        newest) the prompt begins with, 1 to L - 1. They are not computed again, which may change the order of sums."""
        cache = self.stack.new_cache(len(prompt) + max_tokens)
        if after is not None:
            state, cache.length = after
            cache.memory[..., : cache.length, :] = state.cache.memory[..., : cache.length, :]
        rows = self.embedding[prompt[cache.length :].to(self.device)]
        hidden = self.stack.advance(rows, [cache], [len(rows)])
        return TorchTextState(cache, hidden[-1:], None, choice, seed)

    @torch.inference_mode()
    def step(self, state: TorchTextState) -> int:
        """Generates the next token and returns its id; call it at most `max_tokens` times. New token i, from 0, is
        drawn with Philox's counters for frame i and codebook 0, see mktts.model.sampling."""
        logits, noise = self.logits(state), None
        if state.choice.do_sample:
            (drawn,) = torch.from_numpy(gumbel(state.seed, state.tokens, range(1), len(logits)))
            noise = drawn.to(self.device)
        state.last = int(choose(logits, state.choice, noise))
        state.tokens += 1
        return state.last

    @torch.inference_mode()
    def logits(self, state: TorchTextState) -> Tensor:
        """Logits of the next token, (V,) fp32; the head rounds them to the model's dtype first, as in transformers."""
        if state.last is not None:
            row = self.embedding[state.last : state.last + 1]
            state.hidden, state.last = self.stack.advance(row, [state.cache], [1]), None
        return F.linear(state.hidden, self.head)[0].float()


# Exchanges of a choice (csrc/text.cu): 16 bits of a top-k cut, its mass, the most likely token, and then two per round.
# A round about halves the candidates on the way to the k best of V, so 64 rounds are never reached.
_CHOICE_EXCHANGES = 16 + 2 + 2 * 64


@dataclass
class TextKernelState:
    """The state of one text, on the device except for the counters and `out`."""

    kv: Tensor  # (layers, kv heads, blocks of a group, slots, 2, head_dim) bf16
    hidden: Tensor  # (H,) bf16: hidden state of the newest position after the final norm
    out: Tensor  # pinned int32: status, then the token
    params: launch.Params  # parameters of its launches
    prompt_tokens: int
    tokens: int = 0  # number generated so far
    last: int = 0  # the newest token
    done: torch.cuda.Event | None = None  # end of its newest launch; its launches never overlap


class TextKernelBackend:
    """The CUDA kernel, with the interface of `TorchTextBackend`. Raises BackendUnavailable if the device, the compiler
    or the checkpoint's dimensions do not support it."""

    name = "megakernel"

    def __init__(self, config: TextConfig, tensors: Tensors, device: torch.device | str, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        launch.check_device(self.device, dtype)
        card = card_of(self.device)
        self.shape = choose_text_shape(config.stack, card.multiprocessors)
        self._launcher = launch.Launcher("text.cu", "mktts_text", self.shape.defines, self.device, card)
        self._prefill = Prefill(Qwen3Stack(config.stack, tensors, STACK, self.device, dtype))

        def get(name: str) -> Tensor:
            return tensors[name].to(self.device, dtype)

        embedding = get(EMBEDDING)
        self._weights = {"embeddings0": embedding}
        self._weights["talker_head_tape"] = pack_wide_head(self.shape, embedding if config.tied else get(HEAD))
        self._weights |= stack_weights(self.shape, "talker", config.stack, get, STACK)
        self._fixed = launch.Params()
        launch.fill_pointers(self._fixed, self._weights)
        self._fixed.frames, self._fixed.ends[:] = 1, [-1] * 4  # no end ids: the decoder handles them, not the kernel
        self._tags_per_token = config.stack.num_hidden_layers * self._launcher.layer_exchanges + 1 + _CHOICE_EXCHANGES

    @torch.inference_mode()
    def start(self, prompt: Tensor, choice: Choice, seed: int, max_tokens: int, after: After = None) -> TextKernelState:
        tensors = {
            "kv": torch.empty(self.shape.cache(len(prompt) + max_tokens), dtype=self.dtype, device=self.device),
            "hidden": torch.empty(self.config.stack.hidden_size, dtype=self.dtype, device=self.device),
            "out": launch.pinned_words(1),
        }
        params = launch.params_of(self._fixed, seed, **tensors)
        launch.set_choice(params.stream, choice, True)
        state = TextKernelState(**tensors, params=params, prompt_tokens=len(prompt))
        rows = self._weights["embeddings0"][prompt.to(self.device)]
        kept = None if after is None else kept_of_cache(after[0].kv, after[1])
        state.hidden.copy_(self._prefill.go_on(rows, state.kv, kept))
        return state

    def step(self, state: TextKernelState, debug: Tensor | None = None) -> int:
        """Generates the next token and returns its id. debug: (V,) bf16 on the device, receives the logits."""
        params, words = state.params, state.out.numpy()
        params.debug_logits = None if debug is None else debug.data_ptr()
        stream = params.stream
        stream.frame, stream.token = state.tokens, state.last
        stream.position = state.prompt_tokens + state.tokens - 1
        words[: launch.STATUS_WORDS] = 0
        state.done = self._launcher.launch(params, self._tags_per_token, state.done)
        state.done.synchronize()
        if words[launch.MADE] != 1:
            raise self._launcher.failure()
        state.tokens, state.last = state.tokens + 1, int(words[launch.STATUS_WORDS])
        return state.last


TextBackend = TorchTextBackend | TextKernelBackend
