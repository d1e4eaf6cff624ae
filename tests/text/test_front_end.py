"""Written English as it is spoken, against lists of what an American reads; words that a lexicon says otherwise; what
else a text asks for. Whatever reads a text makes of its pieces what it makes of the whole."""

import re
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from record_cases import cases, words, wrong

from mktts.errors import OptionsError, TextError
from mktts.text import spoken
from mktts.text.front_end import FrontEnd, FrontEndFeed
from mktts.text.lexicon import MAX_ENTRY_CHARS, Lexicon, LexiconFeed, respelled
from mktts.text.markup import MarkupFeed
from mktts.text.parts import Pause, TextFeed, said_as
from mktts.text.split import MAX_TEXT_CHARS

READ = partial(FrontEndFeed, ("english",))
SEEN, TABLE = cases("written_numbers.tsv"), cases()
SENTENCES = [text for text, _ in SEEN[:60] + TABLE[:40]]
PLAIN = files("mktts.training.data").joinpath("held_out.txt").read_text(encoding="utf-8").splitlines()
HALF, CUT = Pause(12_000), Pause(0)
VOICES = {"Ryan": ("ryan",), "UNCLE_FU": ("uncle_fu",)}
LISTED = {
    "nginx": "engine X",
    "GIF": "jif",
    "SQL": "sequel",
    "SQL Server": "sequel server",
    "C++": "see plus plus",
    ".NET": "dot net",
    "Nguyen": "Win",
    "straße": "shtrahsuh",
    "重庆": "崇庆",
    "New York": "Noo Yawk",
}
LEXICON = Lexicon(LISTED)


def title(text: str) -> str:
    return re.sub(r"(?<![\w'])[a-z]", lambda match: match[0].upper(), text)


def test_numbers_prices_times_dates_and_titles_and_at_least_245_of_250_written_forms_are_read_as_listed():
    assert spoken("I ran 5 km. Why?") == "I ran five kilometers. Why?" and len(SEEN) == 101 and wrong(SEEN) == []
    assert len(TABLE) >= 250 and len(wrong(TABLE)) <= len(TABLE) * 5 // 250, wrong(TABLE)


@pytest.mark.parametrize("form", [str.upper, str.lower, title, lambda text: text.rstrip(".")])
def test_case_and_the_final_mark_change_no_word(form):
    different = {text for text in PLAIN[::5] + SENTENCES if words(spoken(form(text))) != words(spoken(text))}
    assert different <= ({"The population is 8.3M."} if form is str.lower else set())  # 8.3m is a length


@pytest.mark.parametrize("text", PLAIN[::25])
def test_a_plain_sentence_keeps_its_words_and_marks(text):
    assert spoken(text).lower() == text.lower()


@settings(deadline=None)  # the first text waits for the rules
@given(st.text(max_size=60))
def test_what_is_spoken_has_letters_and_plain_marks_only(text):
    try:
        said = spoken(text)
    except TextError:
        return
    assert re.fullmatch(r"[A-Za-z][A-Za-z ,;:.!?'-]*[.!?]", said), said
    assert "  " not in said


def test_a_plain_word_waits_for_the_next_one_a_number_for_its_unit_and_a_title_for_its_name():
    feed = READ()
    assert [feed.take(piece) for piece in ("The cat", " ran", " down", " today")] == ["", "The", " cat", " ran"]
    assert feed.take("", final=True) == " down today."
    feed = READ()
    assert feed.take("It costs $1") == "It"
    assert feed.take("2.50 or ") == ""
    assert feed.take("more. Dr") == " costs twelve dollars and fifty cents or more."
    assert feed.take(". Who") == ""
    assert feed.take("", final=True) == " Doctor who."


