"""One synthesizer per process for everyone who asks for the same model.

A pipeline is built for every caller, and a model is far too large to be loaded for each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from pathlib import Path

import torch

from mktts.checkpoint import Checkpoint
from mktts.synth import Synthesizer
from mktts.synth.synthesizer import BackendName

_loaded: dict[Hashable, Synthesizer] = {}
_loading = threading.Lock()  # held while loading: a second caller of the same model waits for the first


def shared_synthesizer(
    checkpoint: Checkpoint | str | Path,
    *,
    backend: BackendName = "auto",
    device: str = "auto",
    dtype: torch.dtype | None = None,
) -> Synthesizer:
    """The process's synthesizer for these arguments of `Synthesizer.load`, loaded and warmed up at the first call.

    Blocks while it loads; from an event loop with other work, `await asyncio.to_thread(shared_synthesizer, ...)`.
    A failed load is forgotten. A forked child loads its own, because the worker thread stays in the parent.
    Do not close what this returns: `close_shared_synthesizers` does. Raises as `Synthesizer.load`.
    """
    source = checkpoint.folder if isinstance(checkpoint, Checkpoint) else str(checkpoint)
    key = (os.getpid(), source, backend, device, dtype)
    with _loading:
        if key not in _loaded:
            synthesizer = Synthesizer.load(checkpoint, backend=backend, device=device, dtype=dtype)
            try:
                synthesizer.warm_up()
            except BaseException:
                synthesizer.close()
                raise
            _loaded[key] = synthesizer
        return _loaded[key]


def close_shared_synthesizers() -> None:
    """Ends every utterance on the shared synthesizers and lets go of their models. The next call loads again."""
    with _loading:
        while _loaded:
            _, synthesizer = _loaded.popitem()
            synthesizer.close()
