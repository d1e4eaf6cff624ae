"""Speech to text: Deepgram, Whisper, or pocketsphinx with a grammar, which needs neither network nor download."""

import asyncio
import importlib.util
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

from pipecat.frames.frames import ErrorFrame, Frame, TranscriptionFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.settings import STTSettings
from pipecat.services.stt_service import SegmentedSTTService, STTService
from pipecat.transcriptions.language import Language
from pipecat.utils.time import time_now_iso8601

from mktts.agent.intents import grammar
from mktts.agent.settings import AgentSettings
from mktts.errors import AgentError, PackageMissing
from mktts.spec import LANGUAGE_CODES

# 99th percentiles from the end of speech to its transcript: Silero's silence threshold plus the decoding of a phrase.
_POCKETSPHINX_LATEST_S, _WHISPER_LATEST_S = 0.35, 1.0
_WARM_UP_S = 0.5


def create_stt(settings: AgentSettings) -> STTService:
    """Creates the STT service that `settings` select. The first Whisper service takes seconds to load its model. Raises
    AgentError if its package or model is missing."""
    check_stt(settings)
    if settings.stt == "whisper":
        return _whisper_service(settings)
    if settings.stt == "pocketsphinx":
        return PocketsphinxSTTService()
    from pipecat.services.deepgram.stt import DeepgramSTTService

    return DeepgramSTTService(api_key=settings.deepgram_key)


def check_stt(settings: AgentSettings) -> None:
    """Raises AgentError if the package of the selected service is missing."""
    if settings.stt == "pocketsphinx":
        _decoder_class()
    elif settings.stt == "whisper":
        if importlib.util.find_spec("faster_whisper") is None:  # checked here, as Pipecat would log its own error
            raise PackageMissing("Whisper needs the package faster-whisper: pip install faster-whisper")
    else:
        try:
            import pipecat.services.deepgram.stt  # noqa: F401
        except ImportError as error:
            raise AgentError(f"Deepgram needs the package deepgram-sdk: {error}") from None


class PocketsphinxSTTService(SegmentedSTTService):
    """Pocketsphinx with the English model of its wheel and a grammar of whole phrases, because it gets most words of
    free speech wrong. A phrase takes 10 to 20 ms on one core; other speech gives no transcript."""

    def __init__(self) -> None:
        settings = STTSettings(model="en-us", language=Language.EN)
        super().__init__(settings=settings, ttfs_p99_latency=_POCKETSPHINX_LATEST_S)
        self._decoder: Any = None

    @property
    def wants_wav_segments(self) -> bool:
        """False: the decoder reads raw 16-bit PCM."""
        return False

    def can_generate_metrics(self) -> bool:
        return True

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Loads the model."""
        await super().setup(setup)
        self._decoder = await asyncio.to_thread(make_decoder, self.sample_rate)

    async def run_stt(self, audio: bytes) -> AsyncGenerator[Frame | None, None]:
        """Yields the transcript of a segment of 16-bit mono PCM, or nothing if no phrase of the grammar matches."""
        await self.start_processing_metrics()
        try:
            text = await asyncio.to_thread(decode, self._decoder, audio)
        except RuntimeError as error:
            yield ErrorFrame(f"pocketsphinx failed: {error}", exception=error)
            return
        finally:
            await self.stop_processing_metrics()
        if text:
            yield TranscriptionFrame(text, self._user_id, time_now_iso8601(), Language.EN)


def make_decoder(sample_rate_hz: int) -> Any:
    """Makes a pocketsphinx decoder for the intents' grammar. Raises PackageMissing without the package."""
    decoder = _decoder_class()(samprate=float(sample_rate_hz), lm=None, loglevel="FATAL")
    decoder.add_jsgf_string("phrases", grammar())
    decoder.activate_search("phrases")
    decode(decoder, bytes(2 * int(_WARM_UP_S * sample_rate_hz)))  # warm-up: the first decoding takes longer
    return decoder


def decode(decoder: Any, pcm: bytes) -> str:
    """The phrase in `pcm`, mono 16-bit; "" if none matches. Holds the GIL while it decodes."""
    decoder.start_utt()
    try:
        decoder.process_raw(pcm, full_utt=True)
    finally:
        decoder.end_utt()
    found = decoder.hyp()
    return found.hypstr if found else ""


def _decoder_class() -> Any:
    try:
        from pocketsphinx import Decoder
    except ImportError as error:
        raise PackageMissing(
            f"offline speech to text needs the package pocketsphinx: pip install -r requirements.txt ({error}); where "
            "it has no wheel (arm64 Linux, Python 3.14), use Deepgram: set DEEPGRAM_API_KEY, --stt deepgram"
        ) from None
    return Decoder


def _whisper_service(settings: AgentSettings) -> STTService:
    from pipecat.services.whisper.stt import WhisperSTTService

    class SharedWhisper(WhisperSTTService):
        """Pipecat's service, with one model shared by all conversations."""

        def _load(self) -> None:
            self._model = _whisper_model(settings.stt_model, settings.device)
            if unsupported := self._unsupported_language():
                raise AgentError(unsupported)

    codes = [code for code, name in LANGUAGE_CODES.items() if name == settings.language]
    language = Language(codes[0]) if codes else None  # None: Whisper detects it, segment by segment
    service = WhisperSTTService.Settings(model=settings.stt_model, language=language)
    return SharedWhisper(settings=service, ttfs_p99_latency=_WHISPER_LATEST_S)


@cache
def _whisper_model(name: str, device: str) -> Any:
    """The process's Whisper model. The first call loads it for seconds: not on an event loop."""
    from pipecat.services.whisper.stt import WhisperModel

    kind, _, index = device.partition(":")
    try:
        return WhisperModel(name, device=kind, device_index=int(index or 0))
    except Exception as error:  # from the Hub, CTranslate2 or the file system
        words = " ".join(str(error).split())[:300]
        raise AgentError(
            f"--stt-model {name}: it cannot be loaded ({type(error).__name__}: {words}); where the Hub is out of "
            "reach, name a folder with a CTranslate2 model"
        ) from None
