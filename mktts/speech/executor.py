"""What makes the frames of the streams that it is given. The engine's worker thread owns it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mktts.errors import EngineError, OptionsError
from mktts.speech.job import EngineName, Job

TICK_BOUNDS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.16, 0.5)


class TickTimes:
    """How long ticks took, all since the beginning: counts (of TICK_BOUNDS_S and of what is longer), and their sum.

    Written by the worker, read from any thread.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(TICK_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        """A tick was made."""
        self.counts[bisect_left(TICK_BOUNDS_S, took_s)] += 1
        self.sum_s += took_s


class Standing(NamedTuple):
    """How an executor stands at the moment.

    carries: listeners that it would admit at once. listeners: that it has. waiting: streams in line. lanes, lanes_used:
    places for streams, whether frames are made for them now or not. pages, pages_free: of keys and values, 0 where
    there is no such book.
    """

    carries: int
    listeners: int
    waiting: int
    lanes: int
    lanes_used: int
    pages: int
    pages_free: int
    ticks: TickTimes


@dataclass(frozen=True)
class Wishes:
    """What a server wants of admission. max_listeners: at once, however many could be carried; None: those.
    max_waiting, max_wait_s: how many stand in line for a place, and for how long.
    Raises OptionsError for values out of range.
    """

    max_listeners: int | None = None
    max_waiting: int = 64
    max_wait_s: float = 0.5

    def __post_init__(self) -> None:
        none_at_all = self.max_listeners is not None and self.max_listeners < 1
        if none_at_all or self.max_waiting < 0 or not self.max_wait_s >= 0:
            raise OptionsError(f"expected max_listeners of at least 1 or None, the others at least 0, got {self}")


class Executor(Protocol):
    """Makes streams, tick by tick."""

    name: EngineName
    open_jobs: int  # given to it, and not over
    listeners: int  # open streams that somebody listens to
    carries: int  # listeners that it would admit at once
    standing: Standing  # may be read from any thread

    def admit(self, wishes: Wishes) -> None:
        """From now on a stream that finds no place in time, or may not be one more, ends by BusyError."""

    def beside(self, elsewhere: Callable[[], int]) -> None:
        """elsewhere: counts the listeners of the other executors."""

    def take(self, job: Job) -> None:
        """A new stream."""

    def hear(self, job: Job) -> None:
        """Of a stream that it was given, over perhaps: its text went on, its full buffer was read from, or it was
        cancelled. Without that nothing becomes of one that waits, so that it need not be looked at."""

    def turn(self, now_s: float, alone: bool) -> float:
        """Does what is due: a tick, at most. alone: no other stream is open, on any executor.

        Returns when it wants its next turn if nothing happens outside: perf_counter seconds, -inf for at once, inf for
        never. An error of one stream is that stream's alone.
        """

    def abandon(self, error: BaseException) -> None:
        """`turn` has raised `error`: every stream ends with an EngineError, those that come later are served."""

    def close(self) -> None:
        """Ends every stream as cancelled."""


def abandoned(error: BaseException) -> EngineError:
    """What a stream is told that ends because a turn raised `error`. Each gets its own: raising writes into it."""
    return EngineError(f"the engine failed while this stream was open: {type(error).__name__}: {error}")
