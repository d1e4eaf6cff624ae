"""Whatever reads a text makes of its pieces what it makes of the whole."""

from functools import partial
from itertools import pairwise
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from record_cases import cases

from mktts.errors import TextError
from mktts.text.front_end import FrontEndFeed
from mktts.text.lexicon import Lexicon, LexiconFeed
from mktts.text.markup import MarkupFeed
from mktts.text.parts import TextFeed

MIXED = "the cat NASA $1 2.50 , . - ' Jan. 5 km Henry VIII 10:30 am St. James \n & % I II 1/2 é 😀"
WORDS = st.one_of(st.sampled_from(MIXED.split(" ")), st.text(alphabet="aBI 15.,:/-$%'\n", max_size=5))
ENTRY = st.text(alphabet="aAbB.'+重庆 ", min_size=1, max_size=5).filter(str.strip)
TAGS = "[pause| 1s]|[Ryan]|(x)|<bre|ak/>|a |<|[|.| 3|]| |<spea|k>|<s>hi</s|></speak>".split("|")
READ = partial(FrontEndFeed, ("english",))
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
