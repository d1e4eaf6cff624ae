"""Compares the codec, streamed as on the serving device, with one pass of fp32 operators on the CPU."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import GraphedCodec, codec_for
from mktts.engine.options import SCHEDULE
from mktts.engine.upstream import decode_codes
from mktts.errors import BackendUnavailable, CodecError
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME

TOLERANCE = 1e-5  # largest absolute sample difference of streamed and offline decoding, fp32, full scale 1
FRAMES = 100  # beyond the codec's attention window of 72; upstream decodes up to 300 without approximation
SEED = 7
# Least signal-to-noise ratio of a decode: on the CPU, fp32 operators in another order; on CUDA, the fused kernels,
# whose products of two fp16 halves gave 88 dB at full size.
LEAST_SNR_DB = {"cpu": 100.0, "cuda": 80.0}
_LEAST_FRAMES = 8


def random_codes(frames: int, seed: int, codebook_size: int = CODEBOOK_SIZE) -> Tensor:
    """Seeded uniform codes (T, 16) int64. They are not speech, but use all codebook entries with equal probability."""
    return torch.randint(codebook_size, (frames, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(seed))


def decode_streamed(decoder: CodecDecoder | GraphedCodec, codes: Tensor, schedule: Sequence[int]) -> Tensor:
    """PCM (T * 1920,) of `codes` (T, 16), decoded in chunks of `schedule` frames, whose last entry repeats."""
    state, pcm, start = decoder.start(), [], 0
    for frames in chain(schedule, repeat(schedule[-1])):
        if start >= len(codes):
            return torch.cat(pcm)
        pcm.append(decoder.decode(codes[start : start + frames], state))
        start += frames


def frame_errors(pcm: Tensor | np.ndarray, reference: Tensor | np.ndarray) -> np.ndarray:
    """Largest absolute sample error (T,) of each frame of two (T * 1920,). Raises CodecError for other lengths."""
    found, expected = np.asarray(pcm, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if found.shape != expected.shape or found.ndim != 1 or len(found) % SAMPLES_PER_FRAME:
        raise CodecError(f"expected two equal lengths of whole frames, got {found.shape} and {expected.shape}")
    return np.abs(found - expected).reshape(-1, SAMPLES_PER_FRAME).max(axis=1)


def snr_db(pcm: Tensor | np.ndarray, reference: Tensor | np.ndarray) -> float:
    """Signal-to-noise ratio of `pcm` against `reference` in dB; infinite if they are equal."""
    found, expected = np.asarray(pcm, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    noise = float(((found - expected) ** 2).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10((expected**2).sum() / noise))


def distance(found: Tensor, reference: Tensor, least_db: float) -> dict[str, Any]:
    """Compares PCM: equal (every sample), snr_db (None if equal), max_abs_error (of 1), least_db, and passed."""
    ratio_db, equal = snr_db(found, reference), torch.equal(found, reference)
    return {
        "equal": equal,
        "snr_db": None if equal else ratio_db,
        "max_abs_error": float(frame_errors(found, reference).max()),
        "least_db": least_db,
        "passed": ratio_db >= least_db,
    }


def codec_section(
    checkpoint: Checkpoint, upstream: Callable[[], Any], device: str, until_s: float = math.inf
) -> dict[str, Any]:
    """Compares codes decoded in the default chunks, as the synthesizer on this device does, with our decode in one pass
    and with upstream's. upstream: returns qwen-tts's model, or raises BackendUnavailable. until_s: a time of
    time.perf_counter; if it is near, fewer frames are decoded."""
    config, tensors = checkpoint.codec_config, checkpoint.codec_tensors()
    ours, whole = codec_for(config, tensors, device), CodecDecoder(config, tensors)
    codes = random_codes(FRAMES, SEED, config.codebook_size)
    begun_s = time.perf_counter()
    whole.decode_all(codes[:_LEAST_FRAMES])
    now_s = time.perf_counter()
    # The frames are decoded three times: streamed, whole and by upstream. A fourth of the time is kept in reserve.
    most = _LEAST_FRAMES * (until_s - now_s) / (now_s - begun_s) / 4
    codes = codes[: int(max(_LEAST_FRAMES, min(len(codes), most)))]
    streamed, offline = decode_streamed(ours, codes, SCHEDULE).cpu(), whole.decode_all(codes)
    least = LEAST_SNR_DB[torch.device(device).type]
    found: dict[str, Any] = {"frames": len(codes), "asked": FRAMES, "schedule": list(SCHEDULE), "variant": ours.name}
    compared = {"streamed_to_whole": distance(streamed, offline, least)}
    try:
        theirs = torch.as_tensor(decode_codes(upstream(), codes))
        compared["streamed_to_upstream"] = distance(streamed, theirs, least)
        compared["whole_to_upstream"] = distance(offline, theirs, LEAST_SNR_DB["cpu"])
    except BackendUnavailable as error:
        found["upstream"] = f"skipped: {error}"
    for name, error in compared.items():
        if not error["passed"]:
            found["reason"] = f"{name}: {error['snr_db']:.1f} dB, at least {error['least_db']:g} dB expected"
    return found | compared
