"""The words and sentence patterns of the training grammar, from two plain files, and how English bends the words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

_SILENT_H = re.compile(r"(?:hour|honest|heir|honor)")
_YOU_SOUND = re.compile(r"(?:u(?:[bcfst]e|su|[bct]i|ni(?!m|nt|n[a-z]|d)|ra)|eu|ewe|one\b|once\b)", re.I)
_DOUBLES = re.compile(r"[^aeiou]*(?:qu)?[aeiou][^aeiouwxy]")  # "stop": of one syllable with one short vowel


def article(word: str) -> str:
    """ "a" or "an" before a word, by its first sound as far as spelling tells."""
    vowel = word[0].lower() in "aeiou" and not _YOU_SOUND.match(word) or _SILENT_H.match(word)
    return "an" if vowel else "a"


def plural(noun: str) -> str:
    if re.search(r"(?:s|x|z|ch|sh)$", noun):
        return noun + "es"
    return noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"


def past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ied"
    return (verb + verb[-1] if _DOUBLES.fullmatch(verb) else verb) + "ed"


def ing(verb: str) -> str:
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if re.search(r"[^eoy]e$", verb):
        return verb[:-1] + "ing"
    return (verb + verb[-1] if _DOUBLES.fullmatch(verb) else verb) + "ing"


@dataclass(frozen=True)
class Entry:
    """base: as it stands in a dictionary. given: what no rule gives, a noun's plural or a verb's three other forms."""

    base: str
    given: tuple[str, ...] = ()

    def form(self, name: str) -> str:
        """ "": the base. s: plural, or third person. ed, en, ing: a verb's. m: after "more". KeyError for others."""
        if name in ("", "m"):
            return self.base
        if name == "s":
            if len(self.given) == 1:
                return self.given[0]
            head, particle = self._head()
            return plural(head) + particle
        given = dict(zip(("ed", "en", "ing"), self.given, strict=False))
        if name in given:
            return given[name]
        if name == "en":
            return self.form("ed")
        head, particle = self._head()
        return {"ed": past, "ing": ing}[name](head) + particle

    def _head(self) -> tuple[str, str]:
        """A verb's particle is not bent ("pick up"); a noun's last word is, and has no other forms given."""
        head, space, particle = self.base.partition(" ") if len(self.given) > 1 else (self.base, "", "")
        return head, space + particle


def _sections(name: str) -> dict[str, list[str]]:
    """Lines under each [heading], without comments."""
    found: dict[str, list[str]] = {}
    for line in files("mktts.training.data").joinpath(name).read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            lines = found.setdefault(heading[1], [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def _entry(written: str) -> Entry:
    base, *given = written.replace("_", " ").split("/")
    return Entry(base, tuple(given))


LISTS: dict[str, list[Entry]] = {
    name: [_entry(written) for written in dict.fromkeys(" ".join(lines).split())]
    for name, lines in _sections("vocabulary.txt").items()
}
TEMPLATES: dict[str, list[str]] = _sections("templates.txt")
