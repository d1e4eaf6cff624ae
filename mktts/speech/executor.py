"""What makes the frames of the streams that it is given. The engine's worker thread owns it."""

from __future__ import annotations

from typing import Protocol

from mktts.errors import EngineError
from mktts.speech.job import EngineName, Job


class Executor(Protocol):
    """Makes streams, tick by tick."""

    name: EngineName
    open_jobs: int  # given to it, and not over

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
