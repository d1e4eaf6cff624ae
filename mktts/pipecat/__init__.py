"""Qwen3-TTS as a Pipecat text-to-speech service (pipecat-ai 1.14). To use it in a pipeline:

    from mktts.pipecat import MkttsTTSService

    tts = MkttsTTSService(
        checkpoint="Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice", settings=MkttsTTSService.Settings(voice="vivian")
    )
    pipeline = Pipeline([transport.input(), stt, user, llm, tts, transport.output(), assistant])

The model is loaded once per process and shared by all services. With `source=RemoteSource("http://127.0.0.1:8000")`
instead of a checkpoint, speech comes from `python -m mktts serve` at that address; nothing else changes. Inside this
package, `import pipecat` imports the framework: imports are absolute, so this package does not shadow it."""

try:
    import pipecat  # noqa: F401  imported first to report what to install if it is missing
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
