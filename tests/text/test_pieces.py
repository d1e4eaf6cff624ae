"""What a text asks for beside its words: what becomes of it, whole and in pieces. Whatever reads a text makes of its
pieces what it makes of the whole."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from record_cases import cases

from mktts.errors import TextError
from mktts.text.front_end import FrontEnd, FrontEndFeed
from mktts.text.lexicon import Lexicon, LexiconFeed
from mktts.text.markup import MarkupFeed
from mktts.text.parts import Pause, TextFeed, said_as

READ = partial(FrontEndFeed, ("english",))
HALF = Pause(12_000)
CUT = Pause(0)


def named(name: str) -> tuple[str] | None:
    return (name.lower(),) if name.lower() in ("ryan", "uncle_fu") else None


def parts(pieces: list[str], *new_readers: Callable[[], Any]) -> list:
    """Words that follow each other are one part, without the space around them."""
    feed = TextFeed(named, new_readers)
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
LEXICONS = st.dictionaries(ENTRY, st.just("X"), max_size=5).map(lambda words: partial(LexiconFeed, Lexicon(words)))
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
    for text, _ in cases() * 3:
        cuts = random.sample(range(len(text)), len(text) // 5)
        assert made_of(ENGLISH, text, cuts) == made_of(ENGLISH, text, []) is not None
