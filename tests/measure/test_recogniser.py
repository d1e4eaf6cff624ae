"""Words, their errors and the recogniser that hears them, against known truth."""

import numpy as np
import pytest
from absent import needs

from mktts.agent.user_speech import load
from mktts.measure.recogniser import Aligner, Recogniser, loop_model, word_errors, words


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a b c", "a x c d", 2), ("a", "", 1), ("", "a b", 2)],
)
def test_word_errors(said, heard, errors):
    assert word_errors(said.split(), heard.split()) == errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Hello, world - it's Twenty-one dogs'!", "hello world it's twenty one dogs"),
        ("Dr. Brown, 1984; 1,250 birds", "doctor brown nineteen eighty four one thousand two hundred fifty birds"),
        (" ... ", ""),
    ],
)
def test_words_are_those_that_the_front_end_reads(text, said):
    assert words(text) == said.split()


def test_the_loop_is_a_distribution():
    shares = [line.split() for line in loop_model(["b", "a", "b"]).splitlines() if line.startswith("-")]
    assert [word for _, word in shares] == ["<s>", "</s>", "a", "b"]
    assert sum(10 ** float(share) for share, _ in shares) == pytest.approx(1, abs=1e-3)


@needs("pocketsphinx")
def test_the_aligner_finds_a_word_where_its_sound_is():
    speech, aligner = load("hello") / np.float32(32768), Aligner()
    (start_s, end_s), *others = aligner.align(speech, ["hello"])
    assert others == [] and 0 <= start_s < end_s <= len(speech) / 24_000 + 0.05
    later = aligner.align(np.concatenate((np.zeros(12_000, np.float32), speech)), ["hello"])
    assert np.subtract(later[0], (start_s, end_s)) == pytest.approx(0.5, abs=0.05)
    assert aligner.align(speech, ["zzyzxq"]) is None and aligner.align(speech, []) is None


@needs("pocketsphinx")
def test_the_recogniser_names_what_it_lacks_and_hears_the_same_again():
    closed = Recogniser(words("Yes, the kettle is two. Zzyzxq"))
    assert closed.knows("kettle") and not closed.knows("zzyzxq")
    assert closed.sound("two") == closed.sound("to") != closed.sound("kettle") and closed.sound("zzyzxq") == "zzyzxq"
    speech, noise = load("hello") / np.float32(32768), np.random.default_rng(0).normal(0, 0.1, 9_000)
    first = closed.hear(speech)
    closed.hear(noise)
    assert closed.hear(speech) == first
    assert set(first.split()) <= {"yes", "the", "kettle", "is", "two"}
    assert closed.hear(np.zeros(0, np.float32)) == ""
