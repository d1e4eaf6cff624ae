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


@pytest.mark.parametrize(
    ("user", "bot", "both"),
    [
        ([(1, 2), (5.2, 6)], [(2.5, 5.65), (7, 9)], [(5.2, 5.65)]),  # from the user's onset to the bot's silence
        ([(5, 5.1), (5.3, 6)], [(3, 5.5)], [(5, 5.5)]),  # a pause between words does not end speech
        ([(1, 2)], [(3, 4)], []),
    ],
)
def test_both_sound_from_the_second_onset_to_the_first_end(user, bot, both):
    found = tracks.overlaps(side(*user), side(*bot))
    assert [time for pair in found for time in pair] == pytest.approx(
        [time for pair in both for time in pair], abs=0.011
    )


def test_a_reply_lies_between_the_ends_of_the_users_speech_and_nothing_said_has_none():
    user, bot = side((1, 2), (5.2, 6)), side((0.2, 0.8), (2.5, 5.65), (7, 9))
    replies = tracks.between(user, bot)
    assert [len(reply) / SAMPLE_RATE_HZ for reply in replies] == pytest.approx([4, 4], abs=0.011)
    assert np.array_equal(np.concatenate(replies), bot[round(2 * SAMPLE_RATE_HZ) :])
    for silent in (np.zeros(48_000, np.float32), np.zeros(0, np.float32)):
        assert tracks.between(silent, bot) == tracks.overlaps(silent, silent) == []
