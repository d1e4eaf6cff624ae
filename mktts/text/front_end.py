"""The front end called "english" in a checkpoint's generation_config.json: English is read, other languages pass. The
rules of english.json run from the particular to the general, each on what those before it left: an address is no
number, a date no fraction, a price no measure."""

import re
import unicodedata
from collections.abc import Iterable
from functools import cache, partial

from mktts.errors import TextError
from mktts.text import readers
from mktts.text.markup import MarkupFeed
from mktts.text.readers import LISTS, NO_VOWEL, WORDS, all_capitals, spell_letters

ENGLISH = "english"
AUTO = "auto"
_LATIN = "LATIN"
_LONGEST_CHARS = 240  # held back at most: a text without a plain word is cut at a space
_ENDS = ".!?"
_PAUSES = ",;:"
_MARKS = _ENDS + _PAUSES
_ITEM = re.compile(r"[-*•]|\d{1,2}[.)]")  # what begins a line of a list
_BULLET = re.compile(r"^(?:[-*•>]|#{1,6})(?=\s|$)\s*")

# Also Greek letters that stand as signs; μ and Ω stand in units.
_CHARACTERS = str.maketrans(
    WORDS["characters"] | {char: f" {name} " for char, name in WORDS["greek"].items() if char not in "μΩ"}
)
_VULGAR = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")  # 2½ is two and a half, not 21/2
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")

_PLAIN = re.compile(r"[\"'(]*(?P<core>[A-Za-z]?[a-z]*(?:'[a-z]+)?(?:-[a-z]+)*)[,;:.!?\"')]*")
_SENTENCE_END = re.compile(r"[\"'(]*(?P<core>[A-Za-z]{3,}|[A-Za-z]+'[A-Za-z]+)[.!?]+[\"')]*")
_TABLES = ("titles", "short_forms", "stopped_short_forms", "before_numbers", "units", "days")
# They belong to what stands beside them.
_BOUND = LISTS["binders"].union(LISTS["numbered"], *(WORDS[name] for name in _TABLES), {m[:3] for m in WORDS["months"]})
_NOT_PLAIN = _BOUND.union(LISTS["spelled"], WORDS["respelled"])
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


def _plain_characters(text: str) -> str:
    """`text` in ASCII, but for signs that the rules read ($ and its like): one form of each mark, no accents."""
    text = re.sub(r"(?<=\d)×(?=\d)", "x", re.sub(r"(?<=[\d\w)])\s?[·⋅]\s?(?=\d)", "*", text))
    text = _RAISED.sub(lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("−", "-"), text)
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text.translate(_CHARACTERS))).translate(_CHARACTERS)
    plain = "".join(char for char in unicodedata.normalize("NFD", text) if char.isascii() or char in "$€£¥₹₩¢°µμΩ—")
    return re.sub(r"(?<=\S) {2,}", " ", plain)


def _is_plain(token: str) -> bool:
    """Whether a word is read as it is written, and says nothing about how its neighbours are read."""
    found = _PLAIN.fullmatch(token)
    core = found["core"].lower() if found else ""
    if len(core) < 2 or token == "in.":
        return core in ("a", "i")
    return core not in _NOT_PLAIN and not NO_VOWEL.fullmatch(core)


def _reading(text: str) -> str:
    """Some words of a sentence as they are spoken, in lower case but for "I" and single letters, and the marks . , ; :
    ? !: brackets and dashes become commas, the rest falls away."""
    if not all(map(_is_plain, text.split())):
        text = _plain_characters(text)
        shouted = all_capitals(text)
        for pattern, words in _rules():
            text = pattern.sub(partial(_filled, words), text)
        text = spell_letters(text, shouted)
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


@cache
def _script(char: str) -> str:
    """Latin also for a sign, and for a letter that every language may use."""
    for part in unicodedata.normalize("NFKC", char):
        own = not part.isascii() and part not in WORDS["greek"]
        if own and unicodedata.category(part) in ("Lu", "Ll", "Lt", "Lo", "Nd"):
            return unicodedata.name(part, "UNKNOWN").split()[0]
    return _LATIN


