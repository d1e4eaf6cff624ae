"""Tables of words, and readers of digits and letters, which the rules of english.json use by name."""

import json
import re
from functools import partial
from pathlib import Path

# Tables for the rules: English words, and signs of any language, such as Greek letters.
WORDS = json.loads(Path(__file__).with_name("english.json").read_text(encoding="utf-8"))
LISTS = {name: frozenset(words.split()) for name, words in WORDS["lists"].items()}

_AS_WORDS = LISTS["acronyms_as_words"]
_SPELLED = LISTS["spelled"]  # read letter by letter in any case; none of them is also a word
_RAISED = LISTS["raised"]  # common words, which capitals emphasise instead of marking an acronym
_WORD = re.compile(r"([A-Za-z]+)((?:'[A-Za-z]+)?)")
_LONGEST_SPELLED = 5
# Not pronounceable as a word: three consonants at an end, four anywhere, three vowels.
_NO_WORD = re.compile(r"^[^aeiouy]{3}|[^aeiouy]{3}$|[^aeiouy]{4}|[aeiou]{3}|^[^aeiouy]*$")
# With a few exceptions, such as "shh".
NO_VOWEL = re.compile(rf"(?!(?:{'|'.join(LISTS['sounds'])})\Z)[b-df-hj-np-tv-xz]{{2,}}")
_ONES = "oh one two three four five six seven eight nine".split()
_MOST_DIGITS = 15  # longer numbers have no name that a listener would know and are read digit by digit
_YEARS = range(1_100, 2_100)  # four digits without a comma that are read in pairs
_WHOLE_PARTS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)  # denominators of real fractions; others are scores and names
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+|[^\w\s]|_", re.ASCII)


def letters(word: str) -> str:
    """Spells a word: "usa" and "U.S.A." -> "U S A"."""
    return " ".join(re.sub("[^A-Z]", "", word.upper()))


def read_alone(word: str) -> str:
    """Reads a lower-case word regardless of its case: letter by letter if it has no vowel, with a few exceptions."""
    return letters(word) if word in _SPELLED or NO_VOWEL.fullmatch(word) else WORDS["respelled"].get(word, word)


def all_capitals(text: str) -> bool:
    """Whether every word is in capitals and at least one of them is not an acronym."""
    words = [word for word in re.findall(r"[A-Za-z']{2,}", text) if len(word.replace("'", "")) > 1]
    if any(word != word.upper() for word in words):
        return False
    plain = [word for word in map(str.lower, words) if read_alone(word) == word and word not in _AS_WORDS]
    return len(plain) > 1 or any(len(word) > _LONGEST_SPELLED or word in _RAISED for word in plain)


def spell_letters(text: str, shouted: bool) -> str:
    """Spells the acronyms of `text`. shouted: all words are in capitals, so that capitals mean nothing."""

    def read(match: re.Match[str]) -> str:
        written, tail = match.groups()
        word = written.lower()
        if len(word) > 2 and not tail and word[-1] == "s" and word not in _SPELLED:  # "GPUs", "cpus"
            if (written[:-1].isupper() and written[-1] == "s") or (word[:-1] in _SPELLED and len(word) > 3):
                written, word, tail = written[:-1], word[:-1], "s"
        said = read_alone(word)
        if said == word:
            capitals = len(word) > 1 and written.isupper() and tail in ("", "s", "'s")
            short = len(word) <= 3 or (len(word) <= _LONGEST_SPELLED and _NO_WORD.search(word))
            if not (short and capitals) or shouted or word in _RAISED or word in _AS_WORDS:
                return match[0]
            said = letters(word)
        return said + ("'s" if tail == "s" and " " in said else tail)

    return _WORD.sub(read, text)


def cardinal(written: str, to: str = "cardinal") -> str:
    """21 -> "twenty-one", or with to="ordinal" "twenty-first", in American usage."""
    from num2words import num2words  # imported only for texts with numbers

    return num2words(int(written.replace(",", "")), to=to).replace(",", "").replace(" and ", " ")


ordinal = partial(cardinal, to="ordinal")


def year(written: str) -> str:
    """1984 -> "nineteen eighty-four", 1905 -> "nineteen oh five", 2005 -> "two thousand five", 65 -> 1965."""
    century = "" if len(written) > 2 else "20" if written < "50" else "19"
    return cardinal(century + written, "year").replace("oh-", "oh ")


def singly(digits: str, zero: str = "oh") -> str:
    """Reads digit by digit and skips other characters."""
    return " ".join(zero if digit == "0" else _ONES[int(digit)] for digit in digits if digit.isdigit())


def in_pairs(digits: str) -> str:
    """Reads a number of a room or flight: 305 "three oh five", 747 "seven forty-seven", 1200 "twelve hundred"."""
    if digits.startswith("0") or len(digits) > 4:
        return singly(digits)
    if len(digits) < 3 or digits.endswith("000"):
        return cardinal(digits)
    first, rest = cardinal(digits[:-2]), digits[-2:]
    return f"{first} {'hundred' if rest == '00' else in_pairs(rest)}"


