"""Timings: here, of peers, on a GPU."""
