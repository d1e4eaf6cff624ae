"""The text of one utterance as a row of segments: known at the start, or fed while it is being spoken.

A script is the only meeting place of the thread that writes text and the worker that speaks it: `feed` and `finish`
may come from any thread, everything else belongs to the worker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from mktts.model.prompt import Request
from mktts.model.voice import Voice
from mktts.text.split import FeedSplitter, split_text

_END = object()


class Script:
    """Hands out one prompt a segment. started_s: perf_counter of the call that timings count from. voice: of all."""

    started_s: float
    voice: Voice | None

    def feed(self, piece: str) -> None:
        """More text, cleaned. Any thread. Known text takes none."""
        raise NotImplementedError

    def finish(self) -> None:
        """No more text comes. Any thread."""
        raise NotImplementedError

    def next_segment(self) -> Any | None:
        """The next segment's prompt, ready to prefill, or None: not written yet, or none left (`ended`)."""
        raise NotImplementedError

    def ended(self) -> bool:
        """Whether every segment has been handed out and no more text can come."""
        raise NotImplementedError

    def update(self) -> None:
        """Passes on what has been fed since the last call."""

    def leave_segment(self) -> None:
        """The present segment has been spoken: text that comes from now on belongs to a new one."""


class WholeScript(Script):
    """Text that is known: `build` makes a prompt of each request when its turn comes."""

    def __init__(self, requests: Sequence[Request], build: Callable[[Request], Any], started_s: float) -> None:
        self.started_s, self.voice = started_s, requests[0].voice
        self._requests = deque(requests)
        self._build = build

    def next_segment(self) -> Any | None:
        return self._build(self._requests.popleft()) if self._requests else None

    def ended(self) -> bool:
        return not self._requests


class _Inbox(Script):
    """What reaches the worker from the writing thread: cleaned pieces of text, then the end."""

    def __init__(self, request: Request) -> None:
        self.started_s, self.voice = time.perf_counter(), request.voice
        self._pieces: SimpleQueue[Any] = SimpleQueue()
        self._finished = False

    def feed(self, piece: str) -> None:
        self._pieces.put(piece)

    def finish(self) -> None:
        self._pieces.put(_END)

    def update(self) -> None:
        while True:
            try:
                piece = self._pieces.get_nowait()
            except Empty:
                return
            if piece is _END:
                self._finished = True
                self._end()
            else:
                self._take(piece)

    def _take(self, piece: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class FedScript(_Inbox):
    """Text that is spoken while it is written: each segment is a prompt that waits for its text.

    `open_prompt` makes a `FedPrompt` of a request with no text yet.
    """

    def __init__(self, request: Request, open_prompt: Callable[[Request], Any], max_chars: int) -> None:
        super().__init__(request)
        self._request = replace(request, text="")
        self._open_prompt = open_prompt
        self._splitter = FeedSplitter(max_chars)
        self._written: Any | None = None  # the prompt that text goes to
        self._waiting: deque[Any] = deque()  # prompts whose turn to be spoken has not come, the written one included

    def next_segment(self) -> Any | None:
        return self._waiting.popleft() if self._waiting and self._waiting[0].ready else None

    def ended(self) -> bool:
        return self._finished and not self._waiting

    def leave_segment(self) -> None:
        if self._written is not None and not self._waiting:  # the spoken one is the one being written
            self._written = None

    def _take(self, piece: str) -> None:
        first, *others = self._splitter.push(piece)
        self._write(first)
        for text in others:
            self._end()
            self._write(text)

    def _write(self, text: str) -> None:
        if self._written is None:
            if not text.strip():
                return
            self._written = self._open_prompt(self._request)
            self._waiting.append(self._written)
        self._written.push(text)

    def _end(self) -> None:
        if self._written is not None:
            self._written.close()
            self._written = None


class CollectedScript(_Inbox):
    """Text that is collected until its end and then cut like known text: for a model that cannot wait for text."""

    def __init__(self, request: Request, max_chars: int, build: Callable[[Request], Any]) -> None:
        super().__init__(request)
        self._request = request
        self._max_chars, self._build = max_chars, build
        self._text = ""
        self._requests: deque[Request] = deque()

    def next_segment(self) -> Any | None:
        return self._build(self._requests.popleft()) if self._requests else None

    def ended(self) -> bool:
        return self._finished and not self._requests

    def _take(self, piece: str) -> None:
        self._text += piece

    def _end(self) -> None:
        pieces = split_text(self._text.strip(), self._max_chars)
        self._requests.extend(replace(self._request, text=piece) for piece in pieces)
