"""Texts, the teacher's audio, codes: what the voice learns from."""
