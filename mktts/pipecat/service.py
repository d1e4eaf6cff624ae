"""The Pipecat service: turns sentences, or an LLM's tokens as they arrive, into audio frames as they are generated."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from loguru import logger
from pipecat.audio.utils import create_stream_resampler
from pipecat.frames import frames
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, NotGiven, assert_given

from mktts import errors
from mktts.audio import from_pcm16
from mktts.checkpoint import DEFAULT_CHECKPOINT, Checkpoint
from mktts.engine.metrics import Player
from mktts.engine.options import StreamOptions, WordTime
from mktts.engine.words import WordTimes
from mktts.model.prompt import Layout
from mktts.model.sampling import Sampling
from mktts.pipecat.source import LocalSource, Speech, SpeechSource, Style, shared_synthesizer
from mktts.spec import LANGUAGE_CODES
from mktts.synth.synthesizer import BackendName
from mktts.text.front_end import AUTO, ENGLISH
from mktts.text.lexicon import respelled
from mktts.text.parts import TextFeed
from mktts.text.words import is_wide

_SAMPLE_BYTES = 2
_GUARD_S = 0.02  # silence sent for text that makes no sound, as Pipecat takes a context without audio for a failure
_QUIET_S = 10.0  # a context without audio for this long is over; a large model on a CPU may exceed Pipecat's 3 s
# By exception: the error's category, and whether the service is unusable until its settings change. Text that cannot
# be spoken, and a server that is lost or busy, leave the service usable, as the next sentence may succeed. Settings
# that do not fit the checkpoint make it unusable.
_FAILURES: dict[type[Exception], tuple[ErrorCategory, bool]] = {
    errors.BusyError: (ErrorCategory.RATE_LIMIT, False),
    errors.ConnectionLost: (ErrorCategory.SERVER, False),
    errors.TextError: (ErrorCategory.APPLICATION, False),
    errors.CapacityError: (ErrorCategory.APPLICATION, False),
    errors.PromptError: (ErrorCategory.INVALID_REQUEST, True),
    errors.VoiceError: (ErrorCategory.INVALID_REQUEST, True),
    errors.SamplingError: (ErrorCategory.INVALID_REQUEST, True),
    errors.OptionsError: (ErrorCategory.INVALID_REQUEST, True),
    errors.AccessError: (ErrorCategory.AUTHENTICATION, True),
    Exception: (ErrorCategory.SERVER, True),  # a failed engine: after a CUDA error all later calls fail, too
}


@dataclass
class MkttsTTSSettings(TTSSettings):
    """Settings for MkttsTTSService. A change takes effect with the next utterance.

    voice: a speaker's name (CustomVoice), or the path of a saved voice (Base). None takes the first speaker.
    language: a ``Language``, one of the model's names ("english"), or "auto".
    instruct: how to speak, in words, for checkpoints that take instructions.
    sampling: how codes are drawn; None takes the checkpoint's own settings.
    seed: makes the audio of a text reproducible; None draws a new one for every utterance."""

    instruct: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    sampling: Sampling | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    seed: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)

    _aliases: ClassVar[dict[str, str]] = {"speaker": "voice"}

    @property
    def style(self) -> Style:
        """The style of one utterance with these settings, all of which must be given."""
        return Style(
            voice=assert_given(self.voice),
            language=str(assert_given(self.language) or AUTO),
            instruct=assert_given(self.instruct),
            sampling=assert_given(self.sampling),
            seed=assert_given(self.seed),
        )


@dataclass
class SpeechFailedFrame(frames.ErrorFrame):
    """Reports an utterance that ended before its text did. It is queued in the audio context after all audio that was
    spoken; text after it was not spoken.

    context_id: the audio context with unspoken text. permanent: whether the service is unusable until its settings
    change."""

    context_id: str | None = None
    permanent: bool = False


def speech_failed(error: Exception, context_id: str) -> SpeechFailedFrame:
    """The frame that reports an utterance's exception."""
    category, permanent = next(found for kind, found in _FAILURES.items() if isinstance(error, kind))
    what = f"Speech failed: {type(error).__name__}: {error}"
    return SpeechFailedFrame(what, exception=error, category=category, context_id=context_id, permanent=permanent)


