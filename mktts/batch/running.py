"""A tick that was launched: who is in it, and what becomes of them where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mktts.batch.tick import Tick
from mktts.batch.utterance import LaneUtterance
from mktts.errors import EngineError
from mktts.speech.job import Job


class Lane(NamedTuple):
    """Who had a lane in a tick."""

    slot: int
    job: Job
    work: LaneUtterance
    segment: int


@dataclass
class Running:
    """A launched tick. jobs: with a lane or a piece of a prompt in it. ends_s: as predicted. follows: the one before it
    still ran."""

    tick: Tick
    lanes: list[Lane]
    jobs: list[Job]
    launched: Any
    ends_s: float
    follows: bool


def fail_all(jobs: Sequence[Job], error: Exception) -> None:
    """Their tick has failed. Each gets an error of its own: where it is raised is noted in it."""
    for job in jobs:
        job.fail(EngineError(f"the tick that made this stream failed: {type(error).__name__}: {error}"))
