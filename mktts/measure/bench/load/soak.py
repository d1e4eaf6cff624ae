"""Minutes of everything at once, and what must still be true afterwards.

Of the listeners a fifth leave at a random time, one in twenty takes no chunk, one in ten writes its text while it is
spoken; bursts come on top, and other work runs on the device in between. Some readers' codes are kept and made again
when nobody else is there: equal where the engine promises it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from mktts.measure.bench.load.crowd import attend
from mktts.measure.bench.load.point import measured
from mktts.measure.bench.load.settings import Loaded, LoadSettings
from mktts.measure.bench.load.texts import Said
from mktts.measure.bench.load.visits import Habits, Visit, visits

SOAK_S = 360.0
LISTENERS = 1_024
HABITS = Habits(leaving=0.2, never_reading=0.05, feeding=0.1)
BURST, BURST_EVERY_S = 64, 30.0
KEPT = 24  # streams whose codes are compared
_FLAT_DEVICE_MIB = 64.0
_FLAT_HOST_MIB = 256.0  # the crowd keeps a few hundred bytes of each listener
_SETTLED_S = 60.0
_LOOK_EVERY_S = 2.0
_FOREIGN_EVERY_S = 0.5
_FOREIGN_WIDTH = 4_096
_QUIET_S = 60.0  # for the quiet runs together
_MIB = 2**20


def run(settings: LoadSettings, loaded: Loaded, said: Said, listeners: int) -> dict[str, Any]:
    """Soaks for settings.seconds; returns the figures of a point, what was looked at, and `checks` (name -> passed).

    Late text, cancelled streams and foreign work make underruns no failure here: they are reported.
    """
    every = max(1, round(listeners * settings.seconds / 7 / KEPT))
    habits = Habits(HABITS.leaving, HABITS.never_reading, HABITS.feeding, keep_every=every, keep_from_s=settings.warm_s)
    plan = visits(settings, listeners, BURST, max(1, round(settings.seconds / BURST_EVERY_S)), habits)
    end_s = settings.warm_s + settings.seconds
    watch = _Watch(loaded.synthesizer.device)
    seen = attend(loaded.synthesizer, said, plan, settings.warm_s, end_s, end_s + settings.tail_s, watch.until)
    point = measured(seen, settings)
    equal, compared = _equal_codes(loaded, said, seen.kept)
    growth = watch.growth(settings.warm_s + min(_SETTLED_S, settings.seconds / 2), end_s)
    checks = {
        "whole": seen.end is not None,
        "no_error": not point["errors"] and watch.error is None,
        "nothing_hangs": not seen.hung and _still_speaks(loaded, said),
        "device_memory_flat": growth["device_mib"] <= _FLAT_DEVICE_MIB,
        "host_memory_flat": growth["host_mib"] <= _FLAT_HOST_MIB,
        "codes_equal_quiet_runs": 0 < compared == equal or not loaded.deterministic,
    }
    kinds = {kind: sum(visit.kind == kind for visit in plan) for kind in ("reads", "leaves", "never reads", "feeds")}
    return point | {
        "checks": checks,
        "visits": kinds,
        "codes_compared": compared,
        "codes_equal": equal,
        "memory": watch.memory[:: max(1, len(watch.memory) // 60)],
        "memory_growth": growth,
        "foreign_work": watch.foreign,
        "watch_error": watch.error,
    }


def _equal_codes(loaded: Loaded, said: Said, kept: list[tuple[Visit, torch.Tensor, str | None]]) -> tuple[int, int]:
    """How many of the kept streams give the same codes when they are alone, and how many were tried."""
    equal = compared = 0
    begun_s = time.perf_counter()
    for visit, codes, reason in kept:
        if reason not in ("eos", "max_frames") or time.perf_counter() - begun_s > _QUIET_S:
            continue
        text, settings = said.of(visit.index, visit.frames)
        with loaded.synthesizer.stream(text, **settings) as stream:
            stream.read()
            compared += 1
            equal += torch.equal(stream.codes, codes)
    return equal, compared


def _still_speaks(loaded: Loaded, said: Said) -> bool:
    text, settings = said.of(0, 4)
    return len(loaded.synthesizer.say(text, **settings)) > 0


class _Watch:
    """Looks at the memory beside a run, and gives the device other work."""

    def __init__(self, device: torch.device) -> None:
        self.memory: list[dict[str, float]] = []
        self.foreign = 0
        self.error: str | None = None
        self._device = device

    def until(self, done: threading.Event) -> None:
        begun_s, looked_s = time.perf_counter(), -_LOOK_EVERY_S
        try:
            while not done.wait(_FOREIGN_EVERY_S):
                at_s = time.perf_counter() - begun_s
                if self._device.type == "cuda":
                    self._work()
                if at_s - looked_s >= _LOOK_EVERY_S:
                    looked_s = at_s
                    self.memory.append({"at_s": round(at_s, 1), **self._look()})
        except Exception as error:  # of the foreign work: the run goes on
            self.error = f"{type(error).__name__}: {error}"

    def growth(self, settled_s: float, end_s: float) -> dict[str, float]:
        """MiB by which the most of the second half lies above the most of the first half, of [settled_s, end_s)."""
        late = [look for look in self.memory if settled_s <= look["at_s"] < end_s]
        half = len(late) // 2
        if not half:
            return {"device_mib": 0.0, "host_mib": 0.0}
        return {
            name: max(look[name] for look in late[half:]) - max(look[name] for look in late[:half])
            for name in ("device_mib", "host_mib")
        }

    def _work(self) -> None:
        """A product of another program's kind, on a stream of its own: a few ms of the device."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            a = torch.ones(_FOREIGN_WIDTH, _FOREIGN_WIDTH, device=self._device, dtype=torch.bfloat16)
            for _ in range(8):
                a = a @ a * 0
            torch.cuda.current_stream().synchronize()
        self.foreign += 1

    def _look(self) -> dict[str, float]:
        device = 0.0
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            device = (total - free) / _MIB
        return {"device_mib": round(device, 1), "host_mib": round(resident_mib(), 1)}


def resident_mib() -> float:
    """Resident memory of this process now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB
    except (OSError, ValueError):
        return 0.0
