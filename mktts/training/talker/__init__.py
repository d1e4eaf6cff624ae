"""Talker and code predictor: sequences of text and codes, and what learns them."""
