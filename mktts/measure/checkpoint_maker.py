"""Makes random checkpoints in child processes while this one measures: the large ones take half a minute each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from mktts.common import python_path

_AT_ONCE = 3  # each holds a whole checkpoint in memory
_OPEN = {
    "speech": "import sys; from mktts.checkpoint.open import open_checkpoint; open_checkpoint(sys.argv[1])",
    "text": "import sys; from mktts.llm.checkpoint import open_text_checkpoint; open_text_checkpoint(sys.argv[1])",
}


class CheckpointMaker:
    """Begins at once with the `speech` and then the `text` sources, in order; only "random:..." ones are made.

    A failure is not reported here: whoever opens the source meets it then.
    """

    def __init__(self, speech: Iterable[str], text: Iterable[str] = ()) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._made: dict[tuple[str, str], Future] = {}
        for kind, sources in (("speech", speech), ("text", text)):
            for source in sources:
                if source.startswith("random:") and (kind, source) not in self._made:
                    self._made[kind, source] = self._pool.submit(_make, kind, source)
        self._pool.shutdown(wait=False)

    def wait(self, source: str, kind: str = "speech") -> None:
        """Waits until `source` is made or has failed; returns at once for one that was never asked for."""
        if (kind, source) in self._made:
            self._made[kind, source].result()


def _make(kind: str, source: str) -> None:
    subprocess.run(
        [sys.executable, "-c", _OPEN[kind], source],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **python_path()},
    )
