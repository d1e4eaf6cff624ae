"""Makes checkpoints of random weights in the layout of the Hub."""

RANDOM_WEIGHTS = "random weights: the output is noise; timing and parity are real"  # said wherever one is used
