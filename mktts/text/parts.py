"""Instructions inside a text: pauses, changes of speaker, and a few elements of SSML."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from xml.parsers import expat

from mktts.errors import TextError
from mktts.spec import SAMPLE_RATE_HZ

DEFAULT_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
MAX_PAUSES_S = 300.0  # total of one text: silence takes no frames, so the limit on frames made ahead does not bound it

_SPEAK = re.compile(r"<speak[\s/>]")
_LENGTH = r"(?P<number>\d{0,12}(?:\.\d{1,12})?(?<=\d))\s?(?P<unit>ms|s)"
_MARK = re.compile(r"\A\s*[.,;:!?…]+(?=\s)")  # the mark of a sentence that was ended by the pause before it
_BREAK = r"<break(?P<attributes>[\s/][^<>]{0,100})?>"
_PAUSE = rf"\[(?P<pause>pause(?:[^\S\n]{{1,40}}{_LENGTH})?)\]"
_OPEN = r"(?P<open>(?:\[[^\[\]\n]{0,64}\]?|<(?:b|br|bre|brea|break(?:[\s/][^<>]{0,100})?)?)\Z)"
_NAME = r"\[(?P<name>[^\[\]\n]{1,64})\](?!\()"  # with a parenthesis it is a link
# Index: whether the text is complete.
_TAG = [re.compile(f"{_BREAK}|{_PAUSE}|{begun}{_NAME}", re.IGNORECASE) for begun in (f"{_OPEN}|", "")]
_TIME = re.compile(rf"(?:time\s*=\s*[\"']\s*{_LENGTH}\s*[\"'])?", re.IGNORECASE)
_MOST_DIGITS = 15  # of a number that is read as a whole
_SAY_AS = ("characters", "date", "telephone", "cardinal", "ordinal")


class Pause(NamedTuple):
    """Ends a segment; the next one starts with a new generation. samples: of silence between them, perhaps 0."""

    samples: int


class TextFeed:
    """Splits a text into words, `Pause`s and the results of `named`. A text that begins with <speak is SSML."""

    def __init__(self, named: Callable[[str], Any | None], new_readers: Iterable[Callable[[], Any]] = ()) -> None:
        """named: returns the object for a name in brackets, or None if it is text. new_readers: factories of the
        readers for a part between tags, applied in order; a reader's `take` returns the words that are now final."""
        self._named, self._new_readers = named, tuple(new_readers)
        self._ssml: _Ssml | None = None
        self._begun = False  # whether it is known if the text is SSML
        self._rest = ""  # the end of the text, which may become a tag
        self._signs = ""  # of the current part, before its first letter or digit
        self._readers: list[Any] | None = None  # of the current part, once it has a letter or a digit
        self._silent_s = 0.0
        self._said = False  # whether there is anything to be heard

    def take(self, piece: str, final: bool = False) -> list[Any]:
        """Returns what is now final; with `final`, all that is left. Raises TextError for a pause that is too long, for
        an unsupported element of SSML, and as a reader does, without taking the piece; also at the end of a text
        without anything to be heard, or with an open element."""
        rest = self._rest
        if not self._begun:
            piece, rest = (rest + piece).lstrip(), ""
            if not final and "<speak".startswith(piece):
                self._rest = piece
                return []
            if _SPEAK.match(piece):
                self._begun, self._ssml = True, _Ssml()
        text, at = rest + (self._ssml.push(piece, final) if self._ssml else piece), 0
        found: list[Any] = []
        while (tag := _TAG[final].search(text, at)) is not None and tag.lastgroup != "open":
            meant = self._meant(tag)
            found += [text[at : tag.start()], *(meant or tag[0][0])]
            at = tag.end() if meant else tag.start() + 1
        rest = text[tag.start() :] if tag else ""
        found.append(text[at : len(text) - len(rest)])
        silent_s = self._silent_s + sum(part.samples for part in found if isinstance(part, Pause)) / SAMPLE_RATE_HZ
        if silent_s > MAX_PAUSES_S:
            raise TextError(f"the pauses of a text may have {MAX_PAUSES_S:g} s together, got {silent_s:g}")
        made: list[Any] = []
        for part in found:
            if isinstance(part, str):
                made.append(self._words(part))
            else:
                made += [self._words("", ends=True), part]
                self._said = self._said or (isinstance(part, Pause) and part.samples > 0)
        self._begun, self._rest, self._silent_s = True, rest, silent_s
        if final:
            made.append(self._words("", ends=True, last=True))
            if not self._said:
                raise TextError("expected text to speak, got none beside its tags")
        return [part for part in made if part != ""]

    def _meant(self, tag: re.Match[str]) -> list[Any]:
        """The parts that a tag stands for; [] if it is ordinary text."""
        if tag.lastgroup == "name":
            named = self._named(tag["name"].strip())
            return [] if named is None else [Pause(0), named]
        written = tag.lastgroup == "pause"
        number, unit = tag.group("number", "unit") if written else _time((tag["attributes"] or "").strip("/ \n"))
        seconds = DEFAULT_PAUSE_S if number is None else float(number) / (1_000 if unit.lower() == "ms" else 1)
        if seconds > MAX_PAUSE_S:
            raise TextError(f"a pause may have {MAX_PAUSE_S:g} s, got {number} {unit}: write a shorter one")
        return [Pause(round(seconds * SAMPLE_RATE_HZ))]

    def _words(self, text: str, ends: bool = False, last: bool = False) -> str:
        """Adds text to the current part and returns the words that are now final; signs before its first letter or
        digit are held until that arrives. ends: the part is complete. last: so is the whole text."""
        if self._readers is None:
            signs = self._signs + text
            alone = last and signs and not self._said  # a text of signs only: left to the readers
            if not (alone or any(map(str.isalnum, text))):
                self._signs = "" if ends else signs
                return ""
            text, self._signs = _MARK.sub("", signs) if self._said else signs, ""
            self._readers = [new_reader() for new_reader in self._new_readers]
        try:
            for reader in self._readers:
                text = reader.take(text, final=ends)
            self._said = self._said or ends
        except TextError:
            if not ends or (last and not self._said):
                raise
            text = ""  # the part was all markup
        self._readers = None if ends else self._readers
        return text


