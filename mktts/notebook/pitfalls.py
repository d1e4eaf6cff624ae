"""What goes wrong when one detail of upstream is missed: notebook 02 shows each beside the proof that it would break.

All of them use a small random checkpoint: equality of codes is a property of the computation, and the words whose
tokens differ are in its vocabulary as they are in Qwen's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import open_checkpoint
from mktts.measure.parity.upstream import compare_codes, compare_prompts
from mktts.model import qwen3
from mktts.model.prompt import Request
from mktts.model.sampling import Choice, kept
from mktts.synth.upstream import load_upstream

SOURCE = "random:tiny"
TEXT = "My iPhone runs JavaScript."
_VOCABULARY, _SPREAD = 3_072, 2.0  # of the talker's codebook and control ids; of made-up logits


def local_tokenizer() -> list[dict[str, Any]]:
    """One row for each way to load the same tokenizer files, by Hub id and from a folder: pieces, and whether
    upstream's prompt equals ours."""
    checkpoint = open_checkpoint(SOURCE)
    request = Request(TEXT, speaker=checkpoint.config.default_speaker)
    rows = []
    for loaded, how in (("hub", "as a Hub id does"), ("local", "as a local folder does")):
        upstream = load_upstream(checkpoint, torch.float32, tokenizer=loaded)
        pieces = upstream.processor.tokenizer.tokenize(TEXT)
        (found,) = compare_prompts(checkpoint, [request], torch.float32, upstream)
        shown = " ".join(piece.replace("Ġ", "_") for piece in pieces)  # Ġ is the byte alphabet's blank
        rows.append({"tokenizer loaded": how, "pieces": shown, "prompt equal to ours": found["equal"]})
    return rows


def unrounded_norm(frames: int) -> list[dict[str, Any]]:
    """Two rows: greedy codes in bfloat16 with the norm rounded before its weight, as upstream does, and with the norm
    in fp32 throughout, which is more exact. `frames`: of the comparison."""
    checkpoint = open_checkpoint(SOURCE)
    upstream = load_upstream(checkpoint, torch.bfloat16)
    requests = [Request("One, two.", speaker=checkpoint.config.default_speaker)]
    arguments = (requests, checkpoint.sampling().greedy(), 0, frames, torch.bfloat16, upstream)
    (rounded,) = compare_codes(checkpoint, *arguments)
    with _norm_in_fp32():
        (unrounded,) = compare_codes(checkpoint, *arguments)
    names = ("rounded to bfloat16, then times its weight", "times its weight in fp32, then rounded")
    return [
        {"norm is": name, "codes equal": row["equal"], "first mismatch (frame, codebook)": row["first_mismatch"]}
        for name, row in zip(names, (rounded, unrounded), strict=True)
    ]


def tied_top_p(draws: int, top_p: float = 0.8) -> list[dict[str, Any]]:
    """Two rows: of `draws` made-up logits, rounded to bfloat16 as a model's are, how often top-p keeps upstream's ids
    when ties are sorted as upstream sorts them, and by a stable sort."""
    from transformers.generation.logits_process import TopPLogitsWarper

    choice, upstream = Choice(temperature=1.0, top_k=0, top_p=top_p), TopPLogitsWarper(top_p)
    equal = {False: 0, True: 0}
    for seed in range(draws):
        logits = torch.randn(_VOCABULARY, generator=torch.Generator().manual_seed(seed)) * _SPREAD
        logits = logits.bfloat16().float()
        expected = upstream(None, logits[None])[0].isfinite()
        for stable in equal:
            equal[stable] += torch.equal(kept(logits, choice, stable).isfinite(), expected)
    names = {False: "unstable, as upstream's", True: "stable: of equals, the lower id first"}
    return [{"sort": names[stable], "same ids kept": f"{count} of {draws}"} for stable, count in equal.items()]


@contextmanager
def _norm_in_fp32() -> Iterator[None]:
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = x.float()
        return (weight.float() * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    rounded, qwen3.rms_norm = qwen3.rms_norm, norm
    try:
        yield
    finally:
        qwen3.rms_norm = rounded
