"""Many texts at once: in their order, or each as soon as it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from mktts.speech.stream import Stream


class Asked(NamedTuple):
    """A text to say, with settings of its own as of `Synthesizer.stream`. name: whatever the caller knows it by."""

    text: str
    settings: Any
    name: Any = None


class Said(NamedTuple):
    """What became of it. stream: None where it could not be opened. pcm: (S,) float32, empty beside an `error`."""

    asked: Asked | None
    stream: Stream | None
    pcm: np.ndarray
    error: Exception | None = None


def say_many(
    open_stream: Callable[[str, Any], Stream],
    texts: Iterable[str],
    settings: Any,
    on_done: Callable[[int], None] | None,
    at_once: int,
) -> Iterator[np.ndarray]:
    """The PCM (S,) float32 of each text, in order. A text that cannot be opened ends the opening; its error is raised
    in its turn, so that what comes does not depend on `at_once`."""
    asked = (Asked(text, settings) for text in texts)
    said = say_each(open_stream, partial(next, asked, None), at_once, in_turn=True)
    try:
        for done, one in enumerate(said, 1):
            if one.error is not None:
                raise one.error
            if on_done is not None:
                on_done(done)
            yield one.pcm
    finally:
        said.close()


def say_each(
    open_stream: Callable[[str, Any], Stream], ask: Callable[[], Asked | None], at_once: int, in_turn: bool = False
) -> Iterator[Said]:
    """Keeps `at_once` streams open. in_turn: hands them out in the order in which they were asked for, and asks for no
    more once one could not be opened; otherwise each as soon as it is over, and an error is that text's alone.

    ask: gives the next one; None where there is none for now: it is asked again after each that was handed out, and all
    is over once it has none and nothing is open. What `ask` raises is handed out as the last one's error in turn, and
    raised at once otherwise. Leaving the iterator ends the streams that are open.
    """
    over: SimpleQueue[int] = SimpleQueue()
    waiting: dict[int, Said] = {}  # by number, in the order of opening
    number, open_to_more = 0, True

    def fill() -> None:
        nonlocal number, open_to_more
        while open_to_more and len(waiting) < at_once:
            said = _opened(open_stream, ask, in_turn)
            if said is None:
                return
            number += 1
            waiting[number] = said
            open_to_more = not (in_turn and said.error)
            if said.stream is None:
                over.put(number)
            elif not in_turn:
                said.stream.when_over(partial(over.put, number))

    try:
        fill()
        while waiting:
            turn = next(iter(waiting)) if in_turn else over.get()
            if turn not in waiting:  # a stream that ended while it was asked may have said so twice
                continue
            said = _read(waiting[turn])
            del waiting[turn]
            fill()  # before the caller does anything with what it gets
            yield said
            fill()  # what it asks for again because of that
    finally:
        for said in waiting.values():
            if said.stream is not None:
                said.stream.cancel()


_NOTHING = np.zeros(0, np.float32)


def _opened(open_stream: Callable[[str, Any], Stream], ask: Callable[[], Asked | None], in_turn: bool) -> Said | None:
    asked = None
    try:
        asked = ask()
        return None if asked is None else Said(asked, open_stream(asked.text, asked.settings), _NOTHING)
    except Exception as error:
        if asked is None and not in_turn:
            raise
        return Said(asked, None, _NOTHING, error)


def _read(said: Said) -> Said:
    if said.stream is None:
        return said
    try:
        return said._replace(pcm=said.stream.read())
    except Exception as error:
        return said._replace(error=error)
