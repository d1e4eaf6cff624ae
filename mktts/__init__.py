"""Qwen3-TTS 12 Hz speech, streamed frame by frame.

    from mktts import Synthesizer, write_audio

    pcm = Synthesizer.load().say("Hello.")
    write_audio("hello.wav", pcm)

Each public name is imported from its module on first use, which keeps `import mktts` fast."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mktts.audio import read_audio, write_audio
    from mktts.batch import BatchSettings
    from mktts.engine.options import Chunk, Guard, StreamOptions
    from mktts.engine.stream import Session, Stream
    from mktts.errors import (
        AudioError,
        BackendUnavailable,
        BusyError,
        CapacityError,
        CheckpointError,
        EngineError,
        MkttsError,
        OptionsError,
        PromptError,
        SamplingError,
        TextError,
        VoiceError,
    )
    from mktts.model.sampling import Choice, Sampling
    from mktts.model.voice import Voice
    from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
    from mktts.synth.cloning import clone_voice
    from mktts.synth.synthesizer import Synthesizer

__version__ = "0.1.0"

_MODULES = {
    "mktts.audio": ("read_audio", "write_audio"),
    "mktts.batch": ("BatchSettings",),
    "mktts.errors": (
        "AudioError", "BackendUnavailable", "BusyError", "CapacityError", "CheckpointError", "EngineError",
        "MkttsError", "OptionsError", "PromptError", "SamplingError", "TextError", "VoiceError",
    ),
    "mktts.model.sampling": ("Choice", "Sampling"),
    "mktts.model.voice": ("Voice",),
    "mktts.spec": ("FRAME_RATE_HZ", "SAMPLES_PER_FRAME", "SAMPLE_RATE_HZ"),
    "mktts.engine.options": ("Chunk", "Guard", "StreamOptions"),
    "mktts.engine.stream": ("Session", "Stream"),
    "mktts.synth.cloning": ("clone_voice",),
    "mktts.synth.synthesizer": ("Synthesizer",),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "FRAME_RATE_HZ", "SAMPLES_PER_FRAME", "SAMPLE_RATE_HZ", "AudioError", "BackendUnavailable", "BatchSettings",
    "BusyError", "CapacityError", "CheckpointError", "Choice", "Chunk", "EngineError", "Guard", "MkttsError",
    "OptionsError", "PromptError", "Sampling", "SamplingError", "Session", "Stream", "StreamOptions", "Synthesizer",
    "TextError", "Voice", "VoiceError", "clone_voice", "read_audio", "write_audio",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mktts' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
