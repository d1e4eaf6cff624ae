"""What a recogniser hears of the bot, against what the bot said: how well a conversation's voice is understood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mktts.agent.latency import TurnLatency
from mktts.errors import AgentError
from mktts.measure.recogniser import Recogniser, vocabulary_of
from mktts.measure.tracks import between
from mktts.measure.word_errors import errors_by_sound, words


@dataclass(frozen=True)
class HeardBack:
    """One reply. said: its text, or of an interrupted one what the context took for heard; heard: by the recogniser.

    errors: substitutions, insertions and deletions, words that sound alike being one. words: said.
    """

    turn: int
    said: str
    heard: str
    errors: int
    words: int
    interrupted: bool


def hear_back(turns: Sequence[TurnLatency], user: np.ndarray, bot: np.ndarray) -> tuple[HeardBack, ...]:
    """Each reply of a recorded conversation, `user` and `bot` (S,) float32 at 24 kHz on one clock.

    The recogniser is pocketsphinx; it knows which words were said, not their order. Raises AgentError where the
    recording does not have as many user turns as `turns`, BackendUnavailable without pocketsphinx.
    """
    replies = between(user, bot)
    if len(replies) != len(turns):
        raise AgentError(f"expected {len(turns)} turns of the user in the recording, found {len(replies)}")
    texts = [turn.heard or turn.reply for turn in turns]
    recogniser = Recogniser(vocabulary_of(texts))
    found = []
    for turn, said, pcm in zip(turns, texts, replies, strict=True):
        heard = recogniser.hear(pcm)
        errors = errors_by_sound(said, heard, recogniser.sound)
        found.append(HeardBack(turn.turn, said, heard, errors, len(words(said)), turn.interrupted))
    return tuple(found)


def word_error_rate(found: Sequence[HeardBack]) -> float | None:
    """Of the replies that were said to their end; None where there is none.

    Where an interrupted reply was cut is known only as exactly as the times of its words.
    """
    whole = [reply for reply in found if not reply.interrupted]
    said = sum(reply.words for reply in whole)
    return sum(reply.errors for reply in whole) / said if said else None