def test_little_is_held_back_however_long_the_text_has_no_plain_words():
    feed = READ()
    given_out = [len(feed.take(f"{n} KM, ")) > 0 for n in range(1, 400)]
    longest = max(len(run) for run in re.findall("0+", "".join(str(int(out)) for out in given_out)))
    assert longest < 60


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("你好，世界。", ["CJK", "你好", "english"]),
        ("Say Привет now", ["CYRILLIC", "Привет"]),
        ("καλημέρα", ["GREEK"]),
        ("٣", ["ARABIC-INDIC"]),
        *((text, ["letter or a digit"]) for text in ("?!...", "😀 — 🎉")),
    ],
)
def test_what_an_english_voice_cannot_say_is_refused(text, named):
    with pytest.raises(TextError) as caught:
        spoken(text)
    assert all(word in str(caught.value) for word in named)


def test_other_languages_pass_unless_their_script_differs_and_auto_with_several_reads_nothing():
    assert spoken("Das kostet 12 €", "german") == "Das kostet 12 €"
    assert spoken("Это 5 км", "russian") == "Это 5 км"
    several = FrontEnd(("chinese", "english"))
    assert several.read("5 km 你好") == "5 km 你好"
    assert FrontEnd().read("5 km") == several.read("5 km", "english") == "Five kilometers."
    for read, named in (
        (lambda: spoken("Это 5 км", "german"), "CYRILLIC"),
        (lambda: spoken("?!", "german"), "letter or a digit"),
        (lambda: several.read("км"), "CYRILLIC"),
    ):
        with pytest.raises(TextError, match=named):
            read()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("THE CAT SAT. THE SUN SHONE.", "The cat sat. The sun shone."),
        ("NASA sat. I met Max. That is apt.", "Nasa sat. I met max. That is apt."),
        ("One more rep. Then the book I read", "One more rep. Then the book I read."),
        ("Mary V. Jones and Charles V", "Mary V. Jones and charles the fifth."),
        ("They march 3 miles. We met on March 3.", "They march three miles. We met on march third."),
        ("Help ME! Give US a break. GIVE US A BREAK.", "Help me! Give U S a break. Give us a break."),
        ("It is a mix. He had the IV drip.", "It is a mix. He had the I V drip."),
        ("On Sat. 5 May at 9 a.m. Then we go", "On saturday may fifth at nine A M. Then we go."),
        ("He lost 5 in a row", "He lost five in a row."),
        ("Pay $5 - $10, 5% - 10 km off", "Pay five to ten dollars, five percent, ten kilometers off."),
        ("Ａ café — π is 3.14…", "A cafe, pi is three point one four."),
        ("You need:\n- 2 eggs\n- milk\n\n1. Mix them", "You need. Two eggs. Milk. One. Mix them."),
        ("The 5G phone, 4K video, a 3D film", "The five G phone, four K video, a three D film."),
    ],
)
def test_words_that_look_like_short_forms_signs_accents_and_lists(text, said):
    assert spoken(text) == said


# ---- a lexicon


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("nginx, Nginx or NGINX", "engine X, engine X or engine X", id="small-letters-for-any-case"),
        pytest.param("A GIF is no gif.", "A jif is no gif.", id="a-capital-stands-for-itself"),
        pytest.param("nginxes, mynginx, _nginx, nginx2, SQLite", None, id="never-inside-a-word"),
        pytest.param("nginx's and Nguyen’s", "engine X's and Win’s", id="a-possessive-is-the-word"),
        pytest.param("O'Nguyen, nginx'd, nginx'sx", None, id="any-other-apostrophe-is-not"),
        pytest.param("nginx.org me@nginx.org v1.nginx", None, id="names-with-dots-are-one-word"),
        pytest.param("'nginx' (SQL) SQL-like/GIF", "'engine X' (sequel) sequel-like/jif", id="marks-part-words"),
        pytest.param("SQL Server, SQL server", "sequel server, sequel server", id="the-longest-counts"),
        pytest.param("C++ and C++11, ASP.NET and .NET", "see plus plus and C++11, ASP.NET and dot net", id="signs"),
        pytest.param("Die Straße, die STRASSE", "Die shtrahsuh, die shtrahsuh", id="other-letters-in-any-case"),
        pytest.param("我去重庆旅行。", "我去崇庆旅行。", id="no-spaces-in-chinese"),
        pytest.param("nginx\u0301", None, id="an-accent-belongs-to-its-letter"),
        pytest.param("New York is not New\nYork.", "Noo Yawk is not New\nYork.", id="two-words"),
        pytest.param("SQL", "sequel", id="alone"),
    ],
)
def test_words_are_said_as_listed(text, said):
    assert LEXICON.say(text) == (text if said is None else said)


