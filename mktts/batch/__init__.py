"""Many utterances at once.

scheduler, board, tick, tick_model, admission, pages and simulate decide and simulate, without a device. executor,
utterance and model serve streams by what they decide, on `lanes`: `plain` makes a tick of PyTorch operators, `cuda` one
CUDA graph.
"""
