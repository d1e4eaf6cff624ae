"""An utterance's text as a sequence of segments, known or fed while it is spoken; the worker's, except for `feed`."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mktts.model.prompt import Request
from mktts.model.voice import Voice
from mktts.text.parts import Pause
from mktts.text.split import FeedSplitter, split_text


def cut(request: Request, parts: Iterable[str | Pause | Request], max_chars: int) -> list[Request | Pause]:
    """Cuts a known text into a request for each segment, and pauses. parts: a request in it speaks what follows it."""
    cut_parts: list[Request | Pause] = []
    words = ""
    for part in (*parts, Pause(0)):
        if isinstance(part, str):
            words += part
            continue
        cut_parts += [replace(request, text=piece) for piece in split_text(words.strip(), max_chars)]
        words = ""
        if isinstance(part, Pause):
            cut_parts.append(part)
        else:
            request = part
    return cut_parts[:-1]


class Script:
    """A text that is known: gives one prompt a segment."""

    def __init__(self, parts: Iterable[Request | Pause], runner: Any, started_s: float) -> None:
        """parts: a checked request for each segment, and pauses. runner: makes the prompt of each when its turn comes.
        started_s: perf_counter of the call from which timings count."""
        self.started_s = started_s
        self._parts: deque[Any] = deque(parts)  # those whose turn has not come
        self._build, self._finished = runner.build, True

    def next_segment(self) -> tuple[Any | None, Voice | None, int | None]:
        """Returns the next segment's prompt, ready to prefill, and its voice: None while it is not written yet, or if
        none is left (`ended`); and the samples of silence before it, or if none is left, after the last; None for no
        pause. Called when the segment before has been spoken: text that comes later belongs to a new one."""
        parts, silent_samples = self._parts, None
        while parts and isinstance(parts[0], Pause):
            silent_samples = (silent_samples or 0) + parts.popleft().samples
        prompt = self._build(parts[0]) if parts else None
        return prompt, None if prompt is None else parts.popleft().voice, silent_samples

    @property
    def ended(self) -> bool:
        """Whether every segment has been handed out and no more text can come."""
        return self._finished and not self._parts


class FedScript(Script):
    """A text that is fed while it is spoken: each segment is a prompt that waits for its text."""

    def __init__(self, request: Request, runner: Any, max_chars: int, texts: Iterable[Any] = ()) -> None:
        """request: checked, without text. max_chars: of a segment. texts: as `feed` takes them."""
        super().__init__((), runner, time.perf_counter())
        self._prompts = prompts = deque()  # those of the requests in `_parts`
        self._build = lambda _: prompts.popleft() if prompts[0].ready else None
        self._pieces: deque[Any] = deque(texts)  # from the thread that writes
        self._finished = False
        self._request = replace(request, text="")
        self._open_prompt, self._max_chars = runner.open_prompt, max_chars
        self._splitter = FeedSplitter(max_chars)
        self._written: Any | None = None  # the prompt that new text is added to

    def feed(self, *pieces: str | Pause | Request | None) -> None:
        """Adds text, cleaned; a pause; a request without text, which speaks what follows; None: the end. Any thread."""
        self._pieces.extend(pieces)

    def next_segment(self) -> tuple[Any | None, Voice | None, int | None]:
        if not self._parts:  # the prompt that text was added to has been spoken
            self._written = None
        self.update()
        return super().next_segment()

    def update(self) -> None:
        while self._pieces:
            piece = self._pieces.popleft()
            if isinstance(piece, str):
                first, *others = self._splitter.push(piece)
                self._write(first)
                for text in others:
                    self._end()
                    self._write(text)
                continue
            self._end()
            self._splitter = FeedSplitter(self._max_chars)
            if piece is None:
                self._finished = True
            elif isinstance(piece, Pause):
                self._parts.append(piece)
            else:
                self._request = piece

    def _write(self, text: str) -> None:
        if self._written is None:
            if not text.strip():
                return
            self._written = self._open_prompt(self._request)
            self._prompts.append(self._written)
            self._parts.append(self._request)
        self._written.push(text)

    def _end(self) -> None:
        if self._written is not None:
            self._written.close()
            self._written = None
