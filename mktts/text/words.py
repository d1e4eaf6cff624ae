"""Splits a text into words, and classifies the sounds of their letters, as far as a waveform can show them."""

import re
import unicodedata

# Characters written without spaces, each a syllable or more: kana, ideographs, and their punctuation.
_WIDE = re.compile(r"[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")
_WORD = re.compile(rf"{_WIDE.pattern}|(?:(?!{_WIDE.pattern})\S)+")
PAUSED = re.compile(r"[.,;:?!…—–。，、；：？！]\W*\Z")  # marks after a word that make a pause likely

_VOWELS = "aeiouyæœøıаеиоуыэюяαεηιουω"
_SILENT_E = re.compile(rf"(?<=[{_VOWELS}])(?<!\Ay)([^{_VOWELS}]+)e(?=[sd]?\Z)")
# For English letters, whose sounds the model's other languages mostly share, and for Cyrillic ones.
_SOUNDS = re.compile(
    rf"(?P<vowel>(?!\Ay.)[{_VOWELS}]+)|(?P<sibilant>t?s?ch|sh|dge|[szjß]+|c(?=[eiy])|[жшщцчсз])"
    r"|(?P<fricative>th|ph|gh|[fvhфхв])|(?P<nasal>ng|[mnмн]+)|(?P<liquid>\Ay|wh|wr|[wlrлрй]+)"
    r"|(?P<stop>ck|qu|[kcptqпткx]+)|(?P<voiced>[bdgбдг]+)|(?P<any>.)"
)


def split_words(text: str) -> list[str]:
    """The words of `text`, each with the marks after it and opening marks before it."""
    spans: list[tuple[int, int]] = []
    opening: int | None = None  # start of opening marks whose word has not come yet
    for match in _WORD.finditer(text):
        begin, end = match.start() if opening is None else opening, match.end()
        if any(map(str.isalnum, match.group())):
            spans.append((begin, end))
            opening = None
        elif spans and opening is None and unicodedata.category(match.group()[-1]) not in ("Ps", "Pi"):
            spans[-1] = (spans[-1][0], end)
        else:
            opening = begin
    if opening is not None:  # no word followed
        spans[-1:] = [(spans[-1][0] if spans else opening, len(text.rstrip()))]
    return [text[begin:end] for begin, end in spans]


def is_wide(word: str) -> bool:
    """Whether a word is in a script without spaces between words."""
    return bool(_WIDE.match(word[-1:]))


def sounds(said: str) -> list[str]:
    """The kinds of sounds of spoken words: "stopped" -> sibilant, stop, vowel, stop, voiced."""
    found: list[str] = []
    said = unicodedata.normalize("NFC", said).lower()
    # Latin letters without their accents; Hangul and kana stay whole.
    plain = "".join(unicodedata.normalize("NFD", char)[0] if char < "\u0370" else char for char in said)
    for word in re.findall(r"[^\W_]+", plain):
        for part in _SOUNDS.finditer(_SILENT_E.sub(r"\1", word)):
            letter = part.group()
            if letter.isdigit():  # not converted by a front end: about a syllable for each digit
                found += "any", "vowel", "any"
            elif part.lastgroup == "any" and unicodedata.category(letter) == "Lo":
                found += "any", "vowel"  # a syllable of a script without capitals
            else:
                found.append(part.lastgroup)
            if letter == "x":
                found.append("sibilant")
    return found
