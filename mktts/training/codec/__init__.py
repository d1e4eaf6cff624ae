"""Trains the codec."""
