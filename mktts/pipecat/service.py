"""The Pipecat service: sentences, or tokens as they are written, in; audio frames out as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from pipecat.frames.frames import (
    CancelFrame,
    EndFrame,
    Frame,
    InterruptionFrame,
    TTSAudioRawFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.transcriptions.language import Language
from pipecat.utils.tracing.service_decorators import traced_tts

from mktts.checkpoint import DEFAULT_CHECKPOINT, Checkpoint
from mktts.model.prompt import Layout
from mktts.pipecat.failure import speech_failed
from mktts.pipecat.heard import HeardWordsTTSService
from mktts.pipecat.pcm import BYTES_PER_SAMPLE, PcmConverter, silence
from mktts.pipecat.registry import shared_synthesizer
from mktts.pipecat.settings import AUTO, MkttsTTSSettings, language_name
from mktts.pipecat.source import LocalSource, Speech, SpeechSource
from mktts.pipecat.utterance import Utterance
from mktts.pipecat.words import Pace
from mktts.speech.options import StreamOptions
from mktts.synth.synthesizer import BackendName

_GUARD_S = 0.02  # of silence, for text that makes no sound: an audio context without audio counts as a failure
_QUIET_S = 10.0  # without audio until a context counts as over; a large model on a CPU may need more than Pipecat's 3


class MkttsTTSService(HeardWordsTTSService):
    """Qwen3-TTS, in this process or wherever a ``SpeechSource`` finds it.

    Sentences are spoken one by one (``TextAggregationMode.SENTENCE``, the default), or a turn's tokens go straight
    into one generation as the LLM writes them (``TextAggregationMode.TOKEN``).

    The conversation's context receives the words that were heard, by estimated times (see ``mktts.pipecat.words``).
    Words that an interruption or a failure left unspoken do not enter it.

    A failed engine is reported as a permanent error: this service stops being given work until its settings change,
    and Pipecat's ``ProcessorUnusablePolicy`` decides about the pipeline.
    """

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
        """Initialize the service.

        With a checkpoint, the first service of a process loads the model here, and all others share it (see
        ``shared_synthesizer``). Not in ``setup``: a set-up of more than 20 s makes Pipecat end the run with no
        exception.

        Args:
            checkpoint: As ``Synthesizer.load`` takes it: a folder, a Hub id, a name. With no source either, its
                default.
            source: Where the speech comes from, in place of a checkpoint.
            backend: Of the shared synthesizer.
            device: Of the shared synthesizer.
            dtype: Of the shared synthesizer.
            options: Of every utterance of the shared synthesizer: chunk sizes, limits.
            layout: Of its sentences' prompts: "streaming" speaks sooner than "whole", the default of CustomVoice
                checkpoints, because no prompt is computed before the first frame.
            settings: Runtime-updatable settings.
            **kwargs: Additional arguments passed to the parent ``TTSService``, such as ``text_aggregation_mode``.

        Raises:
            ValueError: With both a ``checkpoint`` and a ``source``.
            MkttsError: What is wrong with the checkpoint or the settings.
        """
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
            settings=default_settings,
            **kwargs,
        )
        source.check(self._settings.style)
        self._source = source
        self._connected = False
        self._speaking: dict[str, Utterance] = {}  # by audio context
        self._generating = asyncio.Lock()  # turns play one after another, so they are generated one after another

    def can_generate_metrics(self) -> bool:
        """Indicate that this service supports TTFB and usage metrics."""
        return True

    def language_to_service_language(self, language: Language) -> str:
        """Convert a Language enum to the model's name of it.

        Args:
            language: The language to convert.

        Returns:
            The model's name, "auto" for a language it does not have.
        """
        return language_name(language)

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Connect to the source.

        Args:
            setup: Configuration object containing setup parameters.

        Raises:
            MkttsError: What is wrong with the source or the settings; Pipecat reports it as a permanent error.
        """
        await super().setup(setup)
        name = self._source.name
        await self._source.connect()
        self._connected = True
        if self._settings.model == name != self._source.name:  # a source elsewhere is known by its address until now
            self._settings.model = self._source.name
            self._sync_model_name_to_metrics()
        self._source.check(self._settings.style)

    async def stop(self, frame: EndFrame) -> None:
        """Let what has been written be spoken to its end.

        Args:
            frame: The end frame.
        """
        for context_id in self.get_audio_contexts():
            await self.flush_audio(context_id)
        await super().stop(frame)

    async def cancel(self, frame: CancelFrame) -> None:
        """Stop every generation of this service.

        Args:
            frame: The cancel frame.
        """
        await super().cancel(frame)
        await self._end_utterances([*self._speaking])

    async def cleanup(self) -> None:
        """Stop every generation of this service and let go of the source; the shared model stays."""
        await super().cleanup()
        await self._end_utterances([*self._speaking])
        if self._connected:
            self._connected = False
            await self._source.disconnect()

    async def stop_all_metrics(self) -> None:
        """Stop all active metrics; an interruption before the first audio is no time to first byte."""
        await self.cancel_ttfb_metrics()
        await super().stop_all_metrics()

    async def _update_settings(self, delta: Settings) -> dict[str, Any]:
        """Apply a settings delta, from the next utterance on.

        Args:
            delta: A settings delta.

        Returns:
            Dict mapping changed field names to their previous values.
        """
        changed = await super()._update_settings(delta)
        if changed.keys() & {"voice", "instruct", "language"}:
            self._pace = Pace()
        self._warn_unhandled_updated_settings(changed.keys() - {"voice", "language", "instruct", "sampling", "seed"})
        return changed

    #
    # Speaking
    #

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Speak a sentence; in token mode, hand a token to the turn's generation.

        Args:
            text: The text to synthesize.
            context_id: Unique identifier for this TTS context.

        Yields:
            Frame: Audio frames as they are made, an error frame, or None for a token.
        """
        if self._is_streaming_tokens:
            yield self._write(text, context_id)
            return
        utterance = self._speaking[context_id] = Utterance(self._pace, self._spoken_word())

        async def speak() -> Speech | None:
            # Marks and symbols alone are nothing to say, and a model given nothing to say says something else.
            said = any(map(str.isalnum, text))
            utterance.speech = await self._source.speak(text, self._settings.style) if said else None
            # While the first frame is made: when each word is heard, and Pipecat's count of characters.
            utterance.feed(text)
            utterance.finish()
            await self.start_tts_usage_metrics(text)
            return utterance.speech

        try:
            async with aclosing(self._voice(utterance, speak, context_id)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            if self._speaking.get(context_id) is utterance:
                del self._speaking[context_id]

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Take note that a turn's text is complete.

        The context is closed here when all its audio is in it, whether or not there was any: Pipecat itself closes
        it only after audio, and waits for its time-out otherwise.

        Args:
            context_id: The turn's audio context.
        """
        if context_id is None:
            return
        utterance = self._speaking.get(context_id)
        if utterance is not None and not utterance.over:
            utterance.finish()
            return
        self._speaking.pop(context_id, None)
        await self._close_context(context_id)

    async def _close_context(self, context_id: str) -> None:
        if self.audio_context_available(context_id):
            await self.remove_audio_context(context_id)

    async def _voice(
        self, utterance: Utterance, speak: Callable[[], Awaitable[Speech | None]], context_id: str
    ) -> AsyncGenerator[Frame, None]:
        """All frames of one utterance. The word times of a frame are queued once it has been taken."""
        rate_hz = self._source.sample_rate_hz
        converter = PcmConverter(rate_hz, self.sample_rate)
        try:
            utterance.speech = speech = await speak()
            if speech is not None:
                async for pcm in speech:
                    self._hear(utterance, len(pcm) / BYTES_PER_SAMPLE / rate_hz, context_id)
                    audio = await converter.convert(pcm)
                    if audio:
                        await self.stop_ttfb_metrics()
                        yield self._frame(audio, context_id)
                    await self._push_words(utterance, context_id)
                rest = await converter.finish()
                if rest:
                    await self.stop_ttfb_metrics()
                    yield self._frame(rest, context_id)
                self._check_end(utterance, speech, context_id)
            if utterance.heard.begin_s is None:
                await self.cancel_ttfb_metrics()
                self._hear(utterance, _GUARD_S, context_id)
                yield self._frame(silence(_GUARD_S, self.sample_rate), context_id)
            utterance.over = True
            await self._push_words(utterance, context_id)
        except Exception as error:
            await self.cancel_ttfb_metrics()
            utterance.over = utterance.cut_short = True
            await self._push_words(utterance, context_id)
            failed = speech_failed(error, context_id)
            if failed.permanent:  # at once, not when the frame has its turn: no more text may reach the engine
                await self.set_usable(False)
            yield failed
        finally:
            utterance.end()

    def _spoken_word(self) -> Callable[[str], str]:
        """How a word is heard in the style that is set now."""
        return partial(self._source.spoken, style=self._settings.style)

    def _frame(self, audio: bytes, context_id: str) -> TTSAudioRawFrame:
        return TTSAudioRawFrame(audio, self.sample_rate, 1, context_id=context_id)

    def _check_end(self, utterance: Utterance, speech: Speech, context_id: str) -> None:
        if speech.finish_reason not in ("eos", None):
            logger.warning(
                f"{self}: an utterance was ended after {utterance.heard.made_s:.1f} s: {speech.finish_reason}"
            )
        if not utterance.finished:  # a limit ended it while its text was still being written
            utterance.cut_short = True
            self._cut_short.add(context_id)

    #
    # Tokens
    #

    def _write(self, text: str, context_id: str) -> Frame | None:
        utterance = self._speaking.get(context_id)
        if utterance is None:
            utterance = self._speaking[context_id] = Utterance(self._pace, self._spoken_word())
            utterance.task = self.create_task(self._speak_turn(utterance, context_id))
        try:
            utterance.feed(text)
        except Exception as error:
            utterance.cut_short = True
            utterance.end()
            return speech_failed(error, context_id)
        return None

    async def _speak_turn(self, utterance: Utterance, context_id: str) -> None:
        """Takes the audio of a turn whose text is still being written; closes its context when both are complete."""

        async def open_speech() -> Speech:
            speech = await self._source.open(self._settings.style)
            utterance.attach(speech)
            return speech

        async with self._generating, aclosing(self._voice(utterance, open_speech, context_id)) as frames:
            async for frame in frames:
                await self.append_to_audio_context(context_id, frame)
        if utterance.finished:  # otherwise `flush_audio` does this at the end of the text
            self._speaking.pop(context_id, None)
            await self._close_context(context_id)

    #
    # Ends
    #

    async def _handle_interruption(self, frame: InterruptionFrame, direction: FrameDirection) -> None:
        """Stop what speaks into a context that the interruption dropped; uninterruptible contexts are still there.

        Not left to the end of `run_tts`: when the task that drives it is cancelled between two frames, Python closes
        the generator at some later time.
        """
        await super()._handle_interruption(frame, direction)
        await self._end_utterances([key for key in self._speaking if not self.audio_context_available(key)])
        if not self.get_audio_contexts():
            self._playout.drop()

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Forget an interrupted context.

        Args:
            context_id: The audio context that was interrupted.
        """
        self._forget(context_id)

    async def on_audio_context_completed(self, context_id: str) -> None:
        """Forget a context that has played to its end.

        Args:
            context_id: The audio context that finished playing.
        """
        self._forget(context_id)

    async def _end_utterances(self, context_ids: list[str]) -> None:
        for context_id in context_ids:
            utterance = self._speaking.pop(context_id, None)
            if utterance is not None:
                utterance.end()
                if utterance.task is not None:
                    await self.cancel_task(utterance.task)

    def _forget(self, context_id: str) -> None:
        self._origins_s.pop(context_id, None)
        if context_id not in self._speaking:  # an LLM that pauses for long loses its audio context, and goes on
            self._cut_short.discard(context_id)
