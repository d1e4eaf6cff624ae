"""One feature of one client, tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from mktts.measure.clients.sound import check_length, heard

TEXT = (
    "Good morning, and thank you for calling. The next train to the coast leaves from platform four in twelve minutes, "
    "and there are still seats by the window. Shall I hold two of them for you, or would you rather wait?"
)


@dataclass(frozen=True)
class Place:
    """A server that is tried. Every utterance of it ends after `duration_s`: TEXT is longer.

    clones: it has a Base checkpoint, and keeps uploaded voices; otherwise it has built-in speakers.
    """

    url: str
    duration_s: float
    clones: bool
    speaker: str

    @property
    def ws(self) -> str:
        return self.url.replace("http", "ws", 1)

    def check(self, data: bytes, kind: str, speed: float = 1.0) -> str:
        """What was heard, in words. Raises MetricsError for sound that is not what it should be."""
        return check_length(heard(data, kind), self.duration_s / speed)


@dataclass(frozen=True)
class Trial:
    """run: returns what there is to note; what it raises is the note of a trial that failed. clones: see `Place`."""

    client: str
    version: str
    feature: str
    run: Callable[[Place], Any]
    clones: bool = False


@dataclass(frozen=True)
class Result:
    client: str
    version: str
    feature: str
    ok: bool
    note: str


def tried(trial: Trial, place: Place) -> dict[str, Any]:
    """A row of the document's `results`."""
    try:
        note = trial.run(place)
        if asyncio.iscoroutine(note):
            with asyncio.Runner() as runner:
                # a client may leave connections to the collector, which finds the loop closed: not our news
                runner.get_loop().set_exception_handler(lambda loop, context: None)
                note = runner.run(note)
        ok = True
    except Exception as error:  # of a client: any
        note, ok = f"{type(error).__name__}: {error}".splitlines()[0][:300], False
    return asdict(Result(trial.client, trial.version, trial.feature, ok, note))


def version_of(package: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