def test_what_is_said_is_not_looked_up_again_and_an_entry_of_the_request_comes_before_the_loaded_ones_in_any_case():
    assert Lexicon({"a": "b", "b": "a"}).say("a b") == "b a"
    assert Lexicon({"gif": "giff"}, LEXICON).say("GIF SQL") == "giff sequel"
    assert Lexicon({"SQL": "squeal"}, LEXICON).say("SQL Server, SQL") == "sequel server, squeal"
    with pytest.raises(TextError, match="may have"):
        Lexicon({"a": "b" * MAX_ENTRY_CHARS}).say("a " * (MAX_TEXT_CHARS // 50))


def test_only_what_may_become_a_word_is_held_back():
    feed = LexiconFeed(LEXICON)
    pushed = [feed.take(piece) for piece in ("All of ", "it on ng", "in", "x", " is. S", "o")]
    assert pushed == ["All of ", "it on ", "", "", "engine X is. ", "So"]
    assert LexiconFeed(LEXICON).take("No such thing he") == "No such thing he"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        pytest.param(b"nginx engine X\n", "line 1: expected a word, a tab and .* found 0 tabs", id="no-tab"),
        pytest.param(b"a\tb\n\na\tb\tc\n", "line 3: .* found 2 tabs", id="two-tabs"),
        pytest.param(b"a\tb\n\xff\tc\n", "expected UTF-8, found other bytes at 4", id="bytes"),
        pytest.param(b"a\tb\na\tc\n", "line 2: 'a' stands in a line before", id="twice"),
        pytest.param(b"a\t\n", "line 1: .* got 0 characters", id="nothing-to-say"),
        pytest.param(b"a\t...\n", "line 1: .*letters or digits to say for 'a'", id="silence"),
        pytest.param(b"x" * 101 + b"\tb\n", "line 1: .* got 101 characters", id="long"),
    ],
)
def test_a_bad_file_is_refused_by_its_line(tmp_path, lines, named):
    path = tmp_path / "words.tsv"
    path.write_bytes(lines)
    with pytest.raises(OptionsError, match=rf"words.tsv[,:] {named}"):
        Lexicon.of(path)
    with pytest.raises(OptionsError, match="found no file"):
        Lexicon.of(tmp_path / "none.tsv")


