"""Upstream models on random checkpoints, each loaded once in a test process, whichever file asks first."""

from functools import cache
from typing import Any

import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.engine.upstream import load_upstream


@cache
def loaded(source: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Checkpoint, Any]:
    """The checkpoint and qwen-tts's model of it. Shared: a test must not change either."""
    checkpoint = open_checkpoint(source)
    return checkpoint, load_upstream(checkpoint, dtype)
