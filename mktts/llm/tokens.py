"""Text to ids and ids to text for a Qwen3 text model; ids become text piece by piece, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mktts.common import read_object
from mktts.errors import CheckpointError
from mktts.model.tokenizer import TextTokenizer, byte_symbols

_BYTES = {symbol: byte for byte, symbol in byte_symbols().items()}


class AddedToken(NamedTuple):
    """A token beside the byte-pair vocabulary; a special one (end of text, start of a turn) has no text."""

    content: str
    special: bool


class TextVocabulary:
    """Both directions of a Qwen tokenizer: `encode`, and `Detokenizer` back.

    As in speech, added tokens are never parsed out of text: "<|im_end|>" in a prompt is ten characters. Ids of added
    tokens go into a prompt as ids; `added` maps their text to them.
    """

    def __init__(self, tokenizer: TextTokenizer, added: Mapping[int, AddedToken]) -> None:
        self._tokenizer = tokenizer
        self._added = dict(added)
        self.added = {token.content: i for i, token in added.items()}

    @classmethod
    def load(cls, folder: Path, rows: int) -> TextVocabulary:
        """Reads vocab.json, merges.txt and tokenizer_config.json.

        rows: of the embedding; more tokens than that raise CheckpointError, as does any unusable file.
        """
        tokenizer, config = TextTokenizer.load(folder), folder / "tokenizer_config.json"
        entries = read_object(config).get("added_tokens_decoder")
        try:
            added = {int(i): AddedToken(str(e["content"]), bool(e["special"])) for i, e in entries.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{config}: expected added_tokens_decoder, id to token, found: {error!r}") from None
        top = max([tokenizer.vocab_size - 1, *added])
        if top >= rows:
            raise CheckpointError(
                f"{folder / 'vocab.json'}: expected ids below the embedding's {rows} rows, found {top}. "
                "Take the tokenizer from the checkpoint's own repository."
            )
        return cls(tokenizer, added)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands. Raises TextError for what is not text."""
        return self._tokenizer.encode(text)

    def data(self, token_id: int) -> bytes:
        """The UTF-8 bytes an id stands for: perhaps part of a character; none for special and unused ids."""
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        symbols = self._tokenizer.model.id_to_token(token_id)
        if symbols is None:
            return b""
        if not set(symbols) <= _BYTES.keys():
            return symbols.encode()  # no byte-level token; as the tokenizers library decodes it
        return bytes(_BYTES[s] for s in symbols)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        pieces = Detokenizer(self)
        return "".join(pieces.push(i) for i in ids) + pieces.finish()


class Detokenizer:
    """Text of ids that arrive one at a time: what `push` and `finish` return, joined, is the text of all of them.

    A character whose bytes are spread over several tokens comes with the last of them.
    """

    def __init__(self, vocabulary: TextVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, perhaps none."""
        return self._decoder.decode(self._vocabulary.data(token_id))

    def finish(self) -> str:
        """U+FFFD where the ids end inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
