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
    """Keeps `at_once` streams open, the oldest of which is read: (S,) float32 each. A text that cannot be opened ends
    the opening; its error is raised in its turn, so that what comes does not depend on `at_once`."""
    opened = _opened(open_stream, iter(texts), settings)
    streams: deque[Stream | Exception] = deque()
    done = 0
    try:
        streams.extend(islice(opened, at_once))
        while streams:
            oldest = streams[0]
            if isinstance(oldest, Exception):
                raise oldest
            pcm = oldest.read()
            streams.popleft()
            streams.extend(islice(opened, 1))
            done += 1
            if on_done is not None:
                on_done(done)
            yield pcm
    finally:
        for stream in streams:
            if isinstance(stream, Stream):
                stream.cancel()


def _opened(
    open_stream: Callable[[str, Any], Stream], texts: Iterator[str], settings: Any
) -> Iterator[Stream | Exception]:
    """A stream for each text; the error of the first that cannot be opened, or taken from `texts`, is the last."""
    try:
        for text in texts:
            yield open_stream(text, settings)
    except Exception as error:
        yield error
