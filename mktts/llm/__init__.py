"""Qwen3 text on the same kernel."""
