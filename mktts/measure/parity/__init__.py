"""`python -m mktts parity`: prompts, codes, codec and kernel of this package, against independent truths."""
