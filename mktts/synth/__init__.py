"""`Synthesizer` and what it loads; cloning; the commands that speak."""

from mktts.synth.synthesizer import Synthesizer

__all__ = ["Synthesizer"]
