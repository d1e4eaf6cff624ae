"""When words are heard: playout, apart from any pipeline."""

from __future__ import annotations

from mktts.pipecat.words import AudioTimes, Playout


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
