"""Generates checkpoints with random weights in the Hub layout."""

RANDOM_WEIGHTS = "random weights: the output is noise; timing and parity are real"  # shown wherever one is used
