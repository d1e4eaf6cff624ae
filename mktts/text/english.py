"""A few words of English as they are spoken. The rules of english.json run from the particular to the general, each on
what those before it left: an address is no number, a date no fraction, a price no measure."""

import re
import unicodedata
from functools import cache, partial

from mktts.text import readers
from mktts.text.readers import LISTS, WORDS, all_capitals, read_alone, spell_letters

# Also Greek letters that stand as signs; μ and Ω stand in units.
_CHARACTERS = str.maketrans(
    WORDS["characters"] | {char: f" {name} " for char, name in WORDS["greek"].items() if char not in "μΩ"}
)
_VULGAR = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")  # 2½ is two and a half, not 21/2
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")


def plain_characters(text: str) -> str:
    """`text` in ASCII, but for signs that the rules read ($ and its like): one form of each mark, no accents."""
    text = re.sub(r"(?<=\d)×(?=\d)", "x", re.sub(r"(?<=[\d\w)])\s?[·⋅]\s?(?=\d)", "*", text))
    text = _RAISED.sub(lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("−", "-"), text)
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text.translate(_CHARACTERS))).translate(_CHARACTERS)
    plain = "".join(char for char in unicodedata.normalize("NFD", text) if char.isascii() or char in "$€£¥₹₩¢°µμΩ—")
    return re.sub(r"(?<=\S) {2,}", " ", plain)


def _plain_words(text: str) -> str:
    """Words in lower case and the marks . , ; : ? !: brackets and dashes become commas, the rest falls away."""
    text = re.sub(r"\s+-+\s+|—|--+|[()\[\]{}|]", ", ", text)
    text = re.sub(r"(?<!\.)\.{2,}(?=\s+[a-z])", ",", text)
    text = re.sub(r"[^A-Za-z0-9\s.,;:?!'-]", " ", text)
    text = re.sub(r"(?<![A-Za-z])['-]+|['-]+(?![A-Za-z])", " ", text)
    text = " ".join(text.split())
    text = re.sub(r"(?:\s*[.,;:?!])+", lambda m: next(mark for mark in "?!.:;," if mark in m[0]), text)
    text = re.sub(r"[A-Za-z]*[A-Za-z][a-z][A-Za-z]*|[A-Z]{2,}", lambda m: m[0].lower(), text)
    text = re.sub(r"(?<=[A-Za-z]')[A-Z]+\b|\b[A-Z](?='[a-z]{2})", lambda m: m[0].lower(), text)
    text = re.sub(r"\bA(?= [a-z])", "a", re.sub(r"\bi\b", "I", text))
    return re.sub(r"(?<=[.!?] )[a-z]", lambda m: m[0].upper(), text)


_PLAIN = re.compile(r"[\"'(]*(?P<core>[A-Za-z]?[a-z]*(?:'[a-z]+)?(?:-[a-z]+)*)[,;:.!?\"')]*")
_SENTENCE_END = re.compile(r"[\"'(]*(?P<core>[A-Za-z]{3,}|[A-Za-z]+'[A-Za-z]+)[.!?]+[\"')]*")
_TABLES = ("titles", "short_forms", "stopped_short_forms", "before_numbers", "units", "days")
# They belong to what stands beside them.
_BOUND = LISTS["binders"].union(LISTS["numbered"], *(WORDS[name] for name in _TABLES), {m[:3] for m in WORDS["months"]})
_FRAGMENT = re.compile(r"(?<!P)<(\w+)>")
_HOLE = re.compile(r"\{(?:([^{}|]*)\|)?([a-z_]+)(\d+)\}")


def _whole(pattern: str) -> str:
    """`pattern` with what "<name>" stands for: a fragment, the words of a list, or the keys of a table."""

    def fragment(match: re.Match[str]) -> str:
        words = LISTS.get(match[1]) or WORDS.get(match[1], ())
        written = WORDS["fragments"].get(match[1])
        return _whole(written or "|".join(map(re.escape, sorted(words, key=len, reverse=True))))

    return _FRAGMENT.sub(fragment, pattern)


@cache
def _rules() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(_whole(pattern)), words) for pattern, words in WORDS["rules"]]


def _filled(words: str, match: re.Match[str]) -> str:
    """A rule's words for what it found. "{s12}" is what the reader "s", else the table of that name, makes of groups 1
    and 2; "{, |s1}" has a comma before it; both are nothing where the first group has found nothing."""

    def read(hole: re.Match[str]) -> str:
        before, name, groups = hole.groups("")
        found = [match[int(group)] for group in groups]
        return "" if found[0] is None else before + getattr(readers, name, partial(readers.look_up, name))(*found)

    return _HOLE.sub(read, match.expand(words))


def is_plain(token: str) -> bool:
    """Whether a word is read as it is written, and says nothing about how its neighbours are read."""
    found = _PLAIN.fullmatch(token)
    core = found["core"].lower() if found else ""
    if len(core) < 2 or token == "in.":
        return core in ("a", "i")
    return core not in _BOUND and read_alone(core) == core


def ends_sentence(token: str) -> bool:
    """Whether a word and its full stop surely end a sentence: no abbreviation does."""
    found = _SENTENCE_END.fullmatch(token)
    return bool(found) and found["core"].lower() not in _BOUND


def reading(text: str) -> str:
    """Some words of a sentence as they are spoken, in lower case but for "I" and single letters."""
    if not all(map(is_plain, text.split())):
        text = plain_characters(text)
        shouted = all_capitals(text)
        for pattern, words in _rules():
            text = pattern.sub(partial(_filled, words), text)
        text = spell_letters(text, shouted)
    return _plain_words(text)
