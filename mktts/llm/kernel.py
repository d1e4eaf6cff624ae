"""The CUDA backend of `TextDecoder`: csrc/text.cu, one launch a token. bfloat16 only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
from torch import Tensor

from mktts.kernel.build import card_of
from mktts.kernel.grid import choose_text_shape
from mktts.kernel.launch import (
    MADE,
    STATUS_WORDS,
    Launcher,
    Params,
    check_device,
    fill_pointers,
    pinned_words,
    set_choice,
)
from mktts.kernel.prefill import KernelPrefill, kept_of_cache
from mktts.kernel.tape import pack_wide_head, stack_weights
from mktts.llm.backend import After, TextBackend, check_start
from mktts.llm.checkpoint import EMBEDDING, HEAD, STACK, TextConfig
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.sampling import Choice, checked_seed

# Of a choice (csrc/text.cu): a top-k cut 16 bits, its mass, the most likely token, then two a round; on the way down to
# the k best of V a round leaves about half, so 64 rounds are never reached.
_CHOICE_EXCHANGES = 16 + 2 + 2 * 64


@dataclass
class TextKernelState:
    """Everything one text owns, on the device but for the counters and `out`."""

    kv: Tensor  # (layers, kv heads, blocks of a group, slots, 2, head_dim) bf16
    hidden: Tensor  # (H,) bf16: normed state of the newest position
    out: Tensor  # pinned int32: status, then the token
    words: np.ndarray = field(init=False)  # the same memory
    choice: Choice
    seed: int
    prompt_tokens: int
    max_tokens: int
    fixed: InitVar[Params]  # what is the same for all texts of a backend
    tokens: int = 0  # made so far
    last: int = 0  # the newest of them
    params: Params = field(init=False)  # of its launches, each of which sets what changes
    done: torch.cuda.Event | None = None  # the end of its newest launch; they never overlap

    def __post_init__(self, fixed: Params) -> None:
        self.words, self.params = self.out.numpy(), Params.from_buffer_copy(fixed)
        stream = self.params.stream
        fill_pointers(stream, {"kv": self.kv, "hidden": self.hidden, "out": self.out})
        stream.slots = self.kv.shape[3]
        stream.seed_lo, stream.seed_hi = self.seed & 0xFFFFFFFF, self.seed >> 32
        set_choice(stream, self.choice, True)


class TextKernelBackend(TextBackend):
    """On one CUDA device. Raises BackendUnavailable where the device, the compiler or the checkpoint's dimensions do
    not allow it."""

    name = "megakernel"

    def __init__(
        self,
        config: TextConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        check_device(self.device, dtype)
        card = card_of(self.device)
        self.shape = choose_text_shape(config.stack, card.multiprocessors)
        self._launcher = Launcher("text.cu", "mktts_text", self.shape.defines, self.device, card)
        self._prefill = KernelPrefill(Qwen3Stack(config.stack, tensors, STACK, self.device, dtype))

        def get(name: str) -> Tensor:
            return tensors[name].to(self.device, dtype)

        embedding = get(EMBEDDING)
        self._weights = {"embeddings0": embedding}
        self._weights["talker_head_tape"] = pack_wide_head(self.shape, embedding if config.tied else get(HEAD))
        self._weights |= stack_weights(self.shape, "talker", config.stack, get, STACK)
        self._fixed = Params()
        fill_pointers(self._fixed, self._weights)
        self._fixed.frames, self._fixed.ends[:] = 1, [-1] * 4  # an end id ends a stream of the decoder, no launch
        self._tags_per_token = config.stack.num_hidden_layers * self._launcher.layer_exchanges + 1 + _CHOICE_EXCHANGES

    @torch.inference_mode()
    def start(self, prompt: Tensor, choice: Choice, seed: int, max_tokens: int, after: After = None) -> TextKernelState:
        stack = self.config.stack
        check_start(stack, prompt, max_tokens)
        state = TextKernelState(
            kv=torch.empty(self.shape.cache(len(prompt) + max_tokens), dtype=self.dtype, device=self.device),
            hidden=torch.empty(stack.hidden_size, dtype=self.dtype, device=self.device),
            out=pinned_words(1),
            choice=choice,
            seed=checked_seed(seed),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            fixed=self._fixed,
        )
        rows = self._weights["embeddings0"][prompt.to(self.device)]
        if after is None:
            state.hidden.copy_(self._prefill.fill(rows, state.kv))
        else:
            state.hidden.copy_(self._prefill.go_on(rows, state.kv, kept_of_cache(after[0].kv, after[1])))
        return state

    def _make(self, state: TextKernelState, debug: Tensor | None) -> int:
        """One launch."""
        params, words = state.params, state.words
        params.debug_logits = None if debug is None else debug.data_ptr()
        stream = params.stream
        stream.frame, stream.token = state.tokens, state.last
        stream.position = state.prompt_tokens + state.tokens - 1
        words[:STATUS_WORDS] = 0
        state.done = self._launcher.launch(params, self._tags_per_token, state.done)
        state.done.synchronize()
        if words[MADE] != 1:
            raise self._launcher.failure()
        state.tokens, state.last = state.tokens + 1, int(words[STATUS_WORDS])
        return state.last
