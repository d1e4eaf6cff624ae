"""Decodes codes to PCM: the streaming decoder, its state, CUDA graphs, fused kernels."""
