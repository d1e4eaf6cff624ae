"""Removes Markdown, HTML, TeX and terminal codes from a text and leaves what a person would read aloud."""

import html
import re

from mktts.errors import TextError
from mktts.text.readers import WORDS

_TEX = WORDS["tex"]
_IN_BRACES = r"\{(?:[^{}\n]|\{[^{}\n]{0,80}\}){0,120}\}"
_FRACTION = re.compile(rf"\\[dt]?frac\s?({_IN_BRACES})\s?({_IN_BRACES})")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_EMOJI = "\U0001f000-\U0001faff\U000e0020-\U000e007f\u2600-\u27bf\u2b00-\u2bff\u231a-\u23ff\ufe0f\u20e3\u200d"
_IN_BRACKETS = r"(?:[^\[\]\n]|\[[^\[\]\n]{0,100}\]){0,300}"
_IN_PARENTHESES = r"(?:[^()\n]|\([^()\n]{0,100}\)){0,600}"
_CITED = r"\^[^\]\n]{1,40}|[1-9]\d{0,2}(?:,\s?\d{1,3}){0,9}"
_FOUND = (
    rf"!?\[(?P<link>{_IN_BRACKETS})\](?:\({_IN_PARENTHESES}\)|\[[^\]\n]{{0,80}}\])|`(?P<code>[^`\n]{{1,240}})`"
    rf"|<(?P<address>https?://[^\s<>]{{1,600}}|[^\s<>@]{{1,80}}@[^\s<>]{{1,80}})>|(?P<entity>&(?:#\d+|#x[\da-fA-F]+|\w+);)"
    rf"|(?P<space></?(?:br|p|div|li|td|th|tr|h\d)(?:\s[^<>\n]{{0,600}})?/?>)|\\(?P<escaped>[*_`#\[\]~$<>|!])"
    rf"|(?P<gone>\s?(?:\[(?:{_CITED})\](?!\()|~~(?=\S)[^~\n]{{1,240}}~~|[{_EMOJI}]+)|\x1b\[[\d;]*[A-Za-z]|\[\d{{1,2}}(?:;\d{{1,3}})*m(?!\])"
    r"|<\|[^|<>\n]{1,40}\|>|<!--[^\n>]{0,600}-->|</?[A-Za-z][\w-]{0,30}(?:\s[^<>\n]{0,600})?/?>"
    r"|(?<![\w*_])[*_]{1,3}(?=[^\s*_])|(?<=[^\s*_])[*_]{1,3}(?![\w*_])|(?<!\S)==(?=[^\s=])|(?<=[^\s=])==(?![\s\w]*=))"
    r"|(?P<tex>\\\([^\n]{1,240}?\\\)|\\\[[^\n]{1,240}?\\\]|\$\$[^$\n]{1,240}\$\$|(?<![\w$])\$(?![\s\d$])[^$\n]{1,120}"
    r"(?<![\s(/-])\$(?![\w$])|(?<![\w$])\$\d[^$\s]{0,80}(?<![\s(/.,-])\$(?![\w$])"
    rf"|\\(?:[dt]?frac\s?{_IN_BRACES}\s?{_IN_BRACES}|(?:sqrt|text\w*|math\w+)\s?{_IN_BRACES}|(?:{'|'.join(_TEX)})(?![A-Za-z{{])))"
)
# The end of a line that may become one of them when more of the line arrives.
_OPEN = (
    rf"\s?!?\[{_IN_BRACKETS}(?:\[[^\]\n]{{0,100}}|\](?:\({_IN_PARENTHESES}(?:\([^)\n]{{0,100}})?|\[[^\]\n]{{0,80}})?)?"
    rf"|<[^>\n]{{0,640}}>?|&[#\w]*|\s?~(?:~[^~\n]{{0,240}}~?)?|\\(?:[(\[][^\n]{{0,244}}|[A-Za-z]{{0,16}}(?:\s?\{{[^\n]{{0,240}})?)"
    rf"|\$(?:\$?[^\d$\n][^$\n]{{0,240}}|[^\s]{{0,82}})\$?|`[^`\n]{{0,240}}|\x1b(?:\[[\d;]*)?|[*_]{{1,4}}|={{1,2}}[\s\w]*|!|\s|\s?[{_EMOJI}]+"
)
_NEXT = {True: re.compile(_FOUND), False: re.compile(rf"{_FOUND}|(?:{_OPEN})\Z")}  # key: whether the line is complete
_FENCE = re.compile(r"[\s>]*(```|~~~)")
_NO_WORDS = re.compile(r"[\s|:*_=-]*(?:-\s?-|\*\s?\*\s?\*|_\s?_\s?_|==)[\s|:*_=-]*|\s*\[[^\]\n]{1,80}\]:\s.*")
_KIND = re.compile(r"[\s>]*(?P<item>#{1,6}\s+|[-*+•]\s+(?:\[[ xX]\]\s+)?|(?=\d{1,3}[.)]\s))?")
_KIND_OPEN = re.compile(r"[\s>#*+•=_:|-]*(?:\[[^\]\n]{0,80}(?:\](?::.*)?)?|\d{1,3}[.)]?)?|[\s>]*(?:[|]|``?`?|~~?~?).*")


