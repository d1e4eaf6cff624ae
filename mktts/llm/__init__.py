"""Qwen3 text models, on kernels shared with speech."""
