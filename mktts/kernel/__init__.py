"""The megakernel from Python: compiling, launching, packing weights, prompts into its cache."""
