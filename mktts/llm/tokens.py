"""Text and conversations to ids, and ids to text, for a Qwen3 text model.

A conversation is what Qwen3 was trained on, its chat template without tools:

    <|im_start|>system\\n...<|im_end|>\\n<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n

A checkpoint whose own template knows `enable_thinking` is told that the thought is over before it begins, as that
template does where it is false: what such a model says is spoken, and a listener does not wait for thoughts."""

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
    """Both directions of a Qwen tokenizer. As in speech, added tokens are never parsed out of text: "<|im_end|>" in a
    prompt is ten characters. Ids of added tokens go into a prompt as ids; `added` maps their text to them."""

    def __init__(self, folder: Path, rows: int) -> None:
        """Reads vocab.json, merges.txt and tokenizer_config.json. rows: of the embedding; more tokens than that raise
        CheckpointError, as does any unusable file."""
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
        # A special token (end of text, start of a turn) has no text.
        self._added = {i: b"" if special else content.encode() for i, (content, special) in added.items()}
        self.added = {content: i for i, (content, _) in added.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands. Raises TextError for what is not text."""
        return self._tokenizer.encode(text)

    def data(self, token_id: int) -> bytes:
        """The UTF-8 bytes an id stands for: perhaps part of a character; none for special and unused ids."""
        if token_id in self._added:
            return self._added[token_id]
        symbols = self._tokenizer.model.id_to_token(token_id) or ""
        if not set(symbols) <= _BYTES.keys():
            return symbols.encode()  # no byte-level token; as the tokenizers library decodes it
        return bytes(_BYTES[s] for s in symbols)


class Message(NamedTuple):
    """role: one of ROLES."""

    role: str
    content: str


class ChatTemplate:
    """Messages to token ids. What stands in a message is text: no control token is read out of it. think, thought: the
    ids around a thought; None where the vocabulary has none."""

    def __init__(self, vocabulary: TextVocabulary, thinks: bool) -> None:
        """thinks: the model has to be told not to. Raises CheckpointError for a vocabulary without turns."""
        self._vocabulary = vocabulary
        try:
            self._start, self._end = (vocabulary.added[name] for name in (_START, _END))
        except KeyError as error:
            raise CheckpointError(
                f"expected a model that was trained on conversations, with the token {error.args[0]}: it has none; "
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
        # Without a template of its own: as the first Qwen3 models, whose vocabulary has the two tokens.
        return cls(vocabulary, template is None or "enable_thinking" in str(template))

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of the assistant's next reply to `messages`. Raises TextError for an unknown role."""
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
        """As `ids`, without the oldest messages where all of them take more than `most` tokens; a system's first one
        stays. Returns how many were left out, too.

        left_out: at the call before, whose prompt this one continues: so many are left out again, and more only where
        `most` demands it; then so many that the rest takes half of it, and later calls continue its prompt. Raises
        TextError where the last message takes too much alone."""
        first = 1 if messages and messages[0].role == "system" else 0
        head, others = list(messages[:first]), list(messages[first:])
        left_out = left_out if left_out < len(others) else 0  # else it is another conversation
        ids = self.ids([*head, *others[left_out:]])
        if len(ids) > most:
            while len(ids) > most // 2 and left_out < len(others) - 1:
                left_out += 1
                ids = self.ids([*head, *others[left_out:]])
        if len(ids) > most:
            raise TextError(f"a message and the instructions may take {most} tokens together, got {len(ids)}")
        return ids, left_out
