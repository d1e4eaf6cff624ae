"""Text to ids and ids to text for a Qwen3 text model; ids become text piece by piece, never half a character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.models import BPE

from mktts.common import read_object
from mktts.errors import CheckpointError
from mktts.model.tokenizer import SPLIT_PATTERN, TextTokenizer, byte_symbols

_BYTES = {symbol: byte for byte, symbol in byte_symbols().items()}


@dataclass(frozen=True)
class AddedToken:
    """A token beside the byte-pair vocabulary; a special one (end of text, start of a turn) has no text."""

    content: str
    special: bool


class TextVocabulary:
    """Both directions of a Qwen tokenizer: `encode`, and `Detokenizer` back.

    As in speech, added tokens are never parsed out of text: "<|im_end|>" in a prompt is ten characters. Ids of added
    tokens go into a prompt as ids; `added` maps their text to them.
    """

    def __init__(self, model: BPE, added: Mapping[int, AddedToken]) -> None:
        self._model = model
        self._tokenizer = TextTokenizer(model)
        self._added = dict(added)
        self.added = {token.content: i for i, token in added.items()}

    @classmethod
    def load(cls, folder: Path, rows: int) -> TextVocabulary:
        """Reads vocab.json, merges.txt and tokenizer_config.json, or tokenizer.json where vocab.json is absent.

        `rows`: of the embedding; more tokens than that raise CheckpointError, as does any unusable file.
        """
        vocab, single = folder / "vocab.json", folder / "tokenizer.json"
        if vocab.is_file() and (folder / "merges.txt").is_file():
            model, added = _read_bpe(vocab), _read_added(folder)
        elif single.is_file():
            vocab = single
            model, added = _read_single(single)
        else:
            raise CheckpointError(f"{folder}: expected vocab.json and merges.txt, or tokenizer.json, found neither")
        vocabulary = cls(model, added)
        top = max([vocabulary._tokenizer.vocab_size - 1, *added])
        if top >= rows:
            raise CheckpointError(
                f"{vocab}: expected ids below the embedding's {rows} rows, found {top}. "
                "Take the tokenizer from the checkpoint's own repository."
            )
        return vocabulary

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands. Raises TextError for what is not text."""
        return self._tokenizer.encode(text)

    def data(self, token_id: int) -> bytes:
        """The UTF-8 bytes an id stands for: perhaps part of a character; none for special and unused ids."""
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        symbols = self._model.id_to_token(token_id)
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


def _read_bpe(vocab: Path) -> BPE:
    try:
        return BPE.from_file(str(vocab), str(vocab.with_name("merges.txt")))
    except Exception as error:  # the library raises bare Exception for every kind of broken file
        raise CheckpointError(f"{vocab}: expected a BPE vocabulary beside its merges, found: {error}") from None


def _read_added(folder: Path) -> dict[int, AddedToken]:
    path = folder / "tokenizer_config.json"
    entries = read_object(path).get("added_tokens_decoder")
    try:
        return {int(i): AddedToken(str(e["content"]), bool(e["special"])) for i, e in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected added_tokens_decoder, id to token, found: {error!r}") from None


def _read_single(path: Path) -> tuple[BPE, dict[int, AddedToken]]:
    """Vocabulary and added tokens of a tokenizer.json (merges as "left right" or as pairs)."""
    raw = read_object(path)
    if SPLIT_PATTERN not in _strings(raw.get("pre_tokenizer")):
        raise CheckpointError(
            f"{path}: expected Qwen's pre-tokenizer pattern, found {json.dumps(raw.get('pre_tokenizer'))[:200]}"
        )
    try:
        model = raw["model"]
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        added = {e["id"]: AddedToken(str(e["content"]), bool(e["special"])) for e in raw["added_tokens"]}
        return BPE(model["vocab"], merges), added
    except Exception as error:  # a missing key, or the library's bare Exception
        raise CheckpointError(f"{path}: expected a byte-pair model and its added tokens, found: {error!r}") from None


def _strings(value: Any) -> list[str]:
    """Every string inside a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _strings(item)]
