"""Generates Qwen3 text token by token: `TextDecoder` owns a text model and opens token streams on it. The model is the
Qwen3 stack that speech uses, with a text embedding before it and a head over the vocabulary after it."""

from __future__ import annotations

import codecs
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Literal, get_args

import torch

from mktts.common import checked_int, one_of
from mktts.errors import BackendUnavailable, CapacityError, EngineError, PromptError, TextError
from mktts.llm.backend import After, TextBackend, TextKernelBackend, TextState, TorchTextBackend
from mktts.llm.checkpoint import TextCheckpoint, open_text_checkpoint
from mktts.llm.tokens import TextVocabulary
from mktts.model.backend import default_dtype, device_named
from mktts.model.sampling import MAX_SEED, Choice, drawn_seed

TextBackendName = Literal["auto", "torch", "megakernel"]
TextFinishReason = Literal["eos", "max_tokens", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One new token. text: the characters that it completes, perhaps none (a special token, or bytes within a
    character); a stream's texts joined are the whole text. ready_ms: wall time from the call of `generate` to this
    token on the host."""

    id: int
    text: str
    ready_ms: float


@dataclass(eq=False, repr=False)
class TokenStream(Iterator[Token], AbstractContextManager["TokenStream"]):
    """An iterator over the new tokens of one text, which are generated in the calling thread when they are requested.
    Stops after an end id. Leaving the `with` block cancels.

    ids: the tokens so far. seed: of all draws. state: the backend's state, from which a later text can continue; None
    after the end. finish_reason: None while tokens may follow, and if the model `failed`."""

    _backend: TextBackend | None
    state: TextState
    _vocabulary: TextVocabulary
    _eos_ids: Collection[int]
    seed: int
    _max_tokens: int
    _started_s: float
    ids: list[int] = field(default_factory=list)
    finish_reason: TextFinishReason | None = None
    failed: bool = False
    _text: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def cancel(self) -> None:
        """Ends the stream and frees its state; no token follows. May be called repeatedly."""
        if self._backend is not None:
            self._end("cancelled")

    def read(self) -> str:
        """Generates to the end and returns the text."""
        return "".join(token.text for token in self)

    def __next__(self) -> Token:
        if self._backend is None:
            raise StopIteration
        try:
            token_id = self._backend.step(self.state)
        except BaseException:  # also Ctrl-C: the state may be in the middle of a step
            self._backend = self.state = None
            self.failed = True
            raise
        ready_ms = 1e3 * (time.perf_counter() - self._started_s)
        self.ids.append(token_id)
        data = self._vocabulary.data(token_id)
        if token_id in self._eos_ids:
            self._end("eos")
        elif len(self.ids) == self._max_tokens:
            self._end("max_tokens")
        text = self._text.decode(data, final=self.finish_reason is not None)  # whole characters only
        return Token(token_id, text, ready_ms)

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _end(self, reason: TextFinishReason) -> None:
        self.finish_reason = reason
        self._backend = self.state = None


class TextDecoder(AbstractContextManager["TextDecoder"]):
    """One text model, on which any number of token streams can be interleaved. It and its streams belong to one thread.
    Use it as a context manager, or call `close`."""

    def __init__(self, backend: TextBackend, checkpoint: TextCheckpoint, device: torch.device | str = "cpu") -> None:
        """Wraps an existing backend; most callers use `load`."""
        self.checkpoint = checkpoint
        self.backend_name = backend.name
        self.device = torch.device(device)
        self.choice = checkpoint.config.choice
        self.vocabulary: TextVocabulary = checkpoint.tokenizer()
        self._backend: TextBackend | None = backend

    @classmethod
    def load(
        cls,
        source: str | Path | TextCheckpoint,
        *,
        backend: TextBackendName = "auto",
        device: str | torch.device = "auto",
        dtype: torch.dtype | None = None,
    ) -> TextDecoder:
        """Loads a text checkpoint (see `mktts.llm.checkpoint.open_text_checkpoint`) onto a device.

        backend: "torch", "megakernel", or "auto" for the fastest one that can run. device: "cpu", "cuda", "cuda:1" or
        "auto". dtype: None takes bfloat16 on CUDA and float32 on the CPU. Raises CheckpointError, and
        BackendUnavailable, which says what is missing."""
        one_of("backend", backend, get_args(TextBackendName), BackendUnavailable)
        where = device_named(device)
        dtype = dtype or default_dtype(where)
        checkpoint = open_text_checkpoint(source)
        given = checkpoint.config, checkpoint.tensors(), where, dtype
        if backend == "megakernel" or (backend == "auto" and where.type == "cuda" and dtype == torch.bfloat16):
            try:
                return cls(TextKernelBackend(*given), checkpoint, where)
            except BackendUnavailable as reason:
                if backend == "megakernel":
                    raise
                logging.getLogger(__name__).warning("the torch backend serves instead of the megakernel: %s", reason)
        return cls(TorchTextBackend(*given), checkpoint, where)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        choice: Choice | None = None,
        seed: int | None = None,
        max_tokens: int = 256,
        stop_at_eos: bool = True,
        after: After = None,
    ) -> TokenStream:
        """Prefills `prompt` and returns the stream of new tokens.

        prompt: text to continue, without a chat template, or token ids.
        choice: None takes the checkpoint's own. seed: None draws one, see `TokenStream.seed`.
        stop_at_eos: False continues after an end id.
        after: the state of an earlier stream of this decoder (`TokenStream.state`), and how many of the prompt's first
        ids it holds, or 0. They are not computed again (see `mktts.agent.llm.TextConversation`).

        Raises TextError or PromptError for the prompt, CapacityError if prompt and max_tokens exceed the model's
        positions, OptionsError for a seed or max_tokens out of range, EngineError after `close`."""
        started_s = time.perf_counter()
        if self._backend is None:
            raise EngineError("the decoder is closed: load another one")
        seed = drawn_seed() if seed is None else seed
        checked_int("seed", seed, at_least=0, at_most=MAX_SEED)
        checked_int("max_tokens", max_tokens, at_least=1)
        ids = torch.tensor(self._ids(prompt, max_tokens))
        state = self._backend.start(ids, choice or self.choice, seed, max_tokens, after if after and after[1] else None)
        ends = self.checkpoint.config.eos_ids if stop_at_eos else ()
        return TokenStream(self._backend, state, self.vocabulary, ends, seed, max_tokens, started_s)

    def close(self) -> None:
        """Releases the model; open streams keep it until they end. Idempotent."""
        self._backend = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, prompt: str | Sequence[int], max_tokens: int) -> list[int]:
        stack = self.checkpoint.config.stack
        if isinstance(prompt, str):
            ids = self.vocabulary.encode(prompt)
        elif isinstance(prompt, Sequence) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt):
            ids = [int(i) for i in prompt]
        else:
            raise TextError(f"prompt must be text or a list of token ids, got {type(prompt).__name__}")
        if not ids:
            raise TextError("prompt must hold at least one token, got none")
        if min(ids) < 0 or max(ids) >= stack.vocab_size:
            raise PromptError(f"prompt ids must be from 0 to {stack.vocab_size - 1}, got {min(ids)} to {max(ids)}")
        if len(ids) + max_tokens > stack.max_position_embeddings:
            raise CapacityError(
                f"{len(ids)} prompt tokens and max_tokens {max_tokens} exceed the model's "
                f"{stack.max_position_embeddings} positions: shorten the prompt or lower max_tokens"
            )
        return ids
