"""What a text asks for beside its words: what becomes of it, whole and in pieces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mktts.errors import TextError
from mktts.text.front_end import FrontEnd, FrontEndFeed
from mktts.text.markup import MarkupFeed
from mktts.text.parts import Pause, TextFeed, said_as

ENGLISH = partial(FrontEndFeed, ("english",))
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
    assert parts([text], ENGLISH) == ([FrontEnd().read(text)] if expected is None else expected)
    assert parts(list(text), ENGLISH) == parts([text], ENGLISH)


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
        parts([text], ENGLISH)


def test_numbers_and_letters_are_written_so_that_they_are_read_as_asked():
    ordinals = {"1": "1st", "12": "12th", "1,022": "1,022nd", "9" * 5_000: "9" * 5_000}
    assert {written: said_as("ordinal", written) for written in ordinals} == ordinals
    assert said_as("characters", "a1 b") == "A, 1, B"
    assert (said_as("cardinal", "first"), said_as("telephone", "none")) == ("first", "none")
