"""One conversation with a text model: what it has read and said stays in its cache from one reply to the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from mktts.llm.chat import ChatTemplate, Message
from mktts.llm.decoder import TextDecoder
from mktts.llm.stream import TokenStream

PROMPT_TOKENS = 768  # together with a reply within the 1 024 rows that the prefill's graphs take
REPLY_TOKENS = 256


class TextConversation:
    """Replies of one decoder to a growing list of messages. Belongs to the decoder's thread.

    computed_tokens, kept_tokens: of the last reply's prompt; the kept ones were in the cache already.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        template: ChatTemplate | None = None,
        prompt_tokens: int = PROMPT_TOKENS,
        reply_tokens: int = REPLY_TOKENS,
    ) -> None:
        """prompt_tokens, reply_tokens: at most; the oldest messages are left out of a longer prompt."""
        self.template = template or ChatTemplate.of(decoder.checkpoint.folder, decoder.vocabulary)
        self.computed_tokens = self.kept_tokens = 0
        positions = decoder.checkpoint.config.stack.max_position_embeddings
        self._decoder = decoder
        self._reply_tokens = min(reply_tokens, positions // 2)
        self._prompt_tokens = min(prompt_tokens, positions - self._reply_tokens)
        self._left_out = 0  # of the oldest messages
        self._read: list[int] = []  # the last prompt
        self._said: TokenStream | None = None
        self._state: Any = None

    def reply(self, messages: Sequence[Message], seed: int | None = None) -> TokenStream:
        """The reply, token by token; the reply before it ends here, if it has not ended.

        Raises TextError for messages that are none or too long, and what `TextDecoder.generate` raises.
        """
        ids, self._left_out = self.template.ids_within(messages, self._prompt_tokens, self._left_out)
        state, keep = self._kept(ids)
        self._state = self._said = None  # a failure below leaves nothing to go on from
        stream = self._decoder.generate(ids, seed=seed, max_tokens=self._reply_tokens, after=(state, keep))
        self.kept_tokens, self.computed_tokens = keep, len(ids) - keep
        self._read, self._said, self._state = ids, stream, stream.state
        return stream

    def _kept(self, ids: list[int]) -> tuple[Any, int]:
        """The state to go on from, and how many of `ids` it holds."""
        if self._said is None:
            return None, 0
        self._said.cancel()
        if self._said.failed:
            return None, 0
        held = [*self._read, *self._said.ids[:-1]]  # the newest token was never computed
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids[:-1], strict=False)))
        return self._state, same
