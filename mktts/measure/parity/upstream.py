"""Compares prompt embeddings (bit for bit) and codes (frame for frame) with upstream qwen-tts. Both sides run on the
CPU, where the same operators round in the same way. Notebook 03_parity, the tests and `python -m mktts parity` use
this."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.common import read_object
from mktts.engine.upstream import generate_codes, prompt_embeds
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS

Row = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def standard_requests(checkpoint: Checkpoint) -> list[Request]:
    """Requests for every mode of this type of checkpoint; a clone's voice is made of seeded random numbers. If the
    checkpoint lacks a released speaker or language, its own speakers in turn and "auto" replace them."""
    config, found = checkpoint.config, []
    kind = "clones" if config.type.clones else "designs" if config.type.designs else "speakers"
    for turn, fields in enumerate(read_object(Path(__file__).with_name("requests.json"))[kind]):
        frames, speaker = fields.pop("voice_frames", None), fields.get("speaker")
        request = Request(**fields, voice=None if frames is None else made_up_voice(checkpoint, frames))
        if request.instruct is not None and not config.takes_instruct:
            continue
        if speaker is not None and speaker.lower() not in config.speakers:
            request = replace(request, speaker=list(config.speakers)[turn % len(config.speakers)])
        if speaker is not None and request.language.lower() not in ("auto", *config.languages):
            request = replace(request, language="auto")
        found.append(request)
    return found


def made_up_voice(checkpoint: Checkpoint, frames: int) -> Voice:
    """A voice of seeded random numbers with `frames` reference frames; 0 makes an x-vector voice."""
    generator = torch.Generator().manual_seed(frames)
    size = checkpoint.config.talker.hidden_size
    codes = torch.randint(0, CODEBOOK_SIZE, (frames, NUM_CODEBOOKS), generator=generator)
    transcript = "What the reference says."
    embedding = torch.randn(size, generator=generator)
    return Voice(embedding, codes if frames else None, transcript if frames else None, checkpoint.config.model_size)


def compare_prompts(
    checkpoint: Checkpoint, requests: Sequence[Request], dtype: torch.dtype, upstream: Any
) -> list[Row]:
    """One row per request: number of prompt rows and of trailing text rows, whether all are bit-equal, and the largest
    difference. upstream: a loaded qwen_tts.Qwen3TTSModel of the same checkpoint and dtype."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), dtype=dtype)
    rows = []
    for request in requests:
        prompt = builder.build(request)
        embeds, trailing, pad = prompt_embeds(upstream, request)
        theirs = torch.cat((embeds, trailing, pad[None], pad[None]))  # both sides pad after the end of the text
        ours = torch.cat((prompt.embeds, *(prompt.row(t)[None] for t in range(len(trailing) + 2))))
        same_size = prompt.embeds.shape == embeds.shape
        found = {
            "prompt_rows": len(embeds),
            "trailing_rows": len(trailing),
            "equal": same_size and torch.equal(ours, theirs),
            "max_abs_error": float((ours.float() - theirs.float()).abs().max()) if same_size else None,
        }
        rows.append(_labels(checkpoint, request, dtype) | found)
    return rows


def compare_codes(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    sampling: Sampling,
    seed: int,
    max_frames: int,
    dtype: torch.dtype,
    upstream: Any,
    until_s: float = math.inf,
) -> list[Row]:
    """One row per request: number of frames, whether codes are equal, and the first difference, (frame, codebook) or
    None. Sampling uses the rng "torch", as upstream does. upstream: a loaded qwen_tts.Qwen3TTSModel. until_s: a time of
    time.perf_counter, after which no request but the first is begun."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), dtype=dtype)
    backend = TorchBackend(checkpoint.config, checkpoint.tensors(), dtype=dtype)
    sampling, rows = replace(sampling, rng="torch"), []
    for request in requests:
        if rows and time.perf_counter() > until_s:
            break
        codes = generate_codes(upstream, request, sampling, seed, max_frames)
        mismatch = first_mismatch(our_codes(backend, builder.build(request), sampling, seed, max_frames), codes)
        compared = {"sampled": sampling.talker.do_sample, "frames": len(codes), "equal": mismatch is None}
        rows.append(_labels(checkpoint, request, dtype) | compared | {"first_mismatch": mismatch})
    return rows


@torch.inference_mode()
def our_codes(
    backend: Any, prompt: Any, sampling: Sampling, seed: int, max_frames: int, until_s: float = math.inf
) -> Tensor:
    """Codes (T, 16) int64 of one stream of a backend, T <= max_frames; after `until_s` only a first frame is made."""
    state = backend.start(prompt, sampling, seed, max_frames)
    frames: list[Tensor] = []
    while len(frames) < max_frames and not (frames and time.perf_counter() > until_s):
        codes = backend.step(state, prompt.row(len(frames) - 1) if frames else None).codes
        if codes is None:
            break
        frames.append(torch.as_tensor(codes))
    return torch.stack(frames) if frames else torch.zeros(0, NUM_CODEBOOKS, dtype=torch.int64)


def first_mismatch(found: Tensor, expected: Tensor) -> tuple[int, int] | None:
    """(frame, codebook) of the first difference of two (T, 16), or None; a missing frame differs in codebook 0."""
    common = min(len(found), len(expected))
    differences = (found[:common] != expected[:common]).nonzero()
    if len(differences):
        return int(differences[0, 0]), int(differences[0, 1])
    return None if len(found) == len(expected) else (common, 0)


def _labels(checkpoint: Checkpoint, request: Request, dtype: torch.dtype) -> Row:
    mode = checkpoint.config.type.name
    if request.voice is not None:
        mode += " x-vector" if request.voice.codes is None else " in-context"
    return {
        "mode": mode + (" + instruct" if request.instruct else ""),
        "language": request.language,
        "speaker": request.speaker,
        "layout": request.layout or "default",
        "dtype": next(name for name, value in DTYPES.items() if value == dtype),
        "text": request.text,
    }
