"""Trains talker and code predictor."""
