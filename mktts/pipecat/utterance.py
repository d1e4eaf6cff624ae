"""One generation on its way into an audio context: its text, its speech, and when its words are heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mktts.pipecat.source import FedSpeech, Speech
from mktts.pipecat.words import Heard, Pace, WordTimes


class Utterance:
    """What a service has in hand between the text of a sentence, or of a turn, and the last of its audio.

    over: nothing more comes out of it; text that still arrives goes unspoken. cut_short: it ended before its text did.
    task: what takes the audio of a fed utterance, None where `run_tts` does.
    """

    def __init__(self, pace: Pace, spoken: Callable[[str], str] | None = None) -> None:
        """spoken: see `WordTimes`."""
        self.words = WordTimes(pace, spoken)
        self.heard = Heard()
        self.speech: Speech | None = None
        self.task: asyncio.Task[None] | None = None
        self.finished = False
        self.over = False
        self.cut_short = False
        self._fed: FedSpeech | None = None
        self._unsent: list[str] = []  # written before the speech was open

    def feed(self, text: str) -> None:
        """Adds text. Raises as the source's `feed`."""
        self.words.feed(text, self.heard.made_s)
        if self._fed is None:
            self._unsent.append(text)
        elif not self.over:
            self._fed.feed(text)

    def finish(self) -> None:
        """No more text comes."""
        self.words.finish()
        self.finished = True
        if self._fed is not None:
            self._fed.finish()

    def attach(self, speech: FedSpeech) -> None:
        """From now on text goes straight into `speech`."""
        self.speech = self._fed = speech
        for text in self._unsent:
            speech.feed(text)
        self._unsent.clear()
        if self.finished:
            speech.finish()

    def end(self) -> None:
        """Stops the generation, if it runs, without waiting for it."""
        self.over = True
        if self.speech is not None:
            self.speech.cancel()
