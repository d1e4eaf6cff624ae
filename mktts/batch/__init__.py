"""Many utterances at once.

scheduler, tick, admission and pages decide, without a device. executor and model serve streams by what they
decide, on `lanes`: `plain` makes a tick of PyTorch operators, `cuda` one CUDA graph.
"""