class SpokenText:
    """The state of one utterance, a sentence or a whole turn, from its text to its last audio.

    words: estimates the time of each word in the audio. made_s: duration of the audio so far. finished: whether the
    text is complete. over: no more audio follows; text that still arrives is not spoken. cut_short: it ended before its
    text did. task: reads the audio of a fed utterance; None if `run_tts` does."""

    def __init__(self, spoken: Callable[[str], str], sample_rate_hz: int) -> None:
        self.words = WordTimes(TextFeed(lambda name: None), spoken, sample_rate_hz)
        self.made_s = 0.0
        self._pieces: list[tuple[float, float]] = []  # of each chunk: its offset in the audio, and when it is heard
        self.speech: Speech | None = None
        self.task: asyncio.Task[None] | None = None
        self.finished = False
        self.over = False
        self.cut_short = False
        self._unsent: list[str] = []  # text that arrived before the speech was open

    def add_audio(self, duration_s: float, begin_s: float) -> None:
        """Adds a chunk of audio that is heard from `begin_s` on; with a slow engine there are pauses between chunks."""
        self._pieces.append((self.made_s, begin_s))
        self.made_s += duration_s

    def heard_at(self, offset_s: float) -> float:
        """The time at which the sample at `offset_s` in the audio is heard."""
        piece_s, begin_s = self._pieces[bisect_right(self._pieces, offset_s, key=itemgetter(0)) - 1]
        return begin_s + offset_s - piece_s

    def feed(self, text: str) -> None:
        """Adds text. Raises as the source's `feed`."""
        self.words.feed(text)
        if self.speech is None:
            self._unsent.append(text)
        elif not self.over:
            self.speech.feed(text)

    def finish(self) -> None:
        if self.finished:
            return
        self.words.finish()
        self.finished = True
        if self.speech is not None:
            self.speech.finish()

    def attach(self, speech: Speech) -> None:
        """Feeds all text so far into `speech`, and later text directly."""
        self.speech = speech
        for text in self._unsent:
            speech.feed(text)
        self._unsent.clear()
        if self.finished:
            speech.finish()

    def end(self) -> None:
        """Cancels the generation without waiting for its end."""
        self.over = True
        if self.speech is not None:
            self.speech.cancel()


