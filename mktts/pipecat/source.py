"""Where a service's speech comes from: the protocol, and the source that asks a synthesizer in this process."""

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
    """How to say something; fixed for one utterance.

    voice: a speaker's name (CustomVoice), the path of a file made by `Voice.save` (Base), or None (VoiceDesign).
    sampling, seed: None leaves them to the source."""

    voice: str | None = None
    language: str = "auto"
    instruct: str | None = None
    sampling: Sampling | None = None
    seed: int | None = None


class Speech(AsyncIterator[bytes]):
    """One utterance: an async iterator of pieces of mono 16-bit little-endian PCM, each as soon as it is made.

    The iterator raises what ended the utterance, unless that was `cancel`. `feed` and `finish` are for one whose text
    is still being written; no call waits: what cannot go out yet is kept."""

    finish_reason: FinishReason | None

    def cancel(self) -> None:
        """Ends the generation within one frame and returns at once; no piece comes after this. Idempotent."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None:
        """No more text comes."""


class SpeechSource(Protocol):
    """What a service speaks through. One source may serve many services, and many utterances at once.

    name: of the model, as metrics show it. sample_rate_hz: of the PCM. default_voice: spoken with when none is set."""

    name: str
    sample_rate_hz: int
    default_voice: str | None

    async def connect(self) -> None:
        """A service begins to use this source. Must stay well below Pipecat's limit for its set-up, 20 s.

        `name`, `sample_rate_hz` and what `check` knows may change here. Where it raises, no `disconnect` follows."""

    async def disconnect(self) -> None:
        """A service is done with this source. What several services share stays open."""

    def check(self, style: Style) -> None:
        """Raises what is known to be wrong with `style` without speaking: PromptError, VoiceError."""

    def spoken(self, word: str, style: Style) -> str:
        """A word of a text as it will be heard, as far as that is known: its length stands for its duration."""
        return word

    async def speak(self, text: str, style: Style) -> Speech: ...

    async def open(self, style: Style) -> Speech:
        """Starts an utterance whose text comes later."""


class LocalSpeech(Speech):
    """A `Stream` or a `Session` as a `Speech`."""

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
        except TextError:  # nothing visible was fed: nothing to say, and no failure in a conversation
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
    """Speech from a synthesizer in this process. Its worker thread gives every open utterance one frame a turn.

    The caller that loaded the synthesizer closes it; nothing here does."""

    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(
        self,
        synthesizer: Synthesizer,
        name: str | None = None,
        options: StreamOptions | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`name`: of the model; None takes the folder of the checkpoint. `options`: of every utterance; None takes
        markup out of its text. `layout`: of the prompts of `speak`, None for the checkpoint's; "streaming" leaves no
        prompt to compute before the first frame. What `open` gives is in the streaming layout in any case."""
        self._synthesizer = synthesizer
        self._options = options or StreamOptions(markup="strip")
        self._layout = layout
        # The same object every time: the codec's state after a reference is kept by the identity of its codes.
        self._voice = lru_cache(maxsize=8)(Voice.load)
        checkpoint = synthesizer.checkpoint
        self.name = name or (checkpoint.folder.name if checkpoint else "qwen3-tts")
        self.default_voice = checkpoint.config.default_speaker if checkpoint else None

    def check(self, style: Style) -> None:
        self._synthesizer.open(**self._stream_settings(style)).cancel()  # never fed, so that no prompt is built

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
    Do not close what this returns: `close_shared_synthesizers` does. Raises as `Synthesizer.load`."""
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
