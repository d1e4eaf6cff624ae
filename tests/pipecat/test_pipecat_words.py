"""Estimated word times, playout and resampling, apart from any pipeline."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mktts.pipecat.words import AudioTimes, Pace, Playout, WordTimes, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello there.", ["Hello", "there."]),
        ("Well — yes, 5 % more !", ["Well —", "yes,", "5 %", "more !"]),
        ("She said: “Go!”", ["She", "said:", "“Go!”"]),
        ("( maybe )", ["( maybe )"]),
        ("你好，世界。", ["你", "好，", "世", "界。"]),
        ("我用 Python 写“代码”", ["我", "用", "Python", "写", "“代", "码”"]),
        ("안녕하세요 여러분", ["안녕하세요", "여러분"]),
        ("\U0001f44d", ["\U0001f44d"]),
        ("Great \U0001f44d", ["Great \U0001f44d"]),
        (" \n", []),
    ],
)
def test_words_of_a_text(text, words):
    assert [word.text for word in split_words(text)] == words


def test_no_space_stands_between_ideographs():
    assert [word.wide for word in split_words("我用 Python。")] == [True, True, True]
    assert [word.wide for word in split_words("Hello, world")] == [False, False]


@given(st.text(alphabet="ab. ,—“”(你。\n7", max_size=40))
def test_no_visible_character_is_lost_or_said_twice(text):
    said = "".join(word.text for word in split_words(text))
    assert "".join(said.split()) == "".join(text.split())


@given(st.lists(st.text(alphabet="ab. ,—“(你。", max_size=6), max_size=12))
def test_words_do_not_depend_on_how_the_text_was_cut(pieces):
    times = WordTimes(Pace())
    for piece in pieces:
        times.feed(piece)
    times.finish()
    assert [word for word, _ in times.rest(1.0)] == split_words("".join(pieces))


def test_words_are_told_while_the_audio_grows_and_the_rest_is_spread_over_what_is_left():
    pace = Pace()
    times = WordTimes(pace)
    times.feed("One two three four five.")
    times.finish()
    usual_s = times.units * pace.s_per_unit
    early = times.due(0.5, heard_s=0.0)
    assert [word.text for word, _ in early] == ["One", "two"]
    assert early[1][1] == pytest.approx(4 * pace.s_per_unit)
    late = times.rest(2 * usual_s)
    assert [word.text for word, _ in late] == ["three", "four", "five."]
    offsets_s = [offset_s for _, offset_s in (*early, *late)]
    assert all(first < second for first, second in pairwise(offsets_s))
    assert late[-1][1] < 2 * usual_s
    assert times.due(9.0, 9.0) == []


def test_words_are_not_told_long_before_they_are_heard():
    text = "one two three four five six seven eight nine ten eleven twelve. "
    early, late = WordTimes(Pace()), WordTimes(Pace())
    early.feed(text)
    late.feed(text)
    told = [word.text for word, _ in early.due(4.0, heard_s=0.0)]
    assert told == ["one", "two", "three", "four"]  # of a second
    assert len(late.due(4.0, heard_s=3.0)) > 2 * len(told)


def test_a_word_takes_the_time_of_what_is_spoken_for_it():
    written = {"$1,250": "one thousand two hundred fifty dollars"}
    times, usual = WordTimes(Pace(), lambda word: written.get(word, word)), WordTimes(Pace())
    for each in (times, usual):
        each.feed("Pay $1,250 today.")
        each.finish()
    found, flat = times.rest(4.0), usual.rest(4.0)
    assert [word.text for word, _ in found] == [word.text for word, _ in flat] == ["Pay", "$1,250", "today."]
    assert found[2][1] == pytest.approx(4.0 * (4 + 39) / (4 + 39 + 7))
    assert flat[2][1] < 3.0 < found[2][1]


def test_text_that_comes_late_is_not_in_the_audio_made_before_it():
    times = WordTimes(Pace())
    times.feed("One two. ")
    assert [word.text for word, _ in times.due(3.0, 3.0)] == ["One"]  # more letters of the other may follow
    times.finish()
    assert [word.text for word, _ in times.due(3.0, 3.0)] == ["two."]
    times.feed("Three four. ", made_s=3.0)
    times.finish()
    assert times.due(3.0, 3.0) == []
    assert [(word.text, offset_s) for word, offset_s in times.due(9.0, 9.0)][0] == ("Three", 3.0)


def test_pace_follows_the_voice_and_ignores_what_is_no_speech():
    pace = Pace()
    usual = pace.s_per_unit
    pace.learn(5, 60.0)
    assert pace.s_per_unit == usual
    for _ in range(50):
        pace.learn(150, 150 * 1.5 * usual)
    assert pace.s_per_unit == pytest.approx(1.5 * usual)
    for _ in range(50):
        pace.learn(150, 1e6)
    assert pace.s_per_unit <= 2 * usual


def test_audio_is_heard_after_what_was_pushed_before_it_and_not_before_now():
    playout = Playout()
    assert [playout.push(1.0, now_s) for now_s in (10.0, 10.2, 15.0)] == [10.0, 11.0, 15.0]
    playout.drop()
    assert playout.push(1.0, 15.1) == 15.1


def test_a_pause_of_the_engine_moves_the_words_after_it():
    heard = AudioTimes()
    heard.add(1.0, begin_s=20.0)
    heard.add(1.0, begin_s=25.0)
    assert [heard.at(offset_s) for offset_s in (0.0, 0.5, 1.0, 1.5, 2.0)] == [20.0, 20.5, 25.0, 25.5, 26.0]
    assert heard.made_s == 2.0
