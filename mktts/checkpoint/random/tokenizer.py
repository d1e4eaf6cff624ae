"""A small byte-pair tokenizer in the files and with the ids of the released one, for random checkpoints.

256 byte symbols, the pairs of merges.bpe, and unreachable fillers so that, as in the released vocabulary, the special
tokens start right after it. The pairs make some two hundred words one token each, bare and after a space. Among them
iPhone, JavaScript and Thai ones, which are whole only for the Qwen pre-tokenizer: they tell it apart from the Mistral
one that upstream swaps in for local folders.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mktts.model.tokenizer import byte_symbols

MERGES = Path(__file__).with_name("merges.bpe")
SPECIAL_START = 151_643  # first special id = number of entries in the released vocab.json
# The ids that upstream's prompt layout depends on, in byte symbols: roles and a blank line are one token each.
FIXED_IDS = {"user": 872, "assistant": 77_091, "ĊĊ": 271}


@cache
def vocabulary() -> dict[str, int]:
    """Token -> id, without gaps below SPECIAL_START."""
    vocab = {symbol: i for i, symbol in enumerate(byte_symbols().values())}
    free = (i for i in range(len(vocab), SPECIAL_START) if i not in FIXED_IDS.values())
    for line in MERGES.read_text(encoding="utf-8").splitlines()[1:]:
        token = line.replace(" ", "")
        if token not in vocab:
            vocab[token] = FIXED_IDS[token] if token in FIXED_IDS else next(free)
    vocab |= {f"<|unused_{i}|>": i for i in free}
    return dict(sorted(vocab.items(), key=lambda item: item[1]))
