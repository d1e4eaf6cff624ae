"""Device memory of the batched codec: what a slot keeps between frames, and what a frame works on."""
