"""Makes checkpoints of random weights in the layout of the Hub."""
