"""Text to a stream of chunks: the synthesizer, its engine, cloning, and qwen-tts as a second model."""

from mktts.synth.synthesizer import Synthesizer

__all__ = ["Synthesizer"]
