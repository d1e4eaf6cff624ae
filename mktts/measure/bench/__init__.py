"""Timings of mktts, faster-qwen3-tts and upstream on this machine: `python -m mktts bench`."""
