"""A front end by the name that a checkpoint's generation_config.json gives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mktts.errors import BackendUnavailable, OptionsError, TextError
from mktts.speech.front.reader import Reader, Rules
from mktts.speech.front.scripts import check_script, scripts_of

ENGLISH = "english"
FRONT_ENDS = (ENGLISH,)  # by the language that each of them reads
AUTO = "auto"


@dataclass(frozen=True)
class FrontEnd:
    """name: one of FRONT_ENDS. languages: those that the checkpoint speaks; where it is one, "auto" means it.

    Raises OptionsError for another name.
    """

    name: str
    languages: tuple[str, ...] = (ENGLISH,)

    def __post_init__(self) -> None:
        if self.name not in FRONT_ENDS:
            raise OptionsError(f"front end: expected one of {', '.join(FRONT_ENDS)}, got {self.name!r}")

    @cached_property
    def rules(self) -> Rules:
        """Made when first asked for: it imports num2words."""
        from mktts.speech.front.english import ends_sentence, is_plain, reading

        return Rules(is_plain, ends_sentence, reading)

    @classmethod
    def ready(cls, name: str, spoken_languages: Iterable[str]) -> FrontEnd:
        """Loaded, so that no text waits for that. spoken_languages: as `ModelConfig.spoken_languages`. Raises
        BackendUnavailable without the package num2words."""
        made = cls(name, tuple(language for language in spoken_languages if language != AUTO))
        try:
            made.rules.reading("1")
        except ImportError as error:
            raise BackendUnavailable(f"the text front end {name!r} needs the package num2words: {error}") from None
        return made

    def feed(self, language: str = AUTO) -> FrontEndFeed:
        """Of one text in `language`."""
        known = self.languages if language == AUTO else (language,)
        return FrontEndFeed(Reader(self.rules) if known == (self.name,) else None, known)

    def read(self, text: str, language: str = AUTO) -> str:
        """`text` as it is spoken. Raises TextError for a script that `language` is not written in, and for text
        without a letter or digit."""
        feed = self.feed(language)
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

    def __init__(self, reader: Reader | None, languages: Sequence[str]) -> None:
        """reader: None passes text on as it is."""
        self._reader = reader
        self._languages = languages
        self._scripts = scripts_of(languages)
        self._letters = False

    def push(self, piece: str) -> str:
        """What can be spoken by now, perhaps "". Raises TextError for letters of another script; the piece is then
        not taken."""
        check_script(piece, self._scripts, self._languages)
        self._letters = self._letters or any(map(str.isalnum, piece))
        return piece if self._reader is None else self._reader.push(piece)

    def finish(self) -> str:
        """The rest. Raises TextError where no letter or digit came."""
        rest = "" if self._reader is None else self._reader.finish()
        if not self._letters or (self._reader is not None and self._reader.silent):
            raise TextError("expected text with a letter or a digit, got none of them: marks and signs have no words")
        return rest


def spoken(text: str, language: str = ENGLISH) -> str:
    """`text` as the front end of `language` reads it; for a language without one as it stands. Raises as
    `FrontEnd.read`."""
    return FrontEnd(ENGLISH, (language,)).read(text, language)
