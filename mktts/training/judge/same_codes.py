"""Whether upstream qwen-tts makes the same codes of the checkpoint: the voice is in the released form, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SENTENCES = 20
_MAX_FRAMES = 120  # of 80 ms


def section(checkpoint: str, texts: Sequence[str], speakers: Sequence[str]) -> dict[str, Any]:
    """Each text by one speaker, half of them by argmax and half drawn, in fp32 on the CPU: how many are equal.

    Raises BackendUnavailable without qwen-tts.
    """
    import torch

    from mktts.checkpoint import open_checkpoint
    from mktts.measure.parity.upstream import compare_codes
    from mktts.model.prompt import Request
    from mktts.synth.upstream import load_upstream

    opened = open_checkpoint(checkpoint)
    upstream = load_upstream(opened, torch.float32)
    requests = [Request(text, speaker=speakers[i % len(speakers)]) for i, text in enumerate(texts)]
    half = len(requests) // 2
    rows = []
    for sampling, part in ((opened.sampling().greedy(), requests[:half]), (opened.sampling(), requests[half:])):
        if part:
            rows += compare_codes(opened, part, sampling, 0, _MAX_FRAMES, torch.float32, upstream)
    return {
        "sentences": len(rows),
        "equal": sum(bool(row["equal"]) for row in rows),
        "frames": sum(int(row["frames"]) for row in rows),
        "dtype": "fp32",
    }