def _time(attributes: str) -> tuple[str | None, str | None]:
    """Number and unit of the time of a <break>, or None for each. Raises TextError for other attributes."""
    found = _TIME.fullmatch(attributes)
    if found is None:
        raise TextError(f'expected <break/> or <break time="500ms"/>, got <break {attributes}>')
    return found.groups()


class _Ssml:
    """Converts SSML to text with pauses in brackets. Inside <speak> there can be no DTD, and so no entity."""

    def __init__(self) -> None:
        self._parser = expat.ParserCreate()
        self._parser.StartElementHandler, self._parser.EndElementHandler = self._begin, self._end
        self._parser.CharacterDataHandler = self._text
        self._found, self._subs = "", 0  # text found; number of open sub elements
        self._kind, self._held = "", ""  # of the open say-as element

    def push(self, piece: str, final: bool) -> str:
        """Returns the text of more SSML. Raises TextError if it is malformed or unsupported."""
        self._found = ""
        try:
            self._parser.Parse(piece, final)
        except expat.ExpatError as error:
            raise TextError(f"expected whole SSML from <speak> to </speak>, with &amp; for &: {error}") from None
        return self._found

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        if name == "break":
            time = _time(" ".join(f'{key}="{value}"' for key, value in attributes.items()))
            self._found += f"[{' '.join(['pause', *filter(None, time)])}]"
        elif name in ("p", "s"):
            self._found += "[pause 0s]"
        elif name == "sub":
            if "alias" not in attributes:
                raise TextError('SSML: expected <sub alias="what is said">, got no alias')
            self._found += attributes["alias"]
            self._subs += 1
        elif name == "say-as":
            self._kind, self._held = attributes.get("interpret-as", ""), ""
            if self._kind not in _SAY_AS:
                raise TextError(f"SSML: interpret-as is one of {', '.join(_SAY_AS)}, got {self._kind!r}")
        elif name != "speak":
            raise TextError(f"SSML: <{name}> cannot be spoken here, expected p, s, break, sub, say-as: leave it out")

    def _end(self, name: str) -> None:
        if name in ("p", "s"):
            self._found += "[pause 0s]"
        elif name == "sub":
            self._subs -= 1
        elif name == "say-as":
            self._found += said_as(self._kind, self._held.strip())
            self._kind = ""

    def _text(self, text: str) -> None:
        if self._kind:
            self._held += text
        elif not self._subs:
            self._found += text


def said_as(kind: str, written: str) -> str:
    """Rewrites `written` so that a front end reads it as `kind`, one of _SAY_AS; a date is left unchanged."""
    if kind == "characters":
        return ", ".join(written.upper().replace(" ", ""))
    if kind == "telephone":
        return ", ".join(" ".join(group) for group in re.findall(r"\+?\d+", written)) or written
    digits = written.replace(",", "")
    if kind not in ("cardinal", "ordinal") or not digits.isdecimal() or len(digits) > _MOST_DIGITS:
        return written
    number = int(digits)
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending if kind == 'ordinal' else ''}"
