"""Qwen3-TTS 12 Hz speech, streamed frame by frame.

from mktts import Synthesizer

pcm = Synthesizer.load().say("Hello.")
"""

from mktts.audio import read_audio, write_audio
from mktts.errors import (
    BackendUnavailable,
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
from mktts.speech.guard import Guard
from mktts.speech.options import Chunk, StreamOptions
from mktts.speech.stream import Session, Stream
from mktts.synth import Synthesizer
from mktts.synth.cloning import clone_voice

__version__ = "0.1.0"
__all__ = [
    "FRAME_RATE_HZ",
    "SAMPLES_PER_FRAME",
    "SAMPLE_RATE_HZ",
    "BackendUnavailable",
    "CheckpointError",
    "Choice",
    "Chunk",
    "EngineError",
    "Guard",
    "MkttsError",
    "OptionsError",
    "PromptError",
    "Sampling",
    "SamplingError",
    "Session",
    "Stream",
    "StreamOptions",
    "Synthesizer",
    "TextError",
    "Voice",
    "VoiceError",
    "clone_voice",
    "read_audio",
    "write_audio",
]
