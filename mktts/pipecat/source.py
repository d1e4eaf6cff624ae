"""Sources of speech for a service: the protocol, and the source that uses a synthesizer in this process."""

import os
import threading
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from mktts.checkpoint import Checkpoint
from mktts.engine.options import FinishReason, StreamOptions
from mktts.engine.stream import Session, Stream
from mktts.errors import EngineError, TextError
from mktts.model.prompt import Layout
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth.synthesizer import BackendName, StreamSettings, Synthesizer


@dataclass(frozen=True)
class Style:
    """The voice and delivery of one utterance.

    voice: a speaker's name (CustomVoice), the path of a file made by `Voice.save` (Base), or None (VoiceDesign).
    sampling, seed: None uses the source's defaults."""

    voice: str | None = None
    language: str = "auto"
    instruct: str | None = None
    sampling: Sampling | None = None
    seed: int | None = None


class Speech(AsyncIterator[bytes]):
    """One utterance: an async iterator of chunks of mono 16-bit little-endian PCM, each as soon as it is generated.

    The iterator raises the error that ended the utterance, if there was one. `feed` and `finish` are for text that is
    still being written. They do not block: text that cannot be sent yet is queued."""

    finish_reason: FinishReason | None

    def cancel(self) -> None:
        """Ends the generation within one frame and returns at once; no chunk follows. Idempotent."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None:
        """Marks the end of the text."""


class SpeechSource(Protocol):
    """The speech synthesis behind a service. One source may serve many services and many concurrent utterances.

    name: of the model, for metrics. sample_rate_hz: of the PCM. default_voice: used if no voice is set."""

    name: str
    sample_rate_hz: int
    default_voice: str | None

    async def connect(self) -> None:
        """Called when a service begins to use this source. Must take much less than Pipecat's set-up limit of 20 s.

        May change `name`, `sample_rate_hz` and what `check` knows. If it raises, `disconnect` is not called."""

    async def disconnect(self) -> None:
        """Called when a service stops using this source. Resources that several services share stay open."""

    def check(self, style: Style) -> None:
        """Raises PromptError or VoiceError if `style` is known to be invalid, without speaking."""

    def spoken(self, word: str, style: Style) -> str:
        """A word as it will be spoken, as far as that is known; its length serves as an estimate of its duration."""
        return word

    async def speak(self, text: str, style: Style) -> Speech: ...

    async def open(self, style: Style) -> Speech:
        """Starts an utterance whose text is fed later."""


class LocalSpeech(Speech):
    """Adapts a `Stream` or a `Session` to `Speech`."""

    def __init__(self, stream: Stream | Session) -> None:
        self._stream = stream
        self._cancelled = False

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    def feed(self, text: str) -> None:
        self._stream.feed(text)

    def finish(self) -> None:
        try:
            self._stream.finish()
        except TextError:  # only blank text was fed: nothing to say, which is no failure in a conversation
            self.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        self._stream.cancel()

    async def __anext__(self) -> bytes:
        try:
            return (await anext(self._stream)).pcm16
        except StopAsyncIteration:
            if self._stream.finish_reason == "cancelled" and not self._cancelled:
                raise EngineError("the synthesizer was closed in the middle of an utterance: load another") from None
            raise


class LocalSource(SpeechSource):
    """Speech from a synthesizer in this process, which interleaves open utterances frame by frame.

    The caller that loaded the synthesizer closes it; this class does not."""

    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(
        self,
        synthesizer: Synthesizer,
        name: str | None = None,
        options: StreamOptions | None = None,
        layout: Layout | None = None,
    ) -> None:
        """name: of the model; None takes the name of the checkpoint's folder. options: of every utterance; None only
        strips markup. layout: of prompts of `speak`; None takes the checkpoint's. "streaming" starts sooner, as
        no prompt is computed before the first frame. `open` always uses the streaming layout."""
        self._synthesizer = synthesizer
        self._options = options or StreamOptions(markup="strip")
        self._layout = layout
        # Returns the same object each time: the codec's state after a reference is cached by its codes' identity.
        self._voice = lru_cache(maxsize=8)(Voice.load)
        checkpoint = synthesizer.checkpoint
        self.name = name or (checkpoint.folder.name if checkpoint else "qwen3-tts")
        self.default_voice = checkpoint.config.default_speaker if checkpoint else None

    def check(self, style: Style) -> None:
        self._synthesizer.open(**self._stream_settings(style)).cancel()  # without text, no prompt is built

    def spoken(self, word: str, style: Style) -> str:
        return self._synthesizer.spoken(word, style.language or "auto")

    async def speak(self, text: str, style: Style) -> LocalSpeech:
        return LocalSpeech(self._synthesizer.stream(text, layout=self._layout, **self._stream_settings(style)))

    async def open(self, style: Style) -> LocalSpeech:
        return LocalSpeech(self._synthesizer.open(**self._stream_settings(style)))

    def _stream_settings(self, style: Style) -> StreamSettings:
        checkpoint = self._synthesizer.checkpoint
        cloned = style.voice is not None and checkpoint is not None and checkpoint.config.type.clones
        return {
            "language": style.language,
            "speaker": None if cloned else style.voice,
            "voice": self._voice(style.voice) if cloned else None,
            "instruct": style.instruct,
            "sampling": style.sampling,
            "seed": style.seed,
            "options": self._options,
        }


_loaded: dict[Hashable, Synthesizer] = {}
_loading = threading.Lock()  # held while loading, so that a second caller waits for the first


def shared_synthesizer(
    checkpoint: Checkpoint | str | Path,
    *,
    backend: BackendName = "auto",
    device: str = "auto",
    dtype: torch.dtype | None = None,
) -> Synthesizer:
    """The process's synthesizer for these arguments of `Synthesizer.load`. The first call loads it and warms it up.

    Blocks while it loads; on an event loop use `await asyncio.to_thread(shared_synthesizer, ...)`. After a failed load
    the next call tries again. A forked child loads its own, because the worker thread stays in the parent.
    Do not close the synthesizer: `close_shared_synthesizers` does. Raises as `Synthesizer.load`."""
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
    """Ends all utterances of the shared synthesizers and releases their models; `shared_synthesizer` loads again."""
    with _loading:
        while _loaded:
            _, synthesizer = _loaded.popitem()
            synthesizer.close()
