"""Many texts at once, their sound in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from mktts.speech.stream import Stream


def say_many(
    open_stream: Callable[[str, Any], Stream],
    texts: Iterable[str],
    settings: Any,
    on_done: Callable[[int], None] | None,
    at_once: int,
) -> Iterator[np.ndarray]:
    """Keeps `at_once` streams open, the oldest of which is read: (S,) float32 each."""
    left = iter(texts)
    streams = deque(open_stream(text, settings) for text in islice(left, at_once))
    done = 0
    try:
        while streams:
            pcm = streams[0].read()
            streams.popleft()
            streams.extend(open_stream(text, settings) for text in islice(left, 1))
            done += 1
            if on_done is not None:
                on_done(done)
            yield pcm
    finally:
        for stream in streams:
            stream.cancel()
