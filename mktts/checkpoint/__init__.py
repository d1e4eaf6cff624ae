"""Opens, validates and downloads checkpoints; `random` generates them, `small` is the one included in the package."""

from mktts.checkpoint.open import DEFAULT_CHECKPOINT, SOURCES, Checkpoint, open_checkpoint

__all__ = ["DEFAULT_CHECKPOINT", "SOURCES", "Checkpoint", "open_checkpoint"]
