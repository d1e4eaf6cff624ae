"""What the recording of a conversation shows, on tones whose times are known."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.measure import tracks
from mktts.spec import SAMPLE_RATE_HZ


def side(*stretches: tuple[float, float], length_s: float = 10.0) -> np.ndarray:
    """A tone in each stretch (start, end) in s, a quiet room's noise elsewhere."""
    times_s = np.arange(round(length_s * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    noise = np.random.default_rng(0).normal(0, 1e-4, len(times_s))
    on = sum((start <= times_s) & (times_s < end) for start, end in stretches) if stretches else 0
    return (noise + on * 0.4 * np.sin(2 * np.pi * 300 * times_s)).astype(np.float32)


def test_an_interruption_is_from_the_users_onset_to_the_bots_silence():
    ((start_s, end_s),) = tracks.overlaps(side((1, 2), (5.2, 6)), side((2.5, 5.65), (7, 9)))
    assert (start_s, end_s) == pytest.approx((5.2, 5.65), abs=0.011)


def test_a_pause_between_words_does_not_end_speech():
    ((start_s, end_s),) = tracks.overlaps(side((5, 5.1), (5.3, 6)), side((3, 5.5)))
    assert (start_s, end_s) == pytest.approx((5, 5.5), abs=0.011)


def test_a_reply_lies_between_the_ends_of_the_users_speech():
    user, bot = side((1, 2), (5.2, 6)), side((0.2, 0.8), (2.5, 5.65), (7, 9))
    replies = tracks.between(user, bot)
    assert [len(reply) / SAMPLE_RATE_HZ for reply in replies] == pytest.approx([4, 4], abs=0.011)
    assert np.array_equal(np.concatenate(replies), bot[round(2 * SAMPLE_RATE_HZ) :])


@pytest.mark.parametrize("user", [side((1, 2)), side(), np.zeros(0, np.float32)], ids=["in turn", "noise", "nothing"])
def test_sides_that_take_turns_do_not_overlap(user):
    assert tracks.overlaps(user, np.zeros(len(user), np.float32)) == []
    assert len(user) == 0 or tracks.overlaps(side((1, 2)), side((3, 4))) == []


def test_nothing_said_has_no_replies():
    assert tracks.between(np.zeros(48_000, np.float32), side((1, 2))) == []
