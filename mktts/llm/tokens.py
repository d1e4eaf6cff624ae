"""Converts text and conversations to token ids, and ids to text, for a Qwen3 text model.

A conversation is encoded as Qwen3 was trained, by its chat template without tools:

    <|im_start|>system\\n...<|im_end|>\\n<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n

If the checkpoint's own template knows `enable_thinking`, the prompt ends with an empty thought, as in that template
when it is false: replies are spoken, and a listener should not wait for thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mktts.common import one_of, read_object
from mktts.errors import CheckpointError, TextError
from mktts.model.tokenizer import TextTokenizer, byte_symbols

_START, _END, _THINK, _THOUGHT = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
ROLES = ("system", "user", "assistant")
_BYTES = {symbol: byte for byte, symbol in byte_symbols().items()}


class TextVocabulary:
    """A Qwen tokenizer in both directions. As for speech, added tokens are never parsed from text: "<|im_end|>" in a
    prompt is ten characters. They can only be put into a prompt as ids. added: ids by the text of the added token."""

    def __init__(self, folder: Path, rows: int) -> None:
        """Reads vocab.json, merges.txt and tokenizer_config.json. rows: of the embedding. Raises CheckpointError for an
        unusable file, and for ids that exceed the rows."""
        self._tokenizer, config = TextTokenizer.load(folder), folder / "tokenizer_config.json"
        entries = read_object(config).get("added_tokens_decoder")
        try:
            added = {int(i): (str(e["content"]), bool(e["special"])) for i, e in entries.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{config}: expected added_tokens_decoder, id to token, found: {error!r}") from None
        top = max([self._tokenizer.vocab_size - 1, *added])
        if top >= rows:
            raise CheckpointError(
                f"{folder / 'vocab.json'}: expected ids below the embedding's {rows} rows, found {top}. "
                "Take the tokenizer from the checkpoint's own repository."
            )
        # Special tokens, such as end of text or start of a turn, have no text.
        self._added = {i: b"" if special else content.encode() for i, (content, special) in added.items()}
        self.added = {content: i for i, (content, _) in added.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without a template. Raises TextError for what is not text."""
        return self._tokenizer.encode(text)

    def data(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, perhaps a part of a character; b"" for special and unused ids."""
        if token_id in self._added:
            return self._added[token_id]
        symbols = self._tokenizer.model.id_to_token(token_id) or ""
        if not set(symbols) <= _BYTES.keys():
            return symbols.encode()  # not a byte-level token: decoded as in the tokenizers library
        return bytes(_BYTES[s] for s in symbols)


class Message(NamedTuple):
    """A message of a conversation. role: one of ROLES."""

    role: str
    content: str


class ChatTemplate:
    """Converts messages to token ids. The content of a message is text, in which no control tokens are recognised.
    think, thought: the ids before and after a thought; None if the vocabulary lacks them."""

    def __init__(self, vocabulary: TextVocabulary, thinks: bool) -> None:
        """thinks: whether the model thinks unless told not to. Raises CheckpointError if there are no chat tokens."""
        self._vocabulary = vocabulary
        try:
            self._start, self._end = (vocabulary.added[name] for name in (_START, _END))
        except KeyError as error:
            raise CheckpointError(
                f"expected a model that was trained on conversations, but it lacks the token {error.args[0]}; "
                "take one such as Qwen/Qwen3-0.6B"
            ) from None
        self.think, self.thought = vocabulary.added.get(_THINK), vocabulary.added.get(_THOUGHT)
        self._thinks = thinks and None not in (self.think, self.thought)

    @classmethod
    def of(cls, folder: Path, vocabulary: TextVocabulary) -> ChatTemplate:
        """The template of a checkpoint's folder. Raises CheckpointError."""
        separate, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        if separate.is_file():
            template = separate.read_text(encoding="utf-8")
        else:
            template = read_object(config).get("chat_template") if config.is_file() else None
        # A checkpoint without a template is treated like the first Qwen3 models, whose vocabulary has the two tokens.
        return cls(vocabulary, template is None or "enable_thinking" in str(template))

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for the assistant's next reply to `messages`. Raises TextError for an unknown role."""
        encode = self._vocabulary.encode
        ids: list[int] = []
        for message in messages:
            one_of("a message's role", message.role, ROLES, TextError)
            content = message.content
            if message.role == "assistant" and _THOUGHT in content:
                content = content.rpartition(_THOUGHT)[2].lstrip("\n")
            ids += [self._start, *encode(f"{message.role}\n{content}"), self._end, *encode("\n")]
        ids += [self._start, *encode("assistant\n")]
        if self._thinks:
            ids += [self.think, *encode("\n\n"), self.thought, *encode("\n\n")]
        return ids

    def ids_within(self, messages: Sequence[Message], most: int, left_out: int = 0) -> tuple[list[int], int]:
        """The prompt as in `ids`, without the oldest messages if it exceeds `most` tokens; an initial system message is
        kept. Returns the ids and the number of messages left out.

        left_out: the number at the previous call. As many are left out again, so that this prompt continues the
        previous one. If it is still too long, it is cut to half of `most`, so that the following calls can continue it.
        Raises TextError if the last message alone is too long."""
        first = 1 if messages and messages[0].role == "system" else 0
        head, others = list(messages[:first]), list(messages[first:])
        left_out = left_out if left_out < len(others) else 0  # otherwise it is a new conversation
        ids = self.ids([*head, *others[left_out:]])
        if len(ids) > most:
            while len(ids) > most // 2 and left_out < len(others) - 1:
                left_out += 1
                ids = self.ids([*head, *others[left_out:]])
        if len(ids) > most:
            raise TextError(f"a message and the instructions may have at most {most} tokens, got {len(ids)}")
        return ids, left_out
