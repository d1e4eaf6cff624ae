"""Text that arrives later, piece by piece: the prompt waits for it without stepping the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from mktts.errors import PromptError, TextError
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.tokenizer import IncrementalTokenizer


class FedPrompt:
    """Talker input of one utterance whose text arrives piece by piece. Streaming layout; not thread-safe.

    `embeds` exists once `ready`; `row` returns None while its token has not arrived and the text is open.
    """

    def __init__(self, builder: PromptBuilder, request: Request) -> None:
        """`request` comes from `PromptBuilder.check`, in the streaming layout; its text is the first piece, or empty.

        Raises PromptError for another layout.
        """
        if request.layout != "streaming":
            raise PromptError(f"text that arrives later needs the streaming layout, got layout={request.layout!r}")
        self._builder = builder
        self._request = request
        self._tokens = IncrementalTokenizer(builder.tokenizer)
        self.text_tokens = 0
        self.text_ended = False
        self._rows = builder.reference_rows(request)  # then one per text token, then end-of-text
        self._reference_rows = len(self._rows)
        self._in_prompt = builder.text_rows_in_prompt(request)
        self._prompt: tuple[Tensor, int, Hashable] | None = None  # with its prefix rows and key
        self.pad = builder.special_rows(builder.config.text_ids.tts_pad)[0]
        self.push(request.text)

    @property
    def ready(self) -> bool:
        """Whether enough text has arrived to prefill."""
        return self.text_ended or len(self._rows) >= self._in_prompt

    @property
    def embeds(self) -> Tensor:
        """The prompt (L, H). Raises PromptError before `ready`."""
        return self._made()[0]

    @property
    def prefix_rows(self) -> int:
        """As `Prompt.prefix_rows`. Raises PromptError before `ready`."""
        return self._made()[1]

    @property
    def prefix_key(self) -> Hashable | None:
        """As `Prompt.prefix_key`. Raises PromptError before `ready`."""
        return self._made()[2]

    def push(self, text: str) -> None:
        """Adds text. Raises TextError after `close`, or when `text` is not a string."""
        if not isinstance(text, str):
            raise TextError(f"text must be a str, got {type(text).__name__}")
        if self.text_ended:
            raise TextError("the text was closed: start another utterance")
        self._take(self._tokens.push(text))

    def close(self) -> None:
        """Says that no more text comes. Raises TextError when there was none."""
        if self.text_ended:
            return
        self._take(self._tokens.finish())
        if not self.text_tokens:
            raise TextError("expected some text before the end of the feed, got none")
        self._rows.append(self._builder.special_rows(self._builder.config.text_ids.tts_eos)[0])
        self.text_ended = True

    def row(self, frame: int) -> Tensor | None:
        """As `Prompt.row`, or None: wait for text."""
        index = self._in_prompt + frame
        if index < len(self._rows):
            return self._rows[index]
        return self.pad if self.text_ended else None

    def _made(self) -> tuple[Tensor, int, Hashable]:
        if self._prompt is None:
            if not self.ready:
                raise PromptError("the prompt needs text first: push a piece that completes a word, or close the feed")
            self._prompt = self._builder.fed_prompt(self._request, self._rows, self._reference_rows)
        return self._prompt

    def _take(self, ids: Sequence[int]) -> None:
        self.text_tokens += len(ids)
        # One token at a time: the rows do not depend on how the text was cut into pieces.
        self._rows.extend(self._builder.text_rows([i])[0] for i in ids)
