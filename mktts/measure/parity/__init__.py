"""`python -m mktts parity`: compares prompts, codes, codec and kernel with independent references."""