class FrontEndFeed:
    """What is read, joined, is one sentence after another, each begun with a capital and ended by a mark."""

    def __init__(self, languages: tuple[str, ...], language: str = AUTO) -> None:
        """languages: that a text in "auto" may be in. English alone is read, other text stays as it is."""
        self._languages = languages if language == AUTO else (language,)
        self._scripts = {_LATIN}.union(*(WORDS["scripts"].get(language, ()) for language in self._languages))
        self._reads = self._languages == (ENGLISH,)
        self._letters = False  # one came, or a digit
        self._held = ""  # words that may belong together, a space behind each
        self._word = ""  # the last one, perhaps not complete
        self._gap = ""  # whitespace after it
        self._begins_line = False  # the last word
        self._said = ""  # the last mark or letter that was handed on
        self._pause = ""  # a mark after it that is handed on only if words follow

    def take(self, piece: str, final: bool = False) -> str:
        """The words that are certain, in front of them the space that joins them to what came before. Raises TextError
        for letters of another script, the piece is then not taken; at the end where no letter or digit came."""
        for place, char in enumerate("" if piece.isascii() else piece):
            if _script(char) not in self._scripts:
                raise TextError(
                    f"expected text that a voice of {', '.join(self._languages)} can speak, in the letters "
                    f"{', '.join(sorted(self._scripts))}, got {_script(char)} in {piece[place : place + 20]!r}: "
                    "leave it out, or take a checkpoint of that language"
                )
        self._letters = self._letters or any(map(str.isalnum, piece))
        said = piece
        if self._reads:
            said = ""
            for gap, part in re.findall(r"(\s*)(\S*)", piece):
                self._gap += gap
                if self._gap and part:
                    said += self._complete()
                self._word += part
            if final:
                self._gap = "\n\n"  # as behind a paragraph
                said += self._complete()
        if final and not (self._letters and (self._said or not self._reads)):
            raise TextError("expected text with a letter or a digit, got none of them: marks and signs have no words")
        return said

    def _complete(self) -> str:
        """Books the last word. Returns what is certain then: what was held before it where there is a cut, and the word
        too where it ends a sentence: no abbreviation does."""
        word, lines, said = self._word, self._gap.count("\n"), ""
        last_two = (*self._held.split()[-1:], word)
        if self._begins_line and _ITEM.match(word):
            said = self._hand_on(ends=True)
        elif self._held and (all(map(_is_plain, last_two)) or len(self._held) + len(word) > _LONGEST_CHARS):
            said = self._hand_on()
        self._held += f"{word} "
        self._word, self._gap, self._begins_line = "", "", lines > 0
        end = _SENTENCE_END.fullmatch(word)
        if lines > 1 or (end and end["core"].lower() not in _BOUND):
            said += self._hand_on(ends=lines > 1)
        return said

    def _hand_on(self, ends: bool = False) -> str:
        """What was held. ends: with the mark that ends it, where it has none."""
        text, said, self._held = self._held.strip(), "", ""
        begins = self._said in _ENDS
        text = _reading(_BULLET.sub("", text, count=1) if begins else text)
        if begins or self._pause:
            text = text.lstrip(_MARKS + " ")
        if text:
            if begins:
                text = text[0].upper() + text[1:]
            joined = self._pause + (" " if self._said and text[0] not in _MARKS else "")
            words = text.rstrip(_PAUSES)
            said = joined + words if words else ""
            self._said, self._pause = words[-1:] or self._said, text[len(words) :]
        if ends and self._said not in _ENDS:
            self._said, said = ".", said + "."
        if ends:
            self._pause = ""
        return said


class FrontEnd:
    """How a checkpoint reads text."""

    def __init__(self, languages: Iterable[str] = (ENGLISH,)) -> None:
        """languages: those that the checkpoint speaks; where it is one beside "auto", "auto" means it."""
        self.languages = tuple(language for language in languages if language != AUTO)
        self.read("1", ENGLISH)  # its tables are loaded, so that no text waits for that

    def read(self, text: str, language: str = AUTO) -> str:
        """`text` as it is spoken. Raises TextError as `FrontEndFeed.take`."""
        return FrontEndFeed(self.languages, language).take(text, final=True)

    def word(self, written: str, language: str = AUTO) -> str:
        """One word of a text as it is spoken, apart from its neighbours; what cannot be spoken stays as it stands."""
        try:
            words = self.read(written, language)
        except TextError:
            return written
        return words if written[-1:] in ".!?" else words.rstrip(".")


def spoken(text: str, language: str = ENGLISH) -> str:
    """`text` without markup, as the front end of `language` reads it, where there is one. Raises TextError."""
    return FrontEnd((language,)).read(MarkupFeed().take(text, final=True))
