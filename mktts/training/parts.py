"""Parts of a training run as processes of their own: one that fails is tried again another way, the others go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def command(*words: object) -> list[str]:
    """`python -m mktts train WORD...` in this Python."""
    return [sys.executable, "-m", "mktts", "train", *map(str, words)]


class Part:
    """One command with its log; where it fails, the next of its attempts is started."""

    def __init__(self, name: str, logs: Path, attempts: Sequence[Callable[[], list[str]]]) -> None:
        """attempts: each gives a command when its turn comes (what time is left is known then only)."""
        self.name, self.log = name, logs / f"{name}.log"
        self._attempts, self._tried = list(attempts), 0
        self._process: subprocess.Popen | None = None
        self._began_s = time.monotonic()
        self.seconds = 0.0
        self._next()

    @property
    def state(self) -> str:
        """running, done or failed; a part that failed and has attempts left is started again by looking."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return "running"
            self.seconds = time.monotonic() - self._began_s
            self._process = None
            if code:
                with self.log.open("a") as log:
                    log.write(f"-- exit status {code}\n")
                return "running" if self._next() else "failed"
            self._tried = -1
        return "done" if self._tried == -1 else "failed"

    @property
    def running(self) -> bool:
        return self.state == "running"

    def wait(self, until_s: float, every_s: float = 0.2) -> bool:
        """Whether it is done before the monotonic clock says `until_s`."""
        while self.running and time.monotonic() < until_s:
            time.sleep(every_s)
        return self.state == "done"

    def stop(self) -> None:
        """Ends it, if it runs, and tries nothing else."""
        self._tried = len(self._attempts)
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _next(self) -> bool:
        if self._tried >= len(self._attempts):
            return False
        words = self._attempts[self._tried]()
        self._tried += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            log.write(f"-- {' '.join(words)}\n")
            log.flush()
            self._process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        return True
