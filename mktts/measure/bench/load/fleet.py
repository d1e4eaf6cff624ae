"""One crowd in several processes, so that no generator's loop holds up its listeners, or shares a lock with a server.

Every process plays its part of the same plan from the same moment on, by the clock that processes of one machine share.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

from mktts.errors import MetricsError
from mktts.measure.bench.load.attendance import Attendance, Mark
from mktts.measure.bench.load.crowd import Opens, attend
from mktts.measure.bench.load.texts import Said
from mktts.measure.bench.load.visits import Visit

_READY_S = 120.0  # for a process to import what it needs
_HEAD_START_S = 0.5
_LATE_S = 60.0  # behind the end of the plan, for the last streams


def attend_in_processes(
    server: Opens,
    said: Said,
    plan: Sequence[Visit],
    times_s: tuple[float, float, float],
    processes: int,
    began: Callable[[float], None] = lambda starts_s: None,
) -> Attendance:
    """As `attend`, in so many processes. server, said: are pickled. times_s: begin, end, close. began: called with the
    moment from which on they count, of time.perf_counter.

    Raises MetricsError where a process fails, with what it said.
    """
    context = multiprocessing.get_context("spawn")
    lines, children = [], []
    try:
        for number in range(processes):
            ours, theirs = context.Pipe()
            part = list(plan[number::processes])
            child = context.Process(target=_attend, args=(theirs, server, said, part, times_s), daemon=True)
            child.start()
            theirs.close()
            lines.append(ours)
            children.append(child)
        for line in lines:
            _told(line, _READY_S)
        starts_s = time.perf_counter() + _HEAD_START_S
        for line in lines:
            line.send(starts_s)
        began(starts_s)
        seen = [_told(line, times_s[2] + _LATE_S) for line in lines]
        for child in children:
            child.join(_LATE_S)
    finally:
        for child in children:
            child.kill()
            child.join()
    return merged(seen)


def merged(parts: Sequence[Attendance]) -> Attendance:
    """What all of them met."""
    came = sorted(
        (pair for part in parts for pair in zip(part.visits, part.listeners, strict=False)),
        key=lambda pair: pair[0].index,
    )
    return Attendance(
        listeners=[listener for _, listener in came],
        visits=[visit for visit, _ in came],
        begin=_mark([part.begin for part in parts]),
        end=_mark([part.end for part in parts]),
        closed_s=max(part.closed_s for part in parts),
        lag_ms=[sum(counts) for counts in zip_longest(*(part.lag_ms for part in parts), fillvalue=0)],
        beat_late_s=[late_s for part in parts for late_s in part.beat_late_s],
        gc_s=[pause_s for part in parts for pause_s in part.gc_s],
        hung=sum(part.hung for part in parts),
        kept=[],
    )


def _mark(marks: Sequence[Mark | None]) -> Mark | None:
    """Where one of them did not come so far, nobody did."""
    if not marks or None in marks:
        return None
    return Mark(
        at_s=sum(mark.at_s for mark in marks) / len(marks),
        frames=sum(mark.frames for mark in marks),
        chunks=sum(mark.chunks for mark in marks),
        process_s=sum(mark.process_s for mark in marks),
        loop_s=sum(mark.loop_s for mark in marks),
    )


def _told(line: Connection, seconds: float) -> Any:
    """What a process says next. Raises MetricsError."""
    try:
        if not line.poll(seconds):
            raise MetricsError(f"a process that plays listeners said nothing for {seconds:g} s")
        said = line.recv()
    except EOFError:
        raise MetricsError("a process that plays listeners has ended: its last words stand above") from None
    if isinstance(said, str):
        raise MetricsError(f"a process that plays listeners failed: {said}")
    return said


def _attend(
    line: Connection, server: Opens, said: Said, plan: list[Visit], times_s: tuple[float, float, float]
) -> None:
    try:
        line.send(True)
        starts_s = line.recv()
        time.sleep(max(0.0, starts_s - time.perf_counter()))
        line.send(attend(server, said, plan, *times_s))
    except Exception as error:
        traceback.print_exc()
        line.send(f"{type(error).__name__}: {error}")
