"""The megakernel from Python: compiles and launches it, packs its weights, and prefills prompts into its cache."""
