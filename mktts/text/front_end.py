"""The front end called "english" in a checkpoint's generation_config.json: it normalises English text and passes other
languages through. The rules of english.json are applied from the specific to the general, each to the result of those
before it, so that an address is not read as a number, a date as a fraction, or a price as a measure."""

import re
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache, partial

from mktts.errors import TextError
from mktts.text import readers
from mktts.text.markup import MarkupFeed
from mktts.text.readers import LISTS, NO_VOWEL, WORDS, all_capitals, spell_letters

ENGLISH = "english"
AUTO = "auto"
_LATIN = "LATIN"
_LONGEST_CHARS = 240  # most characters held back; a text without a plain word is then cut at a space
_LONGEST_WORD_CHARS = 1_000  # a longer one is read in parts: the rules take the square of its length
_ENDS = ".!?"
_PAUSES = ",;:"
_MARKS = _ENDS + _PAUSES
_ITEM = re.compile(r"[-*•]|\d{1,2}[.)]")  # the beginning of a list item
_BULLET = re.compile(r"^(?:[-*•>]|#{1,6})(?=\s|$)\s*")

# Including Greek letters used as signs, but not μ and Ω, which occur in units.
_CHARACTERS = str.maketrans(
    WORDS["characters"] | {char: f" {name} " for char, name in WORDS["greek"].items() if char not in "μΩ"}
)
_VULGAR = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")  # 2½ means two and a half, not 21/2
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")

_PLAIN = re.compile(r"[\"'(]*(?P<core>[A-Za-z]?[a-z]*(?:'[a-z]+)?(?:-[a-z]+)*)[,;:.!?\"')]*")
_SENTENCE_END = re.compile(r"[\"'(]*(?P<core>[A-Za-z]{3,}|[A-Za-z]+'[A-Za-z]+)[.!?]+[\"')]*")
_TABLES = ("titles", "short_forms", "stopped_short_forms", "before_numbers", "units", "days")
# Words that affect how their neighbours are read.
_BOUND = LISTS["binders"].union(LISTS["numbered"], *(WORDS[name] for name in _TABLES), {m[:3] for m in WORDS["months"]})
_NOT_PLAIN = _BOUND.union(LISTS["spelled"], WORDS["respelled"])
_FRAGMENT = re.compile(r"(?<!P)<(\w+)>")
_HOLE = re.compile(r"\{(?:([^{}|]*)\|)?([a-z_]+)(\d+)\}")


def _whole(pattern: str) -> str:
    """Expands each "<name>" in `pattern` to a fragment, the words of a list, or the keys of a table."""

    def fragment(match: re.Match[str]) -> str:
        words = LISTS.get(match[1]) or WORDS.get(match[1], ())
        written = WORDS["fragments"].get(match[1])
        return _whole(written or "|".join(map(re.escape, sorted(words, key=len, reverse=True))))

    return _FRAGMENT.sub(fragment, pattern)


@cache
def _rules() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(_whole(pattern)), words) for pattern, words in WORDS["rules"]]


def _filled(words: str, match: re.Match[str]) -> str:
    """The words of a rule, filled in for a match. "{s12}" is the result of the reader "s", or else of the table of that
    name, for groups 1 and 2; "{, |s1}" puts a comma before it. Both are empty if the first group did not match."""

    def read(hole: re.Match[str]) -> str:
        before, name, groups = hole.groups("")
        found = [match[int(group)] for group in groups]
        return "" if found[0] is None else before + getattr(readers, name, partial(readers.look_up, name))(*found)

    return _HOLE.sub(read, match.expand(words))


def _plain_characters(text: str) -> str:
    """`text` in ASCII, except for signs that the rules read, such as currencies: one form of each mark, no accents."""
    text = re.sub(r"(?<=\d)×(?=\d)", "x", re.sub(r"(?<=[\d\w)])\s?[·⋅]\s?(?=\d)", "*", text))
    text = _RAISED.sub(lambda m: "^" + unicodedata.normalize("NFKC", m[0]).replace("−", "-"), text)
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text.translate(_CHARACTERS))).translate(_CHARACTERS)
    plain = "".join(char for char in unicodedata.normalize("NFD", text) if char.isascii() or char in "$€£¥₹₩¢°µμΩ—")
    return re.sub(r"(?<=\S) {2,}", " ", plain)


@lru_cache(4_096)
def _is_plain(token: str) -> bool:
    """Whether a word is read as written and does not affect how its neighbours are read."""
    found = _PLAIN.fullmatch(token)
    core = found["core"].lower() if found else ""
    if len(core) < 2 or token == "in.":
        return core in ("a", "i")
    return core not in _NOT_PLAIN and not NO_VOWEL.fullmatch(core)


