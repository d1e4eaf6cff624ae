"""The words of a text, and the sounds that their letters stand for, as far as a waveform shows them."""

import re
import unicodedata

# Written without spaces, and a syllable or more a character: kana, ideographs, and the marks that go with them.
_WIDE = re.compile(r"[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")
_WORD = re.compile(rf"{_WIDE.pattern}|(?:(?!{_WIDE.pattern})\S)+")
PAUSED = re.compile(r"[.,;:?!…—–。，、；：？！]\W*\Z")  # by the marks behind a word, a pause is likely there

_VOWELS = "aeiouyæœøıаеиоуыэюяαεηιουω"
_SILENT_E = re.compile(rf"(?<=[{_VOWELS}])(?<!\Ay)([^{_VOWELS}]+)e(?=[sd]?\Z)")
# In English letters, which the others of the model's languages share mostly, and in Cyrillic ones.
_SOUNDS = re.compile(
    rf"(?P<vowel>(?!\Ay.)[{_VOWELS}]+)|(?P<sibilant>t?s?ch|sh|dge|[szjß]+|c(?=[eiy])|[жшщцчсз])"
    r"|(?P<fricative>th|ph|gh|[fvhфхв])|(?P<nasal>ng|[mnмн]+)|(?P<liquid>\Ay|wh|wr|[wlrлрй]+)"
    r"|(?P<stop>ck|qu|[kcptqпткx]+)|(?P<voiced>[bdgбдг]+)|(?P<any>.)"
)


def split_words(text: str) -> list[str]:
    """The words of `text`, each with the marks after it and the opening ones before it."""
    spans: list[tuple[int, int]] = []
    opening: int | None = None  # where marks began that wait for their word
    for match in _WORD.finditer(text):
        begin, end = match.start() if opening is None else opening, match.end()
        if any(map(str.isalnum, match.group())):
            spans.append((begin, end))
            opening = None
        elif spans and opening is None and unicodedata.category(match.group()[-1]) not in ("Ps", "Pi"):
            spans[-1] = (spans[-1][0], end)
        else:
            opening = begin
    if opening is not None:  # no word came any more
        spans[-1:] = [(spans[-1][0] if spans else opening, len(text.rstrip()))]
    return [text[begin:end] for begin, end in spans]


def is_wide(word: str) -> bool:
    """Whether no space separates it from a neighbour that is wide too."""
    return bool(_WIDE.match(word[-1:]))


def sounds(said: str) -> list[str]:
    """The kinds of sounds of words as they are spoken, "stopped" -> sibilant, stop, vowel, stop, voiced."""
    found: list[str] = []
    said = unicodedata.normalize("NFC", said).lower()
    # Latin letters without their accents; Hangul and kana stay whole.
    plain = "".join(unicodedata.normalize("NFD", char)[0] if char < "\u0370" else char for char in said)
    for word in re.findall(r"[^\W_]+", plain):
        for part in _SOUNDS.finditer(_SILENT_E.sub(r"\1", word)):
            letter = part.group()
            if letter.isdigit():  # no front end reads it: about a syllable a digit
                found += "any", "vowel", "any"
            elif part.lastgroup == "any" and unicodedata.category(letter) == "Lo":
                found += "any", "vowel"  # a syllable of a script without capitals
            else:
                found.append(part.lastgroup)
            if letter == "x":
                found.append("sibilant")
    return found
