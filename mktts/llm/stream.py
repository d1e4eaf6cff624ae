"""One text as its consumer sees it: an iterator of new tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mktts.llm.backend import TextBackend
from mktts.llm.tokens import Detokenizer

TextFinishReason = Literal["eos", "max_tokens", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One new token.

    text: the characters it completes, perhaps none (a special token, or bytes in the middle of a character); the
    texts of a stream, joined, are the whole text. index: 0 for the first new token. ready_ms: from the call of
    `generate` to this token on the host, wall clock.
    """

    id: int
    text: str
    index: int
    ready_ms: float


class TokenStream:
    """New tokens of one text, in order, made in the calling thread while they are taken; an end id is the last one.

    ids: what has been taken so far. seed: what every draw follows from. Leaving the `with` block cancels.
    finish_reason: None while tokens may still come, and when the model `failed`.
    """

    def __init__(
        self,
        backend: TextBackend,
        state: Any,
        pieces: Detokenizer,
        eos_ids: Sequence[int],
        seed: int,
        max_tokens: int,
        tokens_per_step: int,
        started_s: float,
    ) -> None:
        self.ids: list[int] = []
        self.seed = seed
        self.finish_reason: TextFinishReason | None = None
        self.failed = False
        self._backend: TextBackend | None = backend
        self._state = state
        self._pieces = pieces
        self._eos_ids = frozenset(eos_ids)
        self._max_tokens = max_tokens
        self._tokens_per_step = tokens_per_step
        self._started_s = started_s
        self._made: list[int] = []  # by the backend, not taken yet
        self._ready_ms = 0.0

    def cancel(self) -> None:
        """Ends the stream: no token comes after this, and the model's state is freed. May be called again."""
        if self.finish_reason is None and not self.failed:
            self._end("cancelled")

    close = cancel

    @property
    def state(self) -> Any:
        """The backend's, as long as tokens may come: who keeps it can go on from it."""
        return self._state

    def read(self) -> str:
        """The text that is left, to the end."""
        return "".join(token.text for token in self)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Token:
        if self._backend is None:
            raise StopIteration
        if not self._made:
            try:
                self._made = self._backend.step(self._state, self._tokens_per_step)
            except BaseException:  # Ctrl-C too: the state may be half a step further
                self._backend = self._state = None
                self.failed = True
                raise
            self._ready_ms = 1e3 * (time.perf_counter() - self._started_s)
        token_id = self._made.pop(0)
        index = len(self.ids)
        self.ids.append(token_id)
        text = self._pieces.push(token_id)
        if token_id in self._eos_ids:
            self._end("eos")
        elif len(self.ids) == self._max_tokens:
            self._end("max_tokens")
        if self.finish_reason is not None:
            text += self._pieces.finish()
        return Token(token_id, text, index, self._ready_ms)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _end(self, reason: TextFinishReason) -> None:
        self.finish_reason = reason
        self._backend = self._state = None
        self._made = []