def _reading(text: str) -> str:
    """The spoken form of some words of a sentence: lower case, except for "I" and single letters, with the marks . , ;
    : ? !; brackets and dashes become commas, and all other characters are dropped."""
    if not all(map(_is_plain, text.split())):
        text = _plain_characters(text)
        shouted = all_capitals(text)
        for pattern, words in _rules():
            text = pattern.sub(partial(_filled, words), text)
        text = spell_letters(text, shouted)
    elif re.fullmatch("[a-z]{2,}", text):  # most words: nothing below changes one
        return text
    text = re.sub(r"\s+-+\s+|—|--+|[()\[\]{}|]", ", ", text)
    text = re.sub(r"(?<!\.)\.{2,}(?=\s+[a-z])", ",", text)
    text = re.sub(r"[^A-Za-z0-9\s.,;:?!'-]", " ", text)
    text = re.sub(r"(?<![A-Za-z])['-]+|['-]+(?![A-Za-z])", " ", text)
    text = " ".join(text.split())
    text = re.sub(r"(?:\s*[.,;:?!])+", lambda m: next(mark for mark in "?!.:;," if mark in m[0]), text)
    text = re.sub(r"[A-Za-z]*[A-Za-z][a-z][A-Za-z]*|[A-Z]{2,}", lambda m: m[0].lower(), text)
    text = re.sub(r"(?<=[A-Za-z]')[A-Z]+\b|\b[A-Z](?='[a-z]{2})", lambda m: m[0].lower(), text)
    text = re.sub(r"(?<![A-HJ-Z] )(?<![A-Z] I )\bA(?= [a-z])", "a", re.sub(r"\bi\b", "I", text))
    return re.sub(r"(?<=[.!?] )[a-z]", lambda m: m[0].upper(), text)


@cache
def _script(char: str) -> str:
    """The script of a character; Latin also for signs, and for letters that every language may use."""
    for part in unicodedata.normalize("NFKC", char):
        own = not part.isascii() and part not in WORDS["greek"]
        if own and unicodedata.category(part) in ("Lu", "Ll", "Lt", "Lo", "Nd"):
            return unicodedata.name(part, "UNKNOWN").split()[0]
    return _LATIN


class FrontEndFeed:
    """Normalises a text that arrives in pieces; every sentence it returns begins with a capital and ends in a mark."""

    def __init__(self, languages: tuple[str, ...], language: str = AUTO) -> None:
        """languages: those that a text in "auto" may be in. Only English text is changed."""
        self._languages = languages if language == AUTO else (language,)
        self._scripts = {_LATIN}.union(*(WORDS["scripts"].get(language, ()) for language in self._languages))
        self._reads = self._languages == (ENGLISH,)
        self._letters = False  # whether a letter or a digit has arrived
        self._held = ""  # words that may belong together, each followed by a space
        self._word = ""  # the last word, perhaps incomplete
        self._gap = ""  # whitespace after the last word
        self._begins_line = False  # whether the last word begins a line
        self._said = ""  # the last mark or letter of the output
        self._pause = ""  # a mark after it that is output only if words follow

    def take(self, piece: str, final: bool = False) -> str:
        """Returns the words that are now final, preceded by the space that joins them to earlier ones. Raises TextError
        for letters of another script, without taking the piece, and at the end of a text without letters and digits."""
        for place, char in enumerate("" if piece.isascii() else piece):
            if _script(char) not in self._scripts:
                raise TextError(
                    f"expected text that a voice of {', '.join(self._languages)} can speak, in the letters "
                    f"{', '.join(sorted(self._scripts))}, got {_script(char)} in {piece[place : place + 20]!r}: "
                    "leave it out, or take a checkpoint of that language"
                )
        self._letters |= any(map(str.isalnum, piece))
        said = piece
        if self._reads:
            said = ""
            for gap, part in re.findall(rf"(\s*)(\S{{0,{_LONGEST_WORD_CHARS}}})", piece):
                self._gap += gap
                if part and (self._gap or len(self._word) >= _LONGEST_WORD_CHARS):
                    said += self._complete()
                self._word += part
            if final:
                self._gap = "\n\n"  # as after a paragraph
                said += self._complete()
        if final and not (self._letters and (self._said or not self._reads)):
            raise TextError("expected text with a letter or a digit, got none of them: marks and signs have no words")
        return said

    def _complete(self) -> str:
        """Adds the last word to the held ones. Returns what becomes final: the words held before it if there can be a
        cut, and the word itself if it ends a sentence, which an abbreviation does not."""
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
        """Returns the spoken form of the held words. ends: adds a final mark if there is none."""
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
        if ends:
            self._pause = ""
            if self._said not in _ENDS:
                self._said, said = ".", said + "."
        return said


class FrontEnd:
    """The front end of one checkpoint."""

    def __init__(self, languages: Iterable[str] = (ENGLISH,)) -> None:
        """languages: those that the checkpoint speaks; if it is just one besides "auto", "auto" means that one."""
        self.languages = tuple(language for language in languages if language != AUTO)
        self.read("1", ENGLISH)  # loads the tables, so that the first text does not wait for them

    def read(self, text: str, language: str = AUTO) -> str:
        """The spoken form of `text`. Raises TextError as `FrontEndFeed.take`."""
        return FrontEndFeed(self.languages, language).take(text, final=True)

    def word(self, written: str, language: str = AUTO) -> str:
        """The spoken form of one word, without its context; a word that cannot be spoken is returned unchanged."""
        try:
            words = self.read(written, language)
        except TextError:
            return written
        return words if written[-1:] in ".!?" else words.rstrip(".")


def spoken(text: str, language: str = ENGLISH) -> str:
    """The spoken form of `text` in `language`, with markup removed. Raises TextError."""
    return FrontEnd((language,)).read(MarkupFeed().take(text, final=True))
