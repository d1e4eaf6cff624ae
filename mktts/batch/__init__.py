"""Lanes of many streams: `plain` makes a tick of PyTorch operators, `cuda` one CUDA graph."""
