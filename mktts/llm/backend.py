"""The interface between a text model and `TextDecoder`, and its oracle in plain PyTorch. A backend owns weights;
everything about one text lives in the state it returns, so any number of texts can take turns on one backend. A backend
is not thread-safe: one thread owns it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.errors import CapacityError, PromptError
from mktts.llm.checkpoint import EMBEDDING, HEAD, STACK, TextConfig
from mktts.model.qwen3 import KVCache, Qwen3Stack
from mktts.model.sampling import Choice, checked_seed, choose, gumbel
from mktts.spec import StackConfig

TextState = Any  # backend-specific dataclass: KV cache, position, newest token, seed
After = tuple[TextState, int] | None  # an earlier text, and how many of its tokens a prompt begins with


class TextBackend(ABC):
    """One text model: embedding, stack, head."""

    name: str
    config: TextConfig

    @abstractmethod
    def start(self, prompt: Tensor, choice: Choice, seed: int, max_tokens: int, after: After = None) -> TextState:
        """Prefills `prompt`, (L,) int64 ids with L >= 1, for up to `max_tokens` new tokens. Raises as `check_start`.

        after: a state, which stays as it is, and how many of its tokens (its prompt, then what it made but for the
        newest) the prompt begins with, 1 to L - 1: those are not computed again. Sums may be ordered otherwise then."""

    def step(self, state: TextState, debug: Tensor | None = None) -> int:
        """The next token's id. Token i (0 for the first new one) is drawn with Philox's counters for frame i and
        codebook 0, see mktts.model.sampling. debug: (V,) bf16 on the device, takes the kernel's logits. Raises
        CapacityError when all `max_tokens` have been made."""
        if state.tokens >= state.max_tokens:
            raise CapacityError(f"the text ended after max_tokens {state.max_tokens}")
        return self._make(state, debug)

    @abstractmethod
    def _make(self, state: TextState, debug: Tensor | None) -> int:
        """As `step`, where there is room."""


def check_start(stack: StackConfig, prompt: Tensor, max_tokens: int) -> None:
    """What every backend refuses: PromptError for ids of the wrong shape, dtype or range; CapacityError for room."""
    if prompt.dim() != 1 or prompt.dtype != torch.int64 or len(prompt) < 1:
        raise PromptError(f"prompt must be (L >= 1,) int64 token ids, got {tuple(prompt.shape)} {prompt.dtype}")
    if int(prompt.min()) < 0 or int(prompt.max()) >= stack.vocab_size:
        found = f"{int(prompt.min())} to {int(prompt.max())}"
        raise PromptError(f"prompt ids must be from 0 to {stack.vocab_size - 1}, got {found}")
    if len(prompt) + max_tokens > stack.max_position_embeddings:
        raise CapacityError(
            f"{len(prompt)} prompt tokens and max_tokens {max_tokens} exceed the model's "
            f"{stack.max_position_embeddings} positions: shorten the prompt or lower max_tokens"
        )


@dataclass
class TorchTextState:
    """Everything one text owns. Overwrite `last` between steps to force a token (teacher forcing)."""

    cache: KVCache
    hidden: Tensor  # (1, 1, H) after the final norm, of the newest position in the cache
    last: int | None  # the newest token while it is not in the cache yet
    choice: Choice
    seed: int
    max_tokens: int
    tokens: int = 0  # made so far; the next draw's frame


class TorchTextBackend(TextBackend):
    """On CPU token for token what transformers' Qwen3ForCausalLM.generate gives, if greedy."""

    name = "torch"

    def __init__(
        self,
        config: TextConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.stack = Qwen3Stack(config.stack, tensors, STACK, self.device, dtype)
        self.embedding = tensors[EMBEDDING].to(self.device, dtype)
        self.head = self.embedding if config.tied else tensors[HEAD].to(self.device, dtype)

    @torch.inference_mode()
    def start(self, prompt: Tensor, choice: Choice, seed: int, max_tokens: int, after: After = None) -> TorchTextState:
        check_start(self.config.stack, prompt, max_tokens)
        cache = self.stack.new_cache(len(prompt) + max_tokens)
        if after is not None:
            state, cache.length = after
            for kept, new in ((state.cache.keys, cache.keys), (state.cache.values, cache.values)):
                new[:, :, :, : cache.length] = kept[:, :, :, : cache.length]
        rows = self.embedding[prompt[cache.length :].to(self.device)]
        hidden = self.stack.forward(rows[None], cache)
        return TorchTextState(cache, hidden[:, -1:], None, choice, checked_seed(seed), max_tokens)

    @torch.inference_mode()
    def _make(self, state: TorchTextState, debug: Tensor | None) -> int:
        logits, noise = self.logits(state), None
        if state.choice.do_sample:
            (drawn,) = torch.from_numpy(gumbel(state.seed, state.tokens, range(1), len(logits)))
            noise = drawn.to(self.device)
        state.last = int(choose(logits, state.choice, noise))
        state.tokens += 1
        return state.last

    @torch.inference_mode()
    def logits(self, state: TorchTextState) -> Tensor:
        """Logits of the next token, (V,): rounded to the model's dtype by the head, then fp32, as transformers."""
        if state.last is not None:
            row = self.embedding[state.last : state.last + 1]
            state.hidden, state.last = self.stack.forward(row[None], state.cache), None
        return F.linear(state.hidden, self.head)[0, -1].float()
