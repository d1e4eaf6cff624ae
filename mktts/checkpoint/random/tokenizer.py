"""A small byte-pair tokenizer in the files and with the ids of the released one, for random checkpoints.

256 byte symbols, merges learned from the words below, and unreachable fillers so that, as in the released
vocabulary, the special tokens start right after it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from mktts.common import read_object
from mktts.model.tokenizer import byte_symbols

SPECIAL_START = 151_643  # first special id = number of entries in the released vocab.json

TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_config() -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return read_object(Path(__file__).resolve().parent / "released" / TOKENIZER_CONFIG)


SPECIALS = tuple(added["content"] for added in tokenizer_config()["added_tokens_decoder"].values())

# the ids upstream's prompt layout depends on: roles must be one token each, a blank line is one token
FIXED_IDS = {"user": 872, "assistant": 77_091, "\n\n": 271}

# iPhone, JavaScript and the Thai word become one token only while the Qwen pre-tokenizer leaves them whole, so
# they tell it apart from the Mistral one that upstream swaps in for local folders
WORDS = (
    "user assistant iPhone JavaScript สวัสดี ครับ ภาษา the and that this with have from they will one all would there "
    "what about which when make can like time just know take people into year your good some could them see other "
    "than then now look only come its over think also back after use two how our work first well way even new want "
    "because any these give day most hello world voice speech stream frame sound speak text today weather morning "
    "music question answer please thank 你好 世界 今天 天气 语音 こんにちは 안녕하세요 für straße être mañana привет"
).split()


def symbols(text: str) -> str:
    """`text` in byte symbols: the spelling that vocab.json and merges.txt use."""
    alphabet = byte_symbols()
    return "".join(alphabet[b] for b in text.encode("utf-8"))


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Byte-pair merges, most frequent pair first, until every word (bare and after a space) is one token."""
    corpus = [list(symbols(text)) for text in ("\n\n", *WORDS, *(" " + word for word in WORDS))]
    learned: list[tuple[str, str]] = []
    while pairs := Counter(pair for word in corpus for pair in zip(word, word[1:], strict=False)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        corpus = [_merge(word, best) for word in corpus]
    return tuple(learned)


@cache
def vocabulary() -> dict[str, int]:
    """Token -> id, without gaps below SPECIAL_START."""
    vocab = {symbol: i for i, symbol in enumerate(byte_symbols().values())}
    fixed = {symbols(text): i for text, i in FIXED_IDS.items()}
    free = (i for i in range(len(vocab), SPECIAL_START) if i not in fixed.values())
    for left, right in merges():
        token = left + right
        if token not in vocab:
            vocab[token] = fixed[token] if token in fixed else next(free)
    vocab |= {f"<|unused_{i}|>": i for i in free}
    return dict(sorted(vocab.items(), key=lambda item: item[1]))


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out