class MkttsTTSService(TTSService):
    """Qwen3-TTS as a Pipecat TTS service, with a model in this process or any other ``SpeechSource``.

    Sentences are spoken one by one (``TextAggregationMode.SENTENCE``, the default), or the tokens of a turn are fed to
    one generation as the LLM produces them (``TextAggregationMode.TOKEN``).

    The conversation's context receives the words that were heard, by estimated times (see ``mktts.engine.words``), and
    no words that an interruption or a failure left unspoken.

    A failed engine is reported as a permanent error: the service is not used again until its settings change, and
    Pipecat's ``ProcessorUnusablePolicy`` decides what happens to the pipeline."""

    Settings = MkttsTTSSettings
    _settings: Settings

    def __init__(
        self,
        *,
        checkpoint: Checkpoint | str | Path | None = None,
        source: SpeechSource | None = None,
        backend: BackendName = "auto",
        device: str = "auto",
        dtype: torch.dtype | None = None,
        options: StreamOptions | None = None,
        layout: Layout | None = None,
        settings: Settings | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads the model, which all services of the process share (``shared_synthesizer``). This is not done in
        ``setup``, because Pipecat ends a run without an exception if a set-up takes more than 20 s.

        checkpoint: A folder, a Hub id or a name, as in ``Synthesizer.load``. None without a source takes the default.
        source: Where the speech comes from, instead of a checkpoint.
        backend, device, dtype: Of the shared synthesizer.
        options, layout: As ``LocalSource`` takes them. "streaming" speaks sooner than "whole", the default of
            CustomVoice checkpoints.
        settings: Runtime-updatable settings.
        kwargs: Passed to the parent ``TTSService``, such as ``text_aggregation_mode``.

        Raises ValueError for both a checkpoint and a source, and MkttsError if either or the settings are invalid."""
        if checkpoint is not None and source is not None:
            raise ValueError("expected a checkpoint or a source, got both")
        if source is None:
            checkpoint = DEFAULT_CHECKPOINT if checkpoint is None else checkpoint
            name = checkpoint.folder.name if isinstance(checkpoint, Checkpoint) else str(checkpoint)
            synthesizer = shared_synthesizer(checkpoint, backend=backend, device=device, dtype=dtype)
            source = LocalSource(synthesizer, name, options, layout)

        default_settings = self.Settings(
            model=source.name, voice=source.default_voice, language=AUTO, instruct=None, sampling=None, seed=None
        )
        if settings is not None:
            default_settings.apply_update(settings)

        kwargs.setdefault("stop_frame_timeout_s", _QUIET_S)
        super().__init__(
            push_start_frame=True,
            push_stop_frames=True,
            push_text_frames=False,  # words are pushed one by one with their times instead
            settings=default_settings,
            **kwargs,
        )
        source.check(self._settings.style)
        self._source = source
        self._connected = False
        self._player = Player()
        self._origins_s: dict[str, float] = {}  # time at which the first audio of each open context is heard
        self._cut_short: set[str] = set()  # contexts with text that was not spoken
        self._speaking: dict[str, SpokenText] = {}  # by audio context
        self._generating = asyncio.Lock()  # turns play one after another, so they are generated one after another

    @classmethod
    def format_pronunciation(cls, word: str, ipa: str) -> str | None:
        """Respells IPA in English letters; None for a sound that English lacks, about which Pipecat warns."""
        return respelled(ipa)

    @property
    def supports_pronunciations(self) -> bool:
        """Whether the language reads English respellings correctly."""
        return self._settings.style.language.lower() in (AUTO, ENGLISH)

    def can_generate_metrics(self) -> bool:
        return True

    def language_to_service_language(self, language: Language) -> str:
        """The model's name for a language or a regional variant of it; "auto" if the model was not trained on it."""
        name = LANGUAGE_CODES.get(str(language).split("-")[0].lower())
        if name is None:
            logger.warning(f"Qwen3-TTS has no language {language}: the model infers one from the text")
        return name or AUTO

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Connects to the source. Raises an error of the source or the settings, which Pipecat treats as permanent."""
        await super().setup(setup)
        name = self._source.name
        await self._source.connect()
        self._connected = True
        if self._settings.model == name != self._source.name:  # a remote source has learnt its model's name
            self._settings.model = self._source.name
            self._sync_model_name_to_metrics()
        self._source.check(self._settings.style)

    async def stop(self, frame: frames.EndFrame) -> None:
        """Finishes speaking the text received so far, then stops."""
        for context_id in self.get_audio_contexts():
            await self.flush_audio(context_id)
        await super().stop(frame)

    async def cancel(self, frame: frames.CancelFrame) -> None:
        await super().cancel(frame)
        await self._end_utterances([*self._speaking])

    async def cleanup(self) -> None:
        """Ends all generations of this service and disconnects from the source; a shared model stays loaded."""
        await super().cleanup()
        await self._end_utterances([*self._speaking])
        if self._connected:
            self._connected = False
            await self._source.disconnect()

    async def stop_all_metrics(self) -> None:
        await self.cancel_ttfb_metrics()  # an interruption before the first audio gives no TTFB
        await super().stop_all_metrics()

    async def _update_settings(self, delta: Settings) -> dict[str, Any]:
        """Changes settings for the following utterances; returns the previous values by name."""
        changed = await super()._update_settings(delta)
        self._warn_unhandled_updated_settings(changed.keys() - {"voice", "language", "instruct", "sampling", "seed"})
        return changed

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[frames.Frame | None, None]:
        """Speaks a sentence and yields its audio frames as they are generated, or an error frame. In token mode, feeds
        a token to the turn's generation, and yields None or an error frame."""
        if self._is_streaming_tokens:
            yield self._write(text, context_id)
            return
        utterance = self._speaking[context_id] = self._spoken_text()
        try:
            async with aclosing(self._utterance_frames(utterance, context_id, text)) as spoken:
                async for frame in spoken:
                    yield frame
        finally:
            if self._speaking.get(context_id) is utterance:
                del self._speaking[context_id]

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Marks a turn's text as complete.

        Closes the audio context if all audio is already in it, even if there is none: Pipecat itself would wait for its
        time-out if there was no audio."""
        utterance = self._speaking.get(context_id)
        if utterance is not None and not utterance.over:
            utterance.finish()
        elif context_id is not None:
            await self._close_context(context_id)

    async def _close_context(self, context_id: str) -> None:
        self._speaking.pop(context_id, None)
        if self.audio_context_available(context_id):
            await self.remove_audio_context(context_id)

    async def _utterance_frames(
        self, utterance: SpokenText, context_id: str, text: str | None = None
    ) -> AsyncGenerator[frames.Frame, None]:
        """Yields all frames of one utterance, and queues a frame's word times after the consumer has taken it. text:
        the whole text; None if it is fed."""
        source, style = self._source, self._settings.style
        rate_hz = source.sample_rate_hz
        # By default Pipecat's resampler resets its state after 0.2 s without a call. An engine may take longer for one
        # chunk, and samples would be lost in the middle of a word, so this one never resets.
        resampler = create_stream_resampler(clear_after_secs=None)
        try:
            if text is None:
                utterance.attach(await source.open(style))
            else:
                # Skip text of only punctuation and symbols: a model given nothing to say makes up speech.
                if any(map(str.isalnum, text)):
                    utterance.speech = await source.speak(text, style)
                # Prepare word times and count Pipecat's characters while the first frame is generated.
                utterance.words.feed(text)
                utterance.words.finish()
                utterance.finished = True
                await self.start_tts_usage_metrics(text)
            if (speech := utterance.speech) is not None:
                async for pcm in speech:
                    self._note_playback(utterance, len(pcm) / _SAMPLE_BYTES / rate_hz, context_id)
                    if audio := await resampler.resample(pcm, rate_hz, self.sample_rate):
                        await self.stop_ttfb_metrics()
                        yield self._frame(audio, context_id)
                    heard_s = asyncio.get_running_loop().time() - utterance.heard_at(0.0)
                    await self._push_words(utterance, utterance.words.add(from_pcm16(pcm), heard_s), context_id)
                if rest := await resampler.flush():
                    await self.stop_ttfb_metrics()
                    yield self._frame(rest, context_id)
                if speech.finish_reason not in ("eos", None):
                    logger.warning(f"{self}: an utterance ended after {utterance.made_s:.1f} s: {speech.finish_reason}")
                if not utterance.finished:  # a limit ended it before its text was complete
                    utterance.cut_short = True
                    self._cut_short.add(context_id)
            if not utterance.made_s:
                await self.cancel_ttfb_metrics()
                self._note_playback(utterance, _GUARD_S, context_id)
                yield self._frame(bytes(_SAMPLE_BYTES * round(_GUARD_S * self.sample_rate)), context_id)
            utterance.over = True
            await self._push_words(utterance, utterance.words.end(not utterance.cut_short), context_id)
        except Exception as error:
            await self.cancel_ttfb_metrics()
            utterance.over = utterance.cut_short = True
            await self._push_words(utterance, utterance.words.end(complete=False), context_id)
            failed = speech_failed(error, context_id)
            if failed.permanent:  # now, not when the frame is processed, so that no more text reaches the engine
                await self.set_usable(False)
            yield failed
        finally:
            utterance.end()

    def _spoken_text(self) -> SpokenText:
        """A new utterance with the current settings."""
        return SpokenText(partial(self._source.spoken, style=self._settings.style), self._source.sample_rate_hz)

    def _frame(self, audio: bytes, context_id: str) -> frames.TTSAudioRawFrame:
        return frames.TTSAudioRawFrame(audio, self.sample_rate, 1, context_id=context_id)

    def _note_playback(self, utterance: SpokenText, duration_s: float, context_id: str) -> None:
        """Records when a chunk of audio that is about to be pushed will be heard."""
        begin_s, _ = self._player.play(asyncio.get_running_loop().time(), duration_s)
        utterance.add_audio(duration_s, begin_s)
        if self.audio_context_available(context_id):
            self._origins_s.setdefault(context_id, begin_s)

    async def _push_words(self, utterance: SpokenText, words: Sequence[WordTime], context_id: str) -> None:
        origin_s = self._origins_s.get(context_id)
        if origin_s is None:  # without an audio context, times have no origin
            return
        for word in words:  # Pipecat's times start at the first audio of the context
            timed = word.word, utterance.heard_at(word.start_s) - origin_s
            await self.add_word_timestamps([timed], context_id, includes_inter_frame_spaces=is_wide(word.word))

    async def _apply_force_complete(self, context_id: str) -> None:
        """Keeps Pipecat from treating words without times as spoken if an utterance of the context failed."""
        if context_id not in self._cut_short and self.is_usable:
            await super()._apply_force_complete(context_id)
            return
        left = self._aggregated_frame_sequencer.force_complete(context_id, self._word_timestamp_tracker.last_pts)
        unspoken = (frames.TTSTextFrame, frames.AggregatedTextProgressFrame)
        await self._push_word_frames([frame for frame in left if not isinstance(frame, unspoken)])

    async def push_error_frame(self, error: frames.ErrorFrame, force_treat_as_permanent: bool = False) -> None:
        """Pushes an error frame upstream, and drops the unspoken words of a failed utterance."""
        if isinstance(error, SpeechFailedFrame):
            # Spoken text precedes this frame, so the first sentence with remaining words is the one that failed.
            if error.context_id in self.get_audio_contexts():
                self._cut_short.add(error.context_id)
                for frame in self._aggregated_frame_sequencer.complete_spoken_slot():
                    await self.push_frame(frame)
            force_treat_as_permanent |= error.permanent
        await super().push_error_frame(error, force_treat_as_permanent)

    def _write(self, text: str, context_id: str) -> frames.Frame | None:
        utterance = self._speaking.get(context_id)
        if utterance is None:
            utterance = self._speaking[context_id] = self._spoken_text()
            utterance.task = self.create_task(self._speak_turn(utterance, context_id))
        try:
            utterance.feed(text)
        except Exception as error:
            utterance.cut_short = True
            utterance.end()
            return speech_failed(error, context_id)
        return None

    async def _speak_turn(self, utterance: SpokenText, context_id: str) -> None:
        """Reads the audio of a turn whose text is still being written; closes its context when both are complete."""
        async with self._generating, aclosing(self._utterance_frames(utterance, context_id)) as spoken:
            async for frame in spoken:
                await self.append_to_audio_context(context_id, frame)
        if utterance.finished:  # otherwise `flush_audio` closes it at the end of the text
            await self._close_context(context_id)

    async def _handle_interruption(self, frame: frames.InterruptionFrame, direction: FrameDirection) -> None:
        """Ends utterances whose context the interruption dropped; uninterruptible contexts remain.

        The end of `run_tts` cannot do this: if its task is cancelled between two frames, Python closes the generator
        only at some later time."""
        await super()._handle_interruption(frame, direction)
        await self._end_utterances([key for key in self._speaking if not self.audio_context_available(key)])
        if not self.get_audio_contexts():
            self._player = Player()  # the audio that was queued will not be heard

    async def on_audio_context_completed(self, context_id: str) -> None:
        self._origins_s.pop(context_id, None)
        if context_id not in self._speaking:  # a slow LLM's context may time out while its utterance goes on
            self._cut_short.discard(context_id)

    on_audio_context_interrupted = on_audio_context_completed

    async def _end_utterances(self, context_ids: list[str]) -> None:
        for context_id in context_ids:
            if (utterance := self._speaking.pop(context_id, None)) is not None:
                utterance.end()
                if utterance.task is not None:
                    await self.cancel_task(utterance.task)
