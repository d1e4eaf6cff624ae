"""Many texts at once: their PCM in order, or each result as soon as it is complete."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from mktts.engine.stream import NO_PCM, Stream
from mktts.errors import EngineError

OpenStream = Callable[[str, Any], Stream]


class SayRequest(NamedTuple):
    """A text to say, with settings of its own, as for `Synthesizer.stream`. name: the caller's, for any purpose."""

    text: str
    settings: Any
    name: Any = None


class SayResult(NamedTuple):
    """The result of one request. stream: None where it could not be opened. pcm: (S,) float32, empty with an error."""

    asked: SayRequest
    stream: Stream | None
    pcm: np.ndarray = NO_PCM
    error: Exception | None = None


def whole(stream: Stream | Exception) -> np.ndarray:
    """All PCM (S,) float32 of a stream. Raises the error that ended it, and EngineError where it was cut off."""
    if isinstance(stream, Exception):
        raise stream
    pcm = stream.read()
    if stream.finish_reason == "cancelled":
        raise EngineError("the synthesizer was closed while this was spoken: load another one")
    return pcm


def say_many(open_stream: OpenStream, texts: Iterable[str], settings: Any, at_once: int) -> Iterator[np.ndarray]:
    """Yields the PCM (S,) float32 of each text, in order. A text that cannot be opened is the last that is tried; its
    error is raised when its turn comes, so that what is yielded does not depend on `at_once`."""
    opened: deque[Stream | Exception] = deque()

    def opening() -> Iterator[Stream | Exception]:
        try:
            for text in texts:
                yield open_stream(text, settings)
        except Exception as error:
            yield error

    source = opening()
    try:
        opened.extend(islice(source, at_once))
        while opened:
            pcm = whole(opened[0])
            opened.popleft()
            opened.extend(islice(source, 1))  # before the caller works on this PCM
            yield pcm
    finally:
        for stream in opened:
            if isinstance(stream, Stream):
                stream.cancel()


def say_each(open_stream: OpenStream, ask: Callable[[], SayRequest | None], at_once: int) -> Iterator[SayResult]:
    """Keeps `at_once` streams open and yields each as soon as it is over; an error belongs to its text alone.

    ask: returns the next request, or None if there is none for now: it is called again after each result. Errors that
    it raises pass through. Leaving the iterator ends the open streams."""
    over: SimpleQueue[int] = SimpleQueue()
    waiting: dict[int, SayResult] = {}  # by number
    numbers = count()

    def fill() -> None:
        while len(waiting) < at_once and (asked := ask()) is not None:
            number = next(numbers)
            try:
                waiting[number] = SayResult(asked, open_stream(asked.text, asked.settings))
                waiting[number].stream.when_over(partial(over.put, number))
            except Exception as error:
                waiting[number] = SayResult(asked, None, error=error)
                over.put(number)

    try:
        fill()
        while waiting:
            said = waiting.pop(over.get(), None)
            if said is None:  # a stream that ended during `when_over` may be in the queue twice
                continue
            if said.stream is not None:
                try:
                    said = said._replace(pcm=whole(said.stream))
                except Exception as error:
                    said = said._replace(error=error)
            fill()  # before the caller works on this result
            yield said
            fill()  # with what the caller asks for in response
    finally:
        for said in waiting.values():
            if said.stream is not None:
                said.stream.cancel()
