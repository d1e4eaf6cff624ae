"""How far the work is, for whoever waits."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from mktts.synth.speak_all.manifest import Record

_TERMINAL_S, _LOG_S = 0.5, 30.0  # between two lines


class Progress:
    """Counts records, and says on standard error how many there are, how fast they come and when the last will. Any
    thread may call `kept`.

    counts: sentences by status. audio_s: of all. retried: sentences that took more than one attempt. attempts: that
    were not kept.
    """

    def __init__(self, sentences: int, chars: int, out: TextIO | None = None) -> None:
        """What there is to be spoken."""
        self.counts = {"ok": 0, "unfinished": 0, "failed": 0, "bad": 0}
        self.audio_s = 0.0
        self.retried = self.attempts = 0
        self._sentences, self._chars, self._spoken_chars = sentences, chars, 0
        self._out = out or sys.stderr
        self._every_s = _TERMINAL_S if self._out.isatty() else _LOG_S
        self._begun_s: float | None = None
        self._ended_s: float | None = None
        self._said_s = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The model is there."""
        self._begun_s = self._said_s = time.monotonic()

    @property
    def wall_s(self) -> float:
        """From `begin` to `end`, or until now; 0 before."""
        if self._begun_s is None:
            return 0.0
        return (self._ended_s or time.monotonic()) - self._begun_s

    def kept(self, record: Record, chars: int) -> None:
        """One more. chars: of its text."""
        with self._lock:
            self.counts[record["status"]] += 1
            self.audio_s += record.get("duration_s", 0.0)
            self.retried += bool(record.get("retried"))
            self.attempts += len(record.get("retried", ()))
            self._spoken_chars += chars
            if time.monotonic() - self._said_s >= self._every_s:
                self._said_s = time.monotonic()
                self._say(self.line())

    def line(self) -> str:
        """What is said now."""
        done, wall_s = sum(self.counts.values()), self.wall_s
        words = [
            f"{done} of {self._sentences} sentences",
            f"{self.audio_s / max(wall_s, 1e-9):.1f} s of audio a second",
        ]
        if self._spoken_chars:
            left_s = max(self._chars - self._spoken_chars, 0) / self._spoken_chars * wall_s
            words.append(f"{duration(left_s)} left")
        if self.attempts:
            words.append(f"{self.attempts} tried again")
        words += [f"{self.counts[name]} {name}" for name in ("unfinished", "failed", "bad") if self.counts[name]]
        return ", ".join(words)

    def end(self) -> None:
        """Leaves the terminal's line, and stops the clock."""
        self._ended_s = time.monotonic()
        if self._out.isatty():
            self._say("")

    def _say(self, line: str) -> None:
        whole = f"\r\033[K{line}" if self._out.isatty() else f"{line}\n"
        print(whole, end="", file=self._out, flush=True)


def duration(seconds: float) -> str:
    """ "42 s", "3 min 05 s", "2 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"
