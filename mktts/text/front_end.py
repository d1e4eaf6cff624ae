"""A front end by the name that a checkpoint's generation_config.json gives it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from mktts.errors import OptionsError, TextError
from mktts.text.letters import GREEK
from mktts.text.lexicon import Lexicon, LexiconFeed
from mktts.text.markup import MarkupFeed

_LATIN = frozenset({"LATIN"})
_JAPANESE = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"})
# Of the model's languages, those that are not written in Latin letters alone.
_SCRIPTS = {
    "chinese": _LATIN | {"CJK"},
    "japanese": _LATIN | _JAPANESE,
    "korean": _LATIN | {"HANGUL", "CJK"},
    "russian": _LATIN | {"CYRILLIC"},
}


def check_script(text: str, scripts: frozenset[str], languages: Iterable[str]) -> None:
    """Raises TextError naming the first letter or digit of `text` that is of another script than `scripts`."""
    if text.isascii():
        return
    for place, char in enumerate(text):
        script = _script(char)
        if script is not None and script not in scripts:
            raise TextError(
                f"expected text that a voice of {', '.join(languages)} can speak, in the letters "
                f"{', '.join(sorted(scripts))}, got {script} in {text[place : place + 20]!r}: leave it out, or take a "
                "checkpoint of that language"
            )


@cache
def _script(char: str) -> str | None:
    """None: a sign, or a letter that every language may use."""
    for part in unicodedata.normalize("NFKC", char):
        letter = unicodedata.category(part) in ("Lu", "Ll", "Lt", "Lo", "Nd")
        if letter and not part.isascii() and part not in GREEK:
            return unicodedata.name(part, "UNKNOWN").split()[0]
    return None


_LONGEST_CHARS = 240  # held back at most: a text without a plain word is cut at a space
_ENDS = ".!?"
_PAUSES = ",;:"
_MARKS = _ENDS + _PAUSES
_ITEM = re.compile(r"[-*•]|\d{1,2}[.)]")  # what begins a line of a list
_BULLET = re.compile(r"^(?:[-*•>]|#{1,6})(?=\s|$)\s*")


@dataclass(frozen=True)
class Rules:
    """How one language is read. plain, ends: of a word between spaces; reading: of the words between two cuts."""

    plain: Callable[[str], bool]
    ends: Callable[[str], bool]
    reading: Callable[[str], str]


class Reader:
    """One text. What `push` and `finish` return, joined, is one sentence after another, each begun with a capital
    and ended by a mark."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._held: list[str] = []  # words that may belong together
        self._held_chars = 0
        self._word = ""  # the last one, perhaps not complete
        self._gap = ""  # whitespace after it
        self._plain = False  # of the last complete word
        self.said = ""  # the last mark or letter that was handed on
        self._pause = ""  # a mark after it that is handed on only if words follow

    def push(self, piece: str) -> str:
        """The words that `piece` makes certain, in front of them the space that joins them to what came before."""
        said = []
        for part in re.findall(r"\s+|\S+", piece):
            if part.isspace():
                self._gap += part
                continue
            if self._gap:
                said.append(self._complete(part))
                self._gap = ""
            self._word += part
        return "".join(said)

    def finish(self) -> str:
        """The rest, with the mark that ends it; "" where there was nothing to say."""
        return self._complete("") + self._hand_on() + self._end()

    def _complete(self, follows: str) -> str:
        """Books the last word. Returns what was held before it, where there is a cut."""
        word, said = self._word, ""
        if not word:
            return said
        plain = self._rules.plain(word)
        if self._held and ((plain and self._plain) or self._held_chars + len(word) > _LONGEST_CHARS):
            said = self._hand_on()
        self._held.append(word)
        self._held_chars += len(word) + 1
        self._plain, self._word = plain, ""
        line = "\n" in self._gap and (self._gap.count("\n") > 1 or _ITEM.match(follows))
        if line and follows:
            said += self._hand_on() + self._end()
        elif self._rules.ends(word):
            said += self._hand_on()
        return said

    def _hand_on(self) -> str:
        text, self._held, self._held_chars = " ".join(self._held), [], 0
        begins = not self.said or self.said in _ENDS
        text = self._rules.reading(_BULLET.sub("", text, count=1) if begins else text)
        if begins or self._pause:
            text = text.lstrip(_MARKS + " ")
        if not text:
            return ""
        if begins:
            text = text[0].upper() + text[1:]
        joined = self._pause + (" " if self.said and text[0] not in _MARKS else "")
        words = text.rstrip(_PAUSES)
        self._pause = text[len(words) :]
        self.said = words[-1:] or self.said
        return joined + words if words else ""

    def _end(self) -> str:
        """The mark that ends what was handed on, where it has none."""
        self._pause = ""
        if not self.said or self.said in _ENDS:
            return ""
        self.said = "."
        return "."


