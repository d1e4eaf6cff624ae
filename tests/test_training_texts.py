"""The sentences: the same by seed, rich, and apart from those that judge."""

from __future__ import annotations

import re
from itertools import islice

from mktts.training import texts
from mktts.training.words import LISTS, TEMPLATES


def test_the_same_seed_gives_the_same_sentences_and_another_seed_others():
    first, again, other = (list(islice(texts.training_sentences(seed), 50)) for seed in (3, 3, 4))
    assert first == again != other


def test_few_repeats():
    drawn = [texts.normal(text) for text in islice(texts.training_sentences(0), 20_000)]
    assert len(set(drawn)) > 0.97 * len(drawn)


def test_held_out_sentences_are_enough_different_and_never_trained_on():
    held = {texts.normal(text) for text in texts.held_out()}
    assert len(held) == texts.HELD_OUT >= 600
    assert not held & {texts.normal(text) for text in islice(texts.training_sentences(1), 20_000)}


def test_every_slot_has_a_list_and_no_brace_is_left():
    assert {slot for many in TEMPLATES.values() for t in many for slot in re.findall(r"\{(\w+)\}", t)} <= set(LISTS)
    assert not [text for text in texts.held_out() if "{" in text or not text[0].isupper()]
