"""The codec by itself."""

from __future__ import annotations

import time

import torch

from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import GraphedCodec
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS

CHUNKS_FRAMES = (1, 2, 4, 8)
_WARM_UP_FRAMES = 96  # past the codec's attention window, so that every timed call does full work


def codec_ms(decoder: CodecDecoder | GraphedCodec, samples: int) -> dict[str, list[float]]:
    """Figure (`codec_N_ms`) -> ms of `samples` chunks of N frames of random codes, from codes to PCM, both on the host.

    As the synthesizer decodes: `submit`, and its result waited for.
    """
    size = min(CODEBOOK_SIZE, decoder.config.codebook_size)
    codes = torch.randint(size, (_WARM_UP_FRAMES, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(0))
    figures: dict[str, list[float]] = {}
    for frames in CHUNKS_FRAMES:
        state, times_ms = decoder.start(), []
        for start in range(0, _WARM_UP_FRAMES, frames):
            decoder.submit(codes[start : start + frames], state).result()
        for _ in range(samples):
            begun_s = time.perf_counter()
            decoder.submit(codes[:frames], state).result()
            times_ms.append(1e3 * (time.perf_counter() - begun_s))
        figures[f"codec_{frames}_ms"] = times_ms
    return figures
