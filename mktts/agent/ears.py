"""Speech to text: Deepgram, Whisper, or pocketsphinx with a grammar, which needs no network and no download."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from pipecat.frames.frames import ErrorFrame, Frame, TranscriptionFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import SegmentedSTTService, STTService
from pipecat.transcriptions.language import Language
from pipecat.utils.time import time_now_iso8601
from pipecat.utils.tracing.service_decorators import traced_stt

from mktts.agent.intents import grammar
from mktts.agent.settings import AgentSettings
from mktts.errors import AgentError, PackageMissing

_LATEST_S = 0.35  # from the end of speech to a transcript: the silence Silero waits for, and 10 to 20 ms of decoding

_WARM_UP_S = 0.5


def make_ears(settings: AgentSettings) -> STTService:
    """The service that `settings` name. Raises AgentError where its package is missing, or its model."""
    service = find_ears(settings)
    if settings.ears == "whisper":
        from mktts.agent.whisper import make_whisper

        return make_whisper(settings)
    return service() if settings.ears == "pocketsphinx" else service(api_key=settings.deepgram_key)


def find_ears(settings: AgentSettings) -> type[STTService]:
    """The class of that service, so that a missing package shows before a model is loaded. Raises as `make_ears`."""
    if settings.ears == "pocketsphinx":
        _decoder_class()
        return PocketsphinxSTTService
    if settings.ears == "whisper":
        if importlib.util.find_spec("faster_whisper") is None:  # before Pipecat logs an error of its own
            raise PackageMissing(
                "the ears are to be Whisper, which needs the package faster-whisper: pip install faster-whisper"
            )
        from pipecat.services.whisper.stt import WhisperSTTService

        return WhisperSTTService
    try:
        from pipecat.services.deepgram.stt import DeepgramSTTService
    except ImportError as error:
        raise AgentError(f"the ears are to be Deepgram, which needs the package deepgram-sdk: {error}") from None
    return DeepgramSTTService


def load_ears(settings: AgentSettings) -> None:
    """Loads the model of ears in this process that all conversations share. Raises as `make_ears`."""
    find_ears(settings)
    if settings.ears == "whisper":
        from mktts.agent.whisper import shared_model

        shared_model(settings)


@dataclass
class PocketsphinxSTTSettings(STTSettings):
    """Settings for PocketsphinxSTTService. There is nothing to change: the model and the grammar are fixed."""


class PocketsphinxSTTService(SegmentedSTTService):
    """Pocketsphinx with the English model in its wheel, and a grammar of whole phrases.

    With a grammar a phrase takes 10 to 20 ms on one core, and what fits no phrase gives no transcript. Free dictation
    with the same model gets most words wrong.
    """

    Settings = PocketsphinxSTTSettings
    _settings: Settings

    def __init__(self, *, jsgf: str | None = None, settings: Settings | None = None, **kwargs: Any) -> None:
        """Initialize the service.

        Args:
            jsgf: The grammar; None takes that of the offline bot's intents.
            settings: Runtime-updatable settings.
            **kwargs: Additional arguments passed to the parent ``SegmentedSTTService``.

        Raises:
            AgentError: Without the package pocketsphinx.
        """
        _decoder_class()
        default_settings = self.Settings(model="en-us", language=Language.EN)
        if settings is not None:
            default_settings.apply_update(settings)
        kwargs.setdefault("ttfs_p99_latency", _LATEST_S)
        super().__init__(settings=default_settings, **kwargs)
        self._jsgf = jsgf or grammar()
        self._decoder: Any = None

    @property
    def wants_wav_segments(self) -> bool:
        """Receive segments as raw 16-bit PCM, which the decoder reads directly."""
        return False

    def can_generate_metrics(self) -> bool:
        """Indicate that this service supports processing metrics."""
        return True

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Load the model.

        Args:
            setup: Configuration object containing setup parameters.

        Raises:
            AgentError: With a grammar that pocketsphinx cannot read.
        """
        await super().setup(setup)
        self._decoder = await asyncio.to_thread(make_decoder, self._jsgf, self.sample_rate)

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        """Transcribe one stretch of speech.

        Args:
            audio: 16-bit mono PCM.

        Yields:
            Frame: The transcript; nothing where no phrase of the grammar fits.
        """
        await self.start_processing_metrics()
        try:
            text = await asyncio.to_thread(decode, self._decoder, audio)
        except RuntimeError as error:
            yield ErrorFrame(f"pocketsphinx failed: {error}", exception=error)
            return
        finally:
            await self.stop_processing_metrics()
        if text:
            await self._handle_transcription(text, True, Language.EN)
            yield TranscriptionFrame(text, self._user_id, time_now_iso8601(), Language.EN)

    @traced_stt
    async def _handle_transcription(self, transcript: str, is_final: bool, language: Language | None = None) -> None:
        """What tracing records."""


def _decoder_class() -> Any:
    try:
        from pocketsphinx import Decoder
    except ImportError as error:
        raise PackageMissing(
            f"hearing offline needs the package pocketsphinx: pip install -r requirements.txt ({error}); where it has "
            "no wheel (arm64 Linux, Python 3.14), hear with Deepgram: set DEEPGRAM_API_KEY, --ears deepgram"
        ) from None
    return Decoder


def make_decoder(jsgf: str, sample_rate_hz: int) -> Any:
    """A pocketsphinx decoder for a grammar. Raises AgentError without the package, or for a grammar it cannot read."""
    decoder = _decoder_class()(samprate=float(sample_rate_hz), lm=None, loglevel="FATAL")
    try:
        decoder.add_jsgf_string("phrases", jsgf)
        decoder.activate_search("phrases")
    except (RuntimeError, ValueError, KeyError) as error:
        raise AgentError(f"expected a JSGF grammar of words that pocketsphinx knows: {error}") from None
    decode(decoder, bytes(2 * int(_WARM_UP_S * sample_rate_hz)))  # or the first user waits for it
    return decoder


def decode(decoder: Any, pcm: bytes) -> str:
    """The phrase in `pcm`, mono 16-bit; "" where none fits. Holds the interpreter's lock while it decodes."""
    decoder.start_utt()
    try:
        decoder.process_raw(pcm, full_utt=True)
    finally:
        decoder.end_utt()
    found = decoder.hyp()
    return found.hypstr if found else ""
