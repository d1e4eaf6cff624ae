"""Sentences from freely licensed packages, unpacked into one folder (`mktts.training.data.packages`).

wordnet-base: quoted examples and short glosses, in today's English. wamerican: single words. bible-kjv with
bible-kjv-text: prose. Books of other packages: `mktts.training.data.books`. A sentence is taken only where each of its
words is in wamerican, so that names of species, abbreviations and slips of the pen stay outside.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mktts.errors import CheckpointError
from mktts.training.data import books
from mktts.training.data.words import article

MAX_WORDS = 24
MAX_LETTERS = 150  # about nine seconds of the teacher
_SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,;:'-]*[.?!]")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_RUDE = re.compile(r"\bslurs?\b|offensive (?:term|name|word)|obscen|vulgar|disparag|derogat|profan")
_ADULT = re.compile(
    r"\b(sex\w*|rap(e|ed|es|ist|ing)|whore\w*|harlot\w*|prostitut\w*|genital\w*|intercourse|naked\w*|nude|breasts?|"
    r"fornicat\w*|adulter\w*|incest\w*|porn\w*|circumcis\w*|semen|sperm|urine|urinat\w*|feces|suicid\w*|nazis?|"
    r"massacre\w*|tortur\w*|negro\w*|bastard\w*|orgasm\w*|erect\w*|testic\w*|vagina\w*|penis\w*|phall\w*|anus|anal|"
    r"fuck\w*|bitch\w*|slut\w*|squaw\w*|mulatto\w*|lynch\w*|retard\w*|midget\w*|spastic\w*|cripple\w*|gyps\w+|"
    r"homosexual\w*|lesbian\w*|jew(?:s|ish)?|gentiles?|holocaust|hitler|genocid\w*|terroris\w*|abortion\w*|fart\w*|"
    r"piss\w*|boobs?|tits?|asse?s?|damn\w*)\b",
    re.I,
)
# Common words that WordNet calls rude, or lists beside rude ones, in one sense of many.
_INNOCENT = set(
    "apply base blue boy bull camp clown coarse common crude curse dirt dirty earthy fairy filthy foul generalize "
    "gross guinea hollywood impure jerry mean mickey nasty oath outrage peter popularize pretentious puss queen "
    "secular shaft shrimp slang snatch softness spade swear taco tie tom tool violate".split()
)
_OLD = "thee|thou|thy|thine|thyself|ye|hath|hast|doth|dost|unto|saith|shalt|wilt|art|begat|yea|lo|behold"
_ARCHAIC = re.compile(rf"\b({_OLD}|\w+eth|\w\w+[^r]est)\b", re.I)
# figures, what comes after a quotation, old words
_NOT_FROM_BOOKS = re.compile(rf"\d|^(said|cried|replied|see)\b|\b({_OLD})\b", re.I)
_NOUN, _VERB = "noun", "verb"
_SKIPPED_FILES = {"05", "20"}  # WordNet's lexicographer files of animals and plants: mostly Latin
_DANGLING = re.compile(r"\b(for|to|of|with|from|at|by|on|in|into|upon|about|or|as|a|an|the)$")
_PROSE_WORDS = 7  # at least
_GLOSS_WORDS = range(3, 12)


class Corpora:
    """The texts under `folder`. Raises CheckpointError where a package is not unpacked there."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.dictionary = self._read("usr/share/dict/american-english", "wamerican").split()
        self._known = {word.lower() for word in self.dictionary} | set("ai")
        self._synsets = [s for part in ("noun", "verb", "adj", "adv") for s in self._synsets_of(part)]
        rude = (lemmas for _, _, lemmas, gloss in self._synsets if _RUDE.search(gloss))
        self._rude = {lemma.lower() for lemmas in rude for lemma in lemmas}
        self._rude -= _INNOCENT

    def words(self) -> list[str]:
        """Pronounceable words, names among them: no possessives, no abbreviations."""
        shape = re.compile(r"[A-Z]?[a-z]{2,13}")
        return [
            w
            for w in self.dictionary
            if shape.fullmatch(w) and re.search("[aeiouy]", w) and self._decent(w) and not re.search(r"(.)\1\1", w)
        ]

    def examples(self) -> Iterator[str]:
        """WordNet's quoted examples."""
        for _, _, _, gloss in self._synsets:
            for quoted in re.findall(r'"([^"]+)"', gloss):
                yield from self._cleaned(quoted)

    def glosses(self) -> Iterator[str]:
        """Short definitions of single words: "A pocket is a small pouch." """
        for part, file, lemmas, gloss in self._synsets:
            meaning = re.sub(r"\([^)]*\)", "", gloss.split('; "')[0].split(";")[0]).strip()
            lemma = lemmas[0].replace("_", " ")
            if (
                file in _SKIPPED_FILES
                or _DANGLING.search(meaning)
                or len(meaning.split()) not in _GLOSS_WORDS
                or not re.fullmatch("[a-z -]+", lemma)
            ):
                continue
            if part == _NOUN and re.match("an? ", meaning):
                yield from self._cleaned(f"{article(lemma)} {lemma} is {meaning}")
            elif part == _VERB and re.match("[a-z]", meaning):
                yield from self._cleaned(f"to {lemma} is to {meaning}")

    def prose(self) -> Iterator[str]:
        """Clauses of the King James text, as its own program prints it, without what nobody says any more."""
        program, data = self.folder / "usr/bin/bible", self.folder / "usr/lib"
        try:
            done = subprocess.run([program, "-f", "-p", data, "gen1:1-rev22:21"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CheckpointError(f"expected bible-kjv and bible-kjv-text unpacked in {self.folder}: {error}") from None
        for line in done.stdout.decode("ascii", "ignore").splitlines():
            for clause in re.findall(r"[^.;:?!]+[.;:?!]", line.partition(" ")[2]):
                if len(clause.split()) >= _PROSE_WORDS and not _ARCHAIC.search(clause):
                    yield from self._cleaned(clause.rstrip(";:"))

    def book(self, source: str) -> Iterator[str]:
        """Sentences of one of `books.SOURCES`, without figures and old words."""
        for text in books.SOURCES[source](self.folder):
            for candidate in books.sentences(text):
                if not _NOT_FROM_BOOKS.search(candidate):
                    yield from self._cleaned(candidate)

    def _cleaned(self, text: str) -> Iterator[str]:
        text = " ".join(text.split()).strip(" ,;:-")
        if not text:
            return
        text = text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")
        words = _WORD.findall(text)
        if (
            _SENTENCE.fullmatch(text)
            and 1 < len(text.split()) <= MAX_WORDS
            and len(text) <= MAX_LETTERS
            and not re.search(r"\b[A-Z]{2,}\b|\b[A-Z]-[A-Z]|--| '|\d\d\d\d\d", text)
            and self._decent(text)
            and all(w.lower() in self._known for w in words)
        ):
            yield text

    def _decent(self, text: str) -> bool:
        return not _ADULT.search(text) and not any(w.lower() in self._rude for w in _WORD.findall(text))

    def _synsets_of(self, part: str) -> Iterator[tuple[str, str, list[str], str]]:
        """(part of speech, lexicographer file, lemmas, gloss) of each; wndb(5WN) has the format."""
        for line in self._read(f"usr/share/wordnet/data.{part}", "wordnet-base").splitlines():
            if not line.startswith(" "):  # the licence is
                fields, _, gloss = line.partition(" | ")
                field = fields.split()
                yield (
                    part,
                    field[1],
                    [re.sub(r"\(\w+\)$", "", w) for w in field[4 : 4 + 2 * int(field[3], 16) : 2]],
                    gloss,
                )

    def _read(self, path: str, package: str) -> str:
        try:
            return (self.folder / path).read_text(encoding="utf-8", errors="ignore")
        except OSError as error:
            raise CheckpointError(f"expected Debian's {package} unpacked in {self.folder}: {error}") from None
