"""Ours against upstream qwen-tts, row by row: prompt embeddings bit for bit, codes frame for frame.

`python -m mktts.measure.parity.upstream --checkpoint random:0.6b --frames 12 --out FILE` writes the comparison with
the machine it ran on. Notebook 02 and the tests use the same functions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import SOURCES, Checkpoint, open_checkpoint
from mktts.errors import MkttsError
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, ModelConfig
from mktts.synth.upstream import generate_codes, load_upstream, prompt_embeds

Row = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def standard_requests(checkpoint: Checkpoint) -> list[Request]:
    """Requests for every mode this type of checkpoint has; a clone's voice is made of seeded numbers.

    Where a checkpoint lacks a released speaker or language, its own speakers take turns and "auto" stands in.
    """
    config = checkpoint.config
    if config.model_type == "base":
        x_vector, short, long = (made_up_voice(checkpoint, frames) for frames in (0, 3, 60))
        return [
            Request("This iPhone clones a voice.", voice=x_vector),
            Request("Six, seven, 8 and 90.", "english", voice=x_vector, layout="whole"),
            Request("Спасибо, всё хорошо.", "russian", voice=x_vector),
            Request("The text is longer than the reference here, so that some of it trails.", voice=short),
            Request("Short.", "chinese", voice=long),
            Request("ขอบคุณครับ", voice=short, layout="whole"),
            Request("Merci beaucoup !", "french", voice=long, layout="whole"),
        ]
    if config.model_type == "voice_design":
        return [
            Request("JavaScript has no voice of its own.", instruct="A calm, low voice."),
            Request("No instruction at all.", "english"),
            Request("再见。", "chinese", instruct="活泼的女声", layout="streaming"),
            Request("สวัสดีครับ 12", layout="streaming"),
            Request("Why?", "german", instruct="Angry!"),
        ]
    requests = [
        Request("My iPhone runs JavaScript, twice.", speaker="Ryan"),
        Request("One, two, 3 and 45.", "english", "serena", layout="streaming"),
        Request("你好，世界。", "auto", "eric"),
        Request("今天天气很好！", "chinese", "dylan", layout="streaming"),
        Request("A dialect speaker who speaks English.", "English", "eric"),
        Request("สวัสดี 😀", speaker="ono_anna", layout="streaming"),
        Request("한국어도 합니다.", "korean", "sohee"),
        Request("x", "japanese", "uncle_fu", layout="streaming"),
        Request("An address: mail@example.org, 10:45 — “quoted”; done...", speaker="aiden"),
    ]
    if config.takes_instruct:
        requests.append(Request("Said in a certain way.", "english", "vivian", instruct="Whisper, slowly."))
        requests.append(Request("Said happily.", speaker="dylan", instruct="开心地说", layout="streaming"))
    return [_within(config, request, turn) for turn, request in enumerate(requests)]


def _within(config: ModelConfig, request: Request, turn: int) -> Request:
    if str(request.speaker).lower() not in config.speakers:
        request = replace(request, speaker=list(config.speakers)[turn % len(config.speakers)])
    return request if request.language.lower() in ("auto", *config.languages) else replace(request, language="auto")


def made_up_voice(checkpoint: Checkpoint, frames: int) -> Voice:
    """A voice of seeded random numbers with `frames` reference frames; 0 makes an x-vector."""
    generator = torch.Generator().manual_seed(frames)
    size = checkpoint.config.talker.hidden_size
    codes = torch.randint(0, CODEBOOK_SIZE, (frames, NUM_CODEBOOKS), generator=generator)
    transcript = "What the reference says."
    embedding = torch.randn(size, generator=generator)
    return Voice(embedding, codes if frames else None, transcript if frames else None, checkpoint.config.model_size)


def compare_prompts(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    dtype: torch.dtype = torch.bfloat16,
    upstream: Any = None,
) -> list[Row]:
    """One row a request: prompt rows, text rows that trail, whether all are bit-equal, and the largest difference.

    `upstream` is a loaded qwen_tts.Qwen3TTSModel of the same checkpoint and dtype; None loads it.
    """
    upstream = upstream or load_upstream(checkpoint, dtype)
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), dtype=dtype)
    rows = []
    for request in requests:
        prompt = builder.build(request)
        embeds, trailing, pad = prompt_embeds(upstream, request)
        frames = len(trailing) + 2  # past the end both sides give the padding row
        expected = torch.stack([trailing[t] if t < len(trailing) else pad for t in range(frames)])
        found = torch.stack([prompt.row(t) for t in range(frames)])
        same_shape = prompt.embeds.shape == embeds.shape
        error = (prompt.embeds.float() - embeds.float()).abs().max() if same_shape else torch.inf
        error = max(float(error), float((found.float() - expected.float()).abs().max()))
        equal = torch.equal(prompt.embeds, embeds) and torch.equal(found, expected)
        shape = {"prompt_rows": len(embeds), "trailing_rows": len(trailing)}
        rows.append(_labels(checkpoint, request, dtype) | shape | {"equal": equal, "max_abs_error": error})
    return rows


def compare_codes(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    sampling: Sampling | None = None,
    seed: int = 0,
    max_frames: int = 24,
    dtype: torch.dtype = torch.bfloat16,
    upstream: Any = None,
) -> list[Row]:
    """One row a request: frames made, whether codes are equal, the first difference, and ms per frame of both.

    `sampling=None` takes the checkpoint's own; its rng is set to "torch", the one upstream has. `first_mismatch` is
    (frame, codebook), None where equal. Upstream runs first and, where it is loaded here, is freed before ours loads.
    """
    sampling = replace(sampling or checkpoint.sampling(), rng="torch")
    expected = _upstream_codes(upstream or load_upstream(checkpoint, dtype), requests, sampling, seed, max_frames)
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), dtype=dtype)
    backend = TorchBackend(checkpoint.config, checkpoint.tensors(), dtype=dtype)
    rows = []
    for request, (codes, upstream_s) in zip(requests, expected, strict=True):
        found, torch_s = _timed(lambda r=request: our_codes(backend, builder.build(r), sampling, seed, max_frames))
        mismatch = first_mismatch(found, codes)
        rows.append(
            _labels(checkpoint, request, dtype)
            | {
                "sampled": sampling.talker.do_sample,
                "frames": len(codes),
                "equal": mismatch is None,
                "first_mismatch": mismatch,
                "upstream_ms_per_frame": 1e3 * upstream_s / len(codes),
                "torch_ms_per_frame": 1e3 * torch_s / max(1, len(found)),
            }
        )
    return rows


def our_codes(backend: TorchBackend, prompt: Prompt, sampling: Sampling, seed: int, max_frames: int) -> Tensor:
    """Codes (T, 16) of one stream of the torch backend."""
    state = backend.start(prompt, sampling, seed, max_frames)
    frames: list[Tensor] = []
    while len(frames) < max_frames:
        codes = backend.step(state, prompt.row(len(frames) - 1) if frames else None).codes
        if codes is None:
            break
        frames.append(codes)
    return torch.stack(frames)


def first_mismatch(found: Tensor, expected: Tensor) -> tuple[int, int] | None:
    """(frame, codebook) of the first difference of two (T, 16); a missing frame differs in codebook 0."""
    common = min(len(found), len(expected))
    differences = (found[:common] != expected[:common]).nonzero()
    if len(differences):
        return int(differences[0, 0]), int(differences[0, 1])
    return None if len(found) == len(expected) else (common, 0)


def _upstream_codes(model: Any, requests: Sequence[Request], *rest: Any) -> list[tuple[Tensor, float]]:
    return [_timed(lambda r=request: generate_codes(model, r, *rest)) for request in requests]


def _timed(call: Any) -> tuple[Any, float]:
    begun_s = time.perf_counter()
    return call(), time.perf_counter() - begun_s


def _labels(checkpoint: Checkpoint, request: Request, dtype: torch.dtype) -> Row:
    mode = checkpoint.config.model_type
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison of the command line; returns 0 where everything is equal, 1 where not."""
    parser = argparse.ArgumentParser(
        prog="python -m mktts.measure.parity.upstream", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--checkpoint", default="random:tiny", help=f"{SOURCES} (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--frames", type=int, default=12, help="frames a request (default 12)")
    parser.add_argument("--requests", type=int, default=1, help="how many of the standard requests (default 1)")
    parser.add_argument("--out", type=Path, help="JSON file for rows and machine")
    given = parser.parse_args(arguments)
    try:
        report = run(given.checkpoint, DTYPES[given.dtype], given.frames, given.requests)
    except MkttsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.out:
        from mktts.common import write_json

        write_json(given.out, report)
    for row in report["prompts"] + report["codes"]:
        print({name: value for name, value in row.items() if name not in ("text", "speaker")})
    return 0 if report["equal"] else 1


def run(source: str, dtype: torch.dtype, frames: int, requests: int) -> Row:
    """Prompts, then greedy and sampled codes of the first standard requests; upstream is loaded once for each part."""
    from mktts.measure.environment import environment

    checkpoint, begun_s = open_checkpoint(source), time.perf_counter()
    asked = standard_requests(checkpoint)[:requests]
    prompts = compare_prompts(checkpoint, asked, dtype)
    sampling = checkpoint.sampling()
    codes = [
        row
        for chosen in (sampling.greedy(), sampling)
        for row in compare_codes(checkpoint, asked, chosen, max_frames=frames, dtype=dtype)
    ]
    return {
        "checkpoint": source,
        "weights": "random weights: timing and parity only" if checkpoint.is_random else str(checkpoint.revision),
        "equal": all(row["equal"] for row in prompts + codes),
        "prompts": prompts,
        # The times of a run this short, on a machine that may be shared, are no measurement: they stay out.
        "codes": [{k: v for k, v in row.items() if not k.endswith("_ms_per_frame")} for row in codes],
        "seconds": time.perf_counter() - begun_s,
        "environment": environment(),
    }


if __name__ == "__main__":
    sys.exit(main())
