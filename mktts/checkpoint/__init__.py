"""Checkpoints: opening, checking, fetching; `random` makes them, `small` is the one in the box."""

from mktts.checkpoint.open import DEFAULT_CHECKPOINT, SOURCES, Checkpoint, open_checkpoint

__all__ = ["DEFAULT_CHECKPOINT", "SOURCES", "Checkpoint", "open_checkpoint"]