ENGLISH = "english"
FRONT_ENDS = (ENGLISH,)  # by the language that each of them reads
AUTO = "auto"


@dataclass(frozen=True)
class FrontEnd:
    """name: one of FRONT_ENDS. languages: those that the checkpoint speaks; where it is one, "auto" means it. Raises
    OptionsError for another name."""

    name: str
    languages: tuple[str, ...] = (ENGLISH,)

    def __post_init__(self) -> None:
        if self.name not in FRONT_ENDS:
            raise OptionsError(f"front end: expected one of {', '.join(FRONT_ENDS)}, got {self.name!r}")

    @cached_property
    def rules(self) -> Rules:
        """Made when first asked for: it imports num2words."""
        from mktts.text.english import ends_sentence, is_plain, reading

        return Rules(is_plain, ends_sentence, reading)

    @classmethod
    def ready(cls, name: str, spoken_languages: Iterable[str]) -> FrontEnd:
        """Loaded, so that no text waits for that. spoken_languages: as `ModelConfig.spoken_languages`."""
        made = cls(name, tuple(language for language in spoken_languages if language != AUTO))
        made.rules.reading("1")
        return made

    def feed(self, language: str = AUTO, markup: str = "speak", lexicon: Lexicon | None = None) -> FrontEndFeed:
        """Of one text in `language`. markup: of `mktts.engine.options.Markup`. lexicon: what is said for words."""
        known = self.languages if language == AUTO else (language,)
        reader = Reader(self.rules) if known == (self.name,) else None
        return FrontEndFeed(reader, known, (lexicon or Lexicon()).feed(markup))

    def read(self, text: str, language: str = AUTO, markup: str = "speak") -> str:
        """`text` as it is spoken. Raises TextError for a script that `language` is not written in, and for text
        without a letter or digit."""
        feed = self.feed(language, markup)
        return feed.push(text) + feed.finish()

    def word(self, written: str, language: str = AUTO) -> str:
        """One word of a text as it is spoken, apart from its neighbours; what cannot be spoken stays as it stands."""
        try:
            words = self.read(written, language)
        except TextError:
            return written
        return words if written[-1:] in ".!?" else words.rstrip(".")


class FrontEndFeed:
    """A text that arrives in pieces; what `push` and `finish` return depends on the text alone, not on the pieces."""

    def __init__(
        self, reader: Reader | None, languages: Sequence[str], before: LexiconFeed | MarkupFeed | None = None
    ) -> None:
        """reader: None passes text on as it is. before: what the text goes through first."""
        self._reader, self._before = reader, before
        self._languages = languages
        self._scripts = frozenset().union(*(_SCRIPTS.get(language, _LATIN) for language in languages))
        self._letters = False

    def push(self, piece: str) -> str:
        """What can be spoken by now, perhaps "". Raises TextError for letters of another script; what would have been
        returned is then left out."""
        return self._read(piece if self._before is None else self._before.push(piece))

    def _read(self, piece: str) -> str:
        check_script(piece, self._scripts, self._languages)
        self._letters = self._letters or any(map(str.isalnum, piece))
        return piece if self._reader is None else self._reader.push(piece)

    def finish(self) -> str:
        """The rest. Raises TextError where no letter or digit came."""
        rest = "" if self._before is None else self._read(self._before.finish())
        rest += "" if self._reader is None else self._reader.finish()
        if not self._letters or (self._reader is not None and not self._reader.said):
            raise TextError("expected text with a letter or a digit, got none of them: marks and signs have no words")
        return rest


def spoken(text: str, language: str = ENGLISH, markup: str = "strip") -> str:
    """`text` as the front end of `language` reads it; for a language without one as it stands. markup: as of
    `FrontEnd.read`, which says what this raises."""
    return FrontEnd(ENGLISH, (language,)).read(text, language, markup)
