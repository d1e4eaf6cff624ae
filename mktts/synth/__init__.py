"""`Synthesizer` and what loads it; cloning; the commands say, voice and speak-all."""

from mktts.synth.synthesizer import Synthesizer

__all__ = ["Synthesizer"]