def test_a_file_is_what_its_mapping_is_and_a_bad_mapping_is_refused(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_bytes("\ufeffnginx\tengine X\r\n\n  GIF\t jif \n".encode())
    assert Lexicon.of(str(path)).say("A GIF of nginx") == "A jif of engine X"
    for mapping in (["a"], {"a": 3}, {3: "a"}, {"": "a"}, {"a": "?"}, {"a": "b" * (MAX_ENTRY_CHARS + 1)}):
        with pytest.raises(OptionsError, match="pronunciations"):
            Lexicon(mapping)


def test_ipa_in_english_letters():
    found = {ipa: respelled(ipa) for ipa in ("/mɛtˈfɔɹmɪn/", "ˈt͡ʃiː.nəʊ", "ˈdɪnɚ ˈɛks", "ʁoz", "ˈ", "")}
    assert [*found.values()] == ["metformin", "cheenoh", "dinner eks", None, None, None]


# ---- markup, and texts in pieces


def parts(pieces: list[str], *new_readers: Callable[[], Any]) -> list:
    """Words that follow each other are one part, without the space around them."""
    feed = TextFeed(VOICES.get, new_readers)
    joined: list = []
    for part in (part for made in (*map(feed.take, pieces), feed.take("", final=True)) for part in made):
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    stripped = (part.strip() if isinstance(part, str) else part for part in joined)
    return [part for part in stripped if part != ""]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One [pause] two", ["One.", HALF, "Two."]),
        ("One[PAUSE  .5 s]two <Break time='500MS' /> three", ["One.", HALF, "Two.", HALF, "Three."]),
        ("I paid $1 [pause 0.5s] for 2", ["I paid one dollar.", HALF, "For two."]),
        ("[Ryan] Hello. [UNCLE_FU] Hi.", [CUT, ("ryan",), "Hello.", CUT, ("uncle_fu",), "Hi."]),
        ("if a < b then [see] or [Ryan](link) <3", None),
        ("[pause me] [pause 5] [pause 5 m] [pauses] [] [", None),
        ("<p>no</p> <breakfast> <speaker>", None),
        ("<speak>A &lt; B</speak>", ["A is less than B."]),
        ("  <speak version='1.1' xml:lang='en'>Hi <break/> Dr. Who</speak>", ["Hi.", HALF, "Doctor who."]),
        ("<speak><p><s>One.</s><s>Two.</s></p></speak>", [CUT, CUT, "One.", CUT, CUT, "Two.", CUT, CUT]),
        ('<speak>The <sub alias="World Wide Web">WWW</sub> is.</speak>', ["The world wide web is."]),
        ('<speak>It is <say-as interpret-as="ordinal">3</say-as>.</speak>', ["It is third."]),
        ('<speak><say-as interpret-as="cardinal">2024</say-as></speak>', ["Two thousand twenty-four."]),
        ('<speak>A <say-as interpret-as="characters">cat5</say-as></speak>', ["A C, A, T, five."]),
        ('<speak>Call <say-as interpret-as="telephone">+1 5-01</say-as></speak>', ["Call plus one, five, zero one."]),
        ('<speak><say-as interpret-as="date">2026-11-02</say-as></speak>', ["November second, twenty twenty-six."]),
        ("One [pause]. [pause] Two", ["One.", HALF, HALF, "Two."]),
        ("<speak>[Ryan] Yes. [pause] No.</speak>", [CUT, ("ryan",), "Yes.", HALF, "No."]),
    ],
)
def test_a_text_becomes_words_pauses_and_turns(text, expected):
    assert parts([text], READ) == ([FrontEnd().read(text)] if expected is None else expected)
    assert parts(list(text), READ) == parts([text], READ)


def test_without_a_front_end_the_words_stay_and_only_markup_goes_where_that_is_asked_for():
    assert parts(["Say 5 [pause] **7** <3"]) == ["Say 5", HALF, "**7** <3"]
    assert parts(["Say 5 [pause] **7** [Ryan] `x`"], MarkupFeed) == ["Say 5", HALF, "7", CUT, ("ryan",), "x"]
    assert " ".join(parts(["Run:\n```sh\nls **\n```\nDone."], MarkupFeed)).split() == ["Run:", "Done."]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[pause 10.1s]", "may have 10 s, got 10.1 s"),
        ('<break strength="strong"/>', "<break time="),
        ("<speak><audio src='x'/>x</speak>", "<audio> cannot be spoken here, expected p, s, break, sub, say-as"),
        ("<speak><say-as interpret-as='rude'>x</say-as></speak>", "characters, date, telephone, .* got 'rude'"),
        ("<speak><sub>x</sub></speak>", "alias"),
        ("<speak>Tom & Jerry</speak>", "&amp; for &"),
        *((text, "whole SSML") for text in ("<speak>a<s>b</speak>", "<speak>a</speak> b", "<speak>")),
        *((f"<speak>{start}&b;</speak>", "whole SSML") for start in ("", '<!DOCTYPE a [<!ENTITY b "c">]>')),
        *((text, "got none") for text in ("[Ryan] ", "<speak><p/></speak>")),
    ],
)
def test_what_is_wrong_is_named(text, error):
    with pytest.raises(TextError, match=error):
        parts([text], READ)


