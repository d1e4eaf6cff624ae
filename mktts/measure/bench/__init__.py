"""Timings of this machine, and beside them those of faster-qwen3-tts and of upstream: `python -m mktts bench`."""
