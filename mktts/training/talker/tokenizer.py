"""The small voice's byte-level BPE, in the Hub's files, splitting text as Qwen does.

The special tokens follow vocab.json directly, in the released order; only the vocabulary before them is smaller.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from mktts.checkpoint.random.tokenizer import SPECIAL_START, SPECIALS, tokenizer_config
from mktts.common import read_object, write_json
from mktts.model.tokenizer import SPLIT_PATTERN, byte_symbols

_WHOLE = ("assistant", "user")  # roles that a prompt takes as one token
_ROWS = 64  # the text table is padded to a multiple of this


def train_tokenizer(folder: Path, sentences: Iterable[str], merges: int) -> dict[str, int]:
    """Writes vocab.json, merges.txt and tokenizer_config.json; the ids that `config_files` needs.

    merges: how many are learnt; the role words may add a few after them, which hardly any other word meets.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = NFC()
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(SPLIT_PATTERN), behavior="isolated"), byte_level])
    alphabet = list(byte_symbols().values())
    trainer = BpeTrainer(vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    vocabulary: dict[str, int] = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    for word in _WHOLE:
        left, *rest = [token.value for token in BPE(vocabulary, pairs).tokenize(word)]
        for right in rest:
            pairs.append((left, right))
            left += right
            vocabulary.setdefault(left, len(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = "".join(f"{left} {right}\n" for left, right in pairs)
    (folder / "merges.txt").write_text("#version: 0.2\n" + lines, encoding="utf-8")
    config = tokenizer_config()
    added = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(int(i) - SPECIAL_START + len(vocabulary)): t for i, t in added.items()}
    write_json(folder / "tokenizer_config.json", config, sort_keys=False)
    return text_ids(folder)


def taken_tokenizer(folder: Path, other: Path) -> dict[str, int]:
    """The tokenizer of the voice in `other` for `folder`, too; the ids that `config_files` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(other / name, folder / name)
    return text_ids(folder)


def text_ids(folder: Path) -> dict[str, int]:
    """Special token and "assistant" -> id; "" -> rows of the text table."""
    vocabulary = read_object(folder / "vocab.json")
    ids = {token: len(vocabulary) + i for i, token in enumerate(SPECIALS)}
    rows = -(-(len(vocabulary) + len(SPECIALS)) // _ROWS) * _ROWS
    return ids | {"assistant": vocabulary["assistant"], "": rows}