def test_numbers_and_letters_are_written_so_that_they_are_read_as_asked():
    ordinals = {"1": "1st", "12": "12th", "1,022": "1,022nd", "9" * 5_000: "9" * 5_000}
    assert {written: said_as("ordinal", written) for written in ordinals} == ordinals
    assert said_as("characters", "a1 b") == "A, 1, B"
    assert (said_as("cardinal", "first"), said_as("telephone", "none")) == ("first", "none")


# ---- in pieces

MIXED = "the cat NASA $1 2.50 , . - ' Jan. 5 km Henry VIII 10:30 am St. James \n & % I II 1/2 é 😀"
WORDS = st.one_of(st.sampled_from(MIXED.split(" ")), st.text(alphabet="aBI 15.,:/-$%'\n", max_size=5))
ENTRY = st.text(alphabet="aAbB.'+重庆 ", min_size=1, max_size=5).filter(str.strip)
TAGS = "[pause| 1s]|[Ryan]|(x)|<bre|ak/>|a |<|[|.| 3|]| |<spea|k>|<s>hi</s|></speak>".split("|")
ENGLISH = partial(TextFeed, {}.get, [MarkupFeed, READ])
TAGGED = [partial(TextFeed, {"Ryan": ("ryan",)}.get, way) for way in ([], [MarkupFeed, READ], [MarkupFeed])]
LEXICONS = st.dictionaries(ENTRY, st.just("X"), max_size=5).map(lambda listed: partial(LexiconFeed, Lexicon(listed)))
FEEDS_AND_TEXTS = st.one_of(
    st.tuples(st.just(MarkupFeed), st.text(alphabet="ab1 *_[]()`~<>&;$|#-^:\\\n!x.=/", max_size=40)),
    st.tuples(st.sampled_from([ENGLISH, READ]), st.lists(WORDS, max_size=14).map(" ".join)),
    st.tuples(LEXICONS, st.text(alphabet="aAbB'’s.@ 重庆é\u0301+", max_size=30)),
    st.tuples(st.sampled_from(TAGGED), st.lists(st.sampled_from(TAGS)).map("".join)),
)


def made_of(new_feed, text: str, cuts: list[int]) -> list | None:
    """Characters, and what else is made; None for a text that is refused."""
    feed, made = new_feed(), []
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    try:
        for found in [*(feed.take(text[a:b]) for a, b in pairwise(edges)), feed.take("", final=True)]:
            for part in found:
                made += part if isinstance(part, str) else [part]
    except TextError:
        return None
    return made


@settings(max_examples=500, deadline=None)
@given(FEEDS_AND_TEXTS, st.lists(st.integers(0, 60), max_size=6))
@example((MarkupFeed, "[^1]: note"), [5])
@example((MarkupFeed, "see [a [b]](c(d)) **e** `f`"), [7, 9])
@example((ENGLISH, "$1 2.50"), [2])
@example((ENGLISH, "a 5  km"), [3])
@example((READ, "eggs\n1. Mix"), [6])
@example((partial(LexiconFeed, Lexicon({"a": "X"})), "a'sb"), [1, 2, 3])
@example((partial(LexiconFeed, Lexicon({"ab": "X", "ab ab b": "X"})), "ab ab.b"), [2, 4, 6])
@example((TAGGED[1], "[Ryan]("), [1, 5, 6])
@example((TAGGED[0], " <speak><s>hi</s></speak>"), [1, 6, 8, 16])
def test_pieces_give_what_the_whole_gives(feed_and_text, cuts):
    assert made_of(*feed_and_text, cuts) == made_of(*feed_and_text, [])


def test_each_written_form_in_random_pieces_gives_what_the_whole_gives():
    random = Random(90210)
    for text, _ in TABLE * 3:
        cuts = random.sample(range(len(text)), len(text) // 5)
        assert made_of(ENGLISH, text, cuts) == made_of(ENGLISH, text, []) is not None