class MarkupFeed:
    """Removes markup from a text that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = ""  # the part of the current line that is held back
        self._last = "\n"  # the character before it
        self._begun = self._item = False  # whether the line's kind is known; whether it is a sentence of its own
        self._fence = ""  # the marker that ends the current code block
        self._said = "\n"  # the last visible character of the line that was returned
        self._spoken = False  # whether anything visible was returned

    def take(self, piece: str, final: bool = False) -> str:
        """Returns the words that are now final. Raises TextError at the end of a text that was all markup."""
        *lines, last = (self._rest + piece).split("\n")
        words = "".join(f"{self._line(line)}\n" for line in lines)
        self._rest = last
        if final:
            words += self._line(last)
        elif not self._fence and (self._begun or not _KIND_OPEN.fullmatch(last)):
            words += self._words(final=False)
        self._spoken = self._spoken or bool(words.strip())
        if final and not self._spoken:
            raise TextError("expected text with a letter or a digit, got none beside its markup")
        return words

    def _line(self, line: str) -> str:
        """The rest of a complete line, without markup."""
        if not self._begun:
            fence = _FENCE.match(line)
            if fence and self._fence in ("", fence[1]):
                self._fence = "" if self._fence else fence[1]
            if fence or self._fence or _NO_WORDS.fullmatch(line):
                return ""
            if line.lstrip().startswith("|"):  # a row of a table is treated as a heading
                line = "# " + ", ".join(cell.strip() for cell in line.split("|") if cell.strip())
        self._rest = line
        said = self._words(final=True)
        if self._item and (self._said.isalnum() or self._said in ")\"'%"):
            said += "."
        self._begun = self._item = False
        self._last = self._said = "\n"
        return said

    def _words(self, final: bool) -> str:
        """The words of the current line that are final, without markup; all of them if `final`."""
        begun = ""
        if not self._begun:
            kind = _KIND.match(self._rest)
            self._begun, self._item = True, kind["item"] is not None
            self._rest = self._rest[kind.end() :]
            begun = "\n" if self._item else ""
        text = self._last + self._rest
        words, at = _without(text, final)
        self._last, self._rest = text[at - 1], text[at:]
        self._said = (self._said + words.rstrip())[-1]
        return begun + words


def _without(text: str, final: bool) -> tuple[str, int]:
    """`text` after its first character, without markup, and the start of the part that may still become markup."""
    said, at = "", 1
    while (found := _NEXT[final].search(text, at)) is not None:
        said, at = said + text[at : found.start()], found.end()
        if not final and at == len(text):
            return said, found.start()
        kind, words = found.lastgroup, found[found.lastgroup]
        if kind == "link":
            words = _without("\n" + words, True)[0]
        elif kind == "tex":  # "$\\frac{a}{b}$" is "a over b"
            words = _FRACTION.sub(lambda m: f"{m[1]}{'/' if m[1][1:-1].isdigit() else ' over '}{m[2]}", words)
            words = _COMMAND.sub(lambda m: f" {_TEX.get(m[1], '')} ", words)
            words = " ".join(re.sub(r"[${}]", "", words.replace("_", " ")).split())
        said += {"gone": "", "space": " ", "entity": html.unescape(words)}.get(kind, words)
    return said + text[at:], len(text)
