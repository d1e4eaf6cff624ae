"""Qwen3-TTS 12 Hz speech, streamed frame by frame."""

from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.options import Chunk, StreamOptions
from mktts.synth import Synthesizer

__version__ = "0.1.0"
__all__ = ["FRAME_RATE_HZ", "SAMPLES_PER_FRAME", "SAMPLE_RATE_HZ", "Chunk", "StreamOptions", "Synthesizer"]
