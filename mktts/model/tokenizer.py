"""Text to token ids: the Qwen byte-level BPE as the Hub checkpoint defines it, for a complete or an arriving text."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from mktts.errors import CheckpointError, TextError

# How Qwen2 splits text before byte-pair merging (transformers' Qwen2Converter, Apache-2.0). qwen-tts with a local
# folder uses Mistral's pattern instead, which splits iPhone after the i; the Hub checkpoint was trained with this one.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TextTokenizer:
    """Byte-level BPE from vocab.json and merges.txt. Special tokens in the text are treated as ordinary text."""

    def __init__(self, model: BPE) -> None:
        self.normalizer = NFC()
        self.pieces = Split(Regex(SPLIT_PATTERN), behavior="isolated")  # byte-pair merging stays within a piece
        self.bytes = ByteLevel(add_prefix_space=False, use_regex=False)
        self.model = model
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = self.normalizer
        self._tokenizer.pre_tokenizer = Sequence([self.pieces, self.bytes])

    @classmethod
    def load(cls, folder: str | Path) -> TextTokenizer:
        """Reads `folder/vocab.json` and `folder/merges.txt`. Raises CheckpointError if they are unusable."""
        vocab, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        for path in (vocab, merges):
            if not path.is_file():
                raise CheckpointError(f"{path}: expected this file of the Hub layout, found nothing")
        try:
            return cls(BPE.from_file(str(vocab), str(merges)))
        except Exception as error:  # the library raises bare Exception for every kind of broken file
            raise CheckpointError(f"{vocab}: expected a BPE vocabulary beside its merges, found: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Number of entries of vocab.json; the ids of special tokens follow."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with nothing stripped or added. Raises TextError unless it is a valid Unicode str."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # not a str, or not valid Unicode
            _checked(text)
            raise

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encodes each text, on all cores. Raises TextError as `encode`."""
        found = self._tokenizer.encode_batch([_checked(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in found]


class IncrementalTokenizer:
    """Tokenizes a text that arrives in parts: the ids from `push` and `finish`, joined, equal `encode(text.strip())`.
    `push` holds back whatever a continuation can change: the last piece of the split, whitespace at the end, and a
    last character that may still combine with an accent."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = ""  # starts at a piece boundary, in normal form C
        self._started = False  # whether anything but whitespace has arrived
        self._finished = False

    def push(self, text: str) -> list[int]:
        """Appends `text`; returns the ids that are now final. Raises TextError after `finish`, or if it is not text."""
        if self._finished:
            raise TextError("this text was finished: start another utterance")
        text = _checked(text)
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        if not text:
            return []
        held = self._held = self._tokenizer.normalizer.normalize_str(self._held + text)
        # Normal form C never changes the text before a character of combining class 0, whatever follows (UAX 15).
        starters = (i for i in range(len(held) - 1, -1, -1) if unicodedata.combining(held[i]) == 0)
        return self._take(min(next(starters, 0), len(held.rstrip())))

    def finish(self) -> list[int]:
        """Returns the ids still held back; trailing whitespace is dropped. Raises TextError when called twice."""
        if self._finished:
            raise TextError("this text was finished already")
        self._finished = True
        self._held = self._held.rstrip()
        return self._take(len(self._held))

    def _take(self, certain: int) -> list[int]:
        """Removes the leading pieces that end within the first `certain` characters, and returns their ids."""
        ids: list[int] = []
        end, tokenizer = 0, self._tokenizer
        for piece, _ in tokenizer.pieces.pre_tokenize_str(self._held):
            if end + len(piece) > certain:
                break
            end += len(piece)
            for word, _ in tokenizer.bytes.pre_tokenize_str(piece):
                ids += [token.id for token in tokenizer.model.tokenize(word)]
        self._held = self._held[end:]
        return ids


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise TextError(f"expected text as str, found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair at character {error.start}"
        raise TextError(f"expected valid Unicode, found {found}; decode the text again") from None
    return text


def byte_symbols() -> dict[int, str]:
    """Byte -> printable symbol, in vocabulary order: the byte-level alphabet of GPT-2, which Qwen uses too."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