def number(written: str) -> str:
    """Reads an amount: "1,234.5" -> "one thousand two hundred thirty-four point five"."""
    whole, point, part = written.replace(",", "").partition(".")
    words = [] if not whole else [singly(whole, "zero") if len(whole) > _MOST_DIGITS else cardinal(whole)]
    return " ".join([*words, "point", singly(part, "zero")] if point else words)


def bare(written: str) -> str:
    """Reads a number without context: as a year, as an amount, or as a code, digit by digit."""
    if not written.isdigit():
        return number(written)
    if len(written) == 4 and int(written) in _YEARS:
        return year(written)
    # An amount of five digits would be written with a comma.
    code = len(written) > 1 if written[0] == "0" else len(written) > 4 and not written.endswith("00")
    return singly(written) if code else number(written)


def years(written: str) -> str:
    """Reads a decade: 1990 -> "nineteen nineties", 00 -> "two thousands"."""
    words = cardinal("2000") if written == "00" else year(written) if len(written) == 4 else cardinal(written)
    return re.sub(r"y$", "ie", words) + ("es" if words.endswith("x") else "s")


def groups(written: str) -> str:
    """Reads a telephone number with pauses between groups: "1-800-555" -> "one, eight hundred, five five five"."""
    said = (in_pairs(group) if group in ("800", "900") else singly(group) for group in re.findall(r"\d+", written))
    return ("plus " if written[0] == "+" else "") + ", ".join(said)


def dotted(written: str) -> str:
    """Reads 3.2.1 as "three point two point one"; four numbers as an address, with "dot"."""
    return (" dot " if written.count(".") == 3 else " point ").join(map(bare, written.split(".")))


def roman(written: str) -> str:
    """XIV -> "14"."""
    values = [{"i": 1, "v": 5, "x": 10, "l": 50, "c": 100, "d": 500, "m": 1_000}[letter] for letter in written.lower()]
    return str(sum(-one if one < max(values[i:]) else one for i, one in enumerate(values)))


def typed(address: str) -> str:
    """Reads an address or a path: "bob.smith99@mail.org" -> "bob dot smith ninety-nine at mail dot org"."""
    words = []
    for piece in map(str.lower, _PIECE.findall(address)):
        said = bare(piece) if piece.isdigit() else read_alone(piece) if piece.isalpha() else ""
        words.append(WORDS["typed"].get(piece, said))
    return " ".join(filter(None, words))


def money(sign: str, written: str, scale: str | None, thing: str | None) -> str:
    """Reads a price. scale: a word such as "million". thing: the noun in "a $5 bill", or "a-day" of "$20-a-day"."""
    one, many, cent, cents = WORDS["money"][sign].split()
    whole, _, part = written.replace(",", "").partition(".")
    if scale or thing is not None or len(part) not in (0, 2):
        amount = f"{number(written)} {look_up('scales', scale)}" if scale else number(written)
        return f"{amount} {many if thing is None else one + thing.replace('-', ' ')}"
    words = []
    if whole.strip("0") or not part.strip("0"):
        words.append(f"{number(whole)} {one if whole == '1' else many}")
    if part.strip("0"):
        words.append(f"{cardinal(part)} {cent if part == '01' else cents}")
    return " and ".join(words)


def measure(amount: str, gap: str, unit: str) -> str:
    """Reads an amount, unless it is a fraction, with its unit."""
    one, _, many = WORDS["units"][unit.lower()].partition("|")
    single = amount == "1" or gap == "-" or ("/" in amount and " " not in amount)
    return f"{amount if '/' in amount else number(amount)} {one if single else many or one + 's'}"


def fraction(above: str, below: str, whole: str | None) -> str:
    """Reads 3/4 as "three quarters", 2 1/2 as "two and a half"; leaves numbers in 7/10 ("7 out of 10") and 24/7."""
    part, parts = int(above), int(below)
    fits = parts in (*_WHOLE_PARTS, 10) if whole else parts in _WHOLE_PARTS or (part == 1 and parts in (9, 10, 100))
    if fits and 0 < part < parts:
        name = {2: "half", 4: "quarter"}.get(parts) or ordinal(below)
        count = f"{number(whole)} and {'a' if part == 1 else cardinal(above)}" if whole else cardinal(above)
        return f"{count} {name}{'s' if part > 1 else ''}"
    if parts in (10, 100) and part <= parts and not whole:
        return f"{above} out of {below}"
    return f"{whole or ''} {above} {below}"


def look_up(table: str, written: str) -> str:
    """The entry of a table of english.json for `written`, in any case; `written` in lower case if there is none."""
    words, lower = WORDS[table], written.lower()
    return words.get(written) or words.get(lower) or words.get(lower.lstrip("0"), lower)
