"""Another implementation under the same listeners: as many processes as listeners, one model in each.

It makes one stream at a time, so this is how its users serve several. Each listener asks again when it has heard the
last utterance out, so its stream is open nearly all the time; every load is held for HELD_S, all processes at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import numpy as np

from mktts.common import python_path
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.bench.load.book import figure
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.point import percentile
from mktts.measure.bench.load.settings import HELD_S
from mktts.spec import SAMPLES_PER_FRAME

MOST_PROCESSES = 16
READY_S = 180.0  # until a process has loaded its model and spoken once
_GRACE_S = 60.0  # beyond the held time, for the utterance that it ends in
_FRAME = np.zeros(SAMPLES_PER_FRAME, np.float32)


def run(
    words: Sequence[str], loads: Sequence[int], seconds: float, seed: int = 0
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Figures by name and a report, of a program as `mktts.measure.bench.load.seat` describes it.

    `peer_listeners`: the largest of `loads` at which every listener was in time; 0 where none was. In the report
    `loads`: of each load, figures as a point's. Raises BackendUnavailable, with what it said, for a program that does
    not become ready, MetricsError where one ends during a run.
    """
    if not loads or min(loads) < 1 or max(loads) > MOST_PROCESSES:
        raise MetricsError(
            f"each process has a model of its own: try 1 to {MOST_PROCESSES} of them, such as --listeners 1,2,4, "
            f"got {', '.join(map(str, loads)) or 'none'}"
        )
    with contextlib.ExitStack() as stack:
        threads = max(1, (os.cpu_count() or 1) // max(loads))  # more than cores would wait for each other
        seats = [stack.enter_context(_process(words, threads)) for _ in range(max(loads))]
        for seat in seats:
            seat.expect("ready", READY_S)
        rows = [_load(seats[:count], seconds, seed + 100 * index) for index, count in enumerate(loads)]
    # However long the first PCM takes: a peer is not asked for our limit besides.
    carried = max((row["listeners"] for row in rows if not row["underruns"]), default=0)
    facts = {"held": seconds >= HELD_S, "duration_s": seconds}
    value = figure(carried, "listeners, one process each", len(rows), **facts)
    fastest = min(rows, key=lambda row: row["listeners"])
    wait = figure(fastest["ttfc_p99_ms"], "ms", fastest["arrivals"], p99=fastest["ttfc_p99_ms"], **facts)
    return {"peer_listeners": value, "peer_ttfc_p99_ms": wait}, {"held": facts["held"], "loads": rows}


def heard(utterances: Sequence[dict[str, Any]]) -> list[Listener]:
    """What the lines of a seat come to, one listener an utterance."""
    found = []
    for utterance in utterances:
        one = Listener(utterance["begun_s"])
        one.opened_s = one.planned_s
        for frames, after_s in utterance["chunks"]:
            one.hear(one.planned_s + after_s, np.tile(_FRAME, int(frames)), int(frames))
        found.append(one)
    return found


def _load(seats: Sequence[_Seat], seconds: float, seed: int) -> dict[str, Any]:
    for index, seat in enumerate(seats):
        seat.say(f"{seconds} {seed + index}")
    said = [seat.until_done(seconds + _GRACE_S) for seat in seats]
    listeners = [one for lines in said for one in heard(lines)]
    waits_ms = [1e3 * (one.first_s - one.planned_s) for one in listeners if one.first_s is not None]
    gaps = [gap for one in listeners for gap in one.gaps]
    if len(waits_ms) < len(seats):
        raise MetricsError(f"{len(seats)} processes gave {len(waits_ms)} utterances with PCM in {seconds:g} s")
    return {
        "listeners": len(seats),
        "arrivals": len(listeners),
        "duration_s": seconds,
        **{f"ttfc_p{percent}_ms": percentile(waits_ms, percent) for percent in (50, 95, 99)},
        "underruns": len(gaps),
        "late_max_ms": 1e3 * max((gap.late_s for gap in gaps), default=0.0),
    }


class _Seat:
    """A process with a model. Its lines are read by a thread, so that a silent one can be given up."""

    def __init__(self, process: subprocess.Popen[str], messages: TextIO) -> None:
        self._process, self._messages = process, messages
        self._lines: SimpleQueue[str] = SimpleQueue()  # "" at their end
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.strip())
        self._lines.put("")

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def expect(self, word: str, seconds: float) -> None:
        """Raises BackendUnavailable where the next line is another, or none comes."""
        if (line := self._line(time.monotonic() + seconds)) != word:
            raise BackendUnavailable(f"expected {word!r}, got {line!r}: {self._last_words()}")

    def until_done(self, seconds: float) -> list[dict[str, Any]]:
        """The utterances up to "done". Raises MetricsError where the process ends or says nothing."""
        found, end_s = [], time.monotonic() + seconds
        while (line := self._line(end_s)) != "done":
            if not line:
                raise MetricsError(f"a peer's process said no more: {self._last_words()}")
            found.append(json.loads(line))
        return found

    def _line(self, end_s: float) -> str | None:
        """None where it says nothing until then."""
        try:
            return self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
        except Empty:
            return None

    def _last_words(self) -> str:
        self._messages.seek(0)
        lines = [line.strip() for line in self._messages if line.strip()]
        return lines[-1] if lines else "without a word"


@contextlib.contextmanager
def _process(words: Sequence[str], threads: int) -> Iterator[_Seat]:
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env={"OMP_NUM_THREADS": str(threads), **os.environ, **python_path()},
        )
        try:
            yield _Seat(process, messages)
        finally:
            process.kill()
            process.wait()
