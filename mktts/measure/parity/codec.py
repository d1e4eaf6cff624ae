"""How far two decodings of the same codes are apart, and the ways of decoding that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import GraphedCodec
from mktts.errors import CodecError
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME

TOLERANCE = 1e-5  # largest absolute sample error that streamed and offline decoding may differ by, fp32, full scale 1


def random_codes(frames: int, seed: int, codebook_size: int = CODEBOOK_SIZE) -> Tensor:
    """Seeded uniform codes (T, 16) int64: not speech, but every codebook entry is as likely as any other."""
    return torch.randint(codebook_size, (frames, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(seed))


def decode_streamed(decoder: CodecDecoder | GraphedCodec, codes: Tensor, schedule: Sequence[int]) -> Tensor:
    """PCM (T * 1920,) of `codes` (T, 16) decoded chunk by chunk; the last entry of `schedule` (frames) repeats."""
    state = decoder.start()
    return torch.cat([decoder.decode(chunk, state) for chunk in split(codes, schedule)])


def decode_chunked(
    decoder: CodecDecoder, codes: Tensor, chunk_frames: int = 300, left_context_frames: int = 25
) -> Tensor:
    """PCM (T * 1920,) of `codes` (T, 16) as upstream's chunked_decode gives it: each chunk from silence, behind a few
    repeated frames of context. Exact within the first chunk, an approximation after it.

    Raises CodecError for sizes that cannot cut, and what `CodecDecoder.decode` raises.
    """
    if chunk_frames < 1 or left_context_frames < 0:
        raise CodecError(
            f"expected chunk_frames >= 1 and left_context_frames >= 0, got {chunk_frames} and {left_context_frames}"
        )
    if not len(codes):
        raise CodecError(f"codes must be (T >= 1, {NUM_CODEBOOKS}), got {tuple(codes.shape)}")
    pieces = []
    for start in range(0, len(codes), chunk_frames):
        context = left_context_frames if start > left_context_frames else start
        pcm = decoder.decode_all(codes[start - context : start + chunk_frames])
        pieces.append(pcm[context * SAMPLES_PER_FRAME :])
    return torch.cat(pieces)


def split(codes: Tensor, schedule: Sequence[int]) -> Iterator[Tensor]:
    """`codes` (T, 16) in chunks of the scheduled frames."""
    if not schedule or min(schedule) < 1:
        raise CodecError(f"schedule must hold one or more chunk sizes of at least 1 frame, got {tuple(schedule)}")
    start = 0
    for frames in chain(schedule, repeat(schedule[-1])):
        if start >= len(codes):
            return
        yield codes[start : start + frames]
        start += frames


def frame_errors(pcm: Tensor | np.ndarray, reference: Tensor | np.ndarray) -> np.ndarray:
    """Largest absolute sample error of each frame: (T * 1920,) twice -> (T,). Raises CodecError on other lengths."""
    found, expected = np.asarray(pcm, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if found.shape != expected.shape or found.ndim != 1 or len(found) % SAMPLES_PER_FRAME:
        raise CodecError(f"expected two equal lengths of whole frames, got {found.shape} and {expected.shape}")
    return np.abs(found - expected).reshape(-1, SAMPLES_PER_FRAME).max(axis=1)


def snr_db(pcm: Tensor | np.ndarray, reference: Tensor | np.ndarray) -> float:
    """Signal-to-noise ratio of `pcm` against `reference`; infinite where they are equal."""
    found, expected = np.asarray(pcm, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    noise = float(((found - expected) ** 2).sum())
    return float("inf") if noise == 0 else 10 * float(np.log10((expected**2).sum() / noise))
