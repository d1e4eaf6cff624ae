"""Prompt, codes, codec and kernel against independent truths."""
