"""Qwen3-TTS as a Pipecat text-to-speech service (pipecat-ai 1.14). Into a pipeline in five lines:

    from mktts.pipecat import MkttsTTSService

    tts = MkttsTTSService(
        checkpoint="Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice", settings=MkttsTTSService.Settings(voice="vivian")
    )
    pipeline = Pipeline([transport.input(), stt, user, llm, tts, transport.output(), assistant])

The model is loaded once per process, however many services speak through it. With
`source=RemoteSource("http://127.0.0.1:8000")` in place of the checkpoint, the speech comes from `python -m mktts serve`
there, and nothing else changes. Inside this package `pipecat` is the framework: imports are absolute, and nothing here
shadows it."""

try:
    import pipecat  # noqa: F401  asked for here, so that its absence is named with what to install
except ModuleNotFoundError:
    message = "mktts.pipecat needs the package pipecat-ai: pip install pipecat-ai==1.14.0"
    raise ModuleNotFoundError(message, name="pipecat") from None

from mktts.pipecat.remote import RemoteSource
from mktts.pipecat.service import MkttsTTSService, MkttsTTSSettings, SpeechFailedFrame
from mktts.pipecat.source import LocalSource, Speech, SpeechSource, Style, close_shared_synthesizers, shared_synthesizer

__all__ = [
    "LocalSource", "MkttsTTSService", "MkttsTTSSettings", "RemoteSource", "Speech", "SpeechFailedFrame", "SpeechSource",
    "Style", "close_shared_synthesizers", "shared_synthesizer",
]  # fmt: skip
