"""Trimming across the borders of chunks, whatever their lengths."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from mktts.audio import first_audible_sample
from mktts.engine.chunker import Chunker
from mktts.engine.options import StreamOptions
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, SAMPLE_RATE_HZ


@pytest.mark.parametrize("size", [1, 100, 239, 240, 241, 1_000, 1_920, 5_000])
def test_chunks_of_any_length_are_trimmed_as_the_whole_is(size):
    """The sound begins 60 samples before a window ends, too late for that one to be audible."""
    sound_begins = 9 * AUDIBLE_WINDOW_SAMPLES - 60
    random = np.random.default_rng(3)
    whole = np.concatenate((1e-4 * random.normal(size=sound_begins), 0.01 * random.normal(size=3_000)))
    whole = whole.astype(np.float32)
    assert first_audible_sample(whole) == 9 * AUDIBLE_WINDOW_SAMPLES
    pieces = iter([whole[start : start + size] for start in range(0, len(whole), size)])
    chunker = Chunker(
        lambda codes: SimpleNamespace(result=lambda: next(pieces), pcm16=None),
        StreamOptions(schedule=(1,), trim_lead=True),
    )
    chunks = []
    for _ in range(0, len(whole), size):
        chunker.add(None)
        chunks.append(chunker.take(time.perf_counter()))
    heard = [chunk for chunk in chunks if chunk]
    kept = 9 * AUDIBLE_WINDOW_SAMPLES - SAMPLE_RATE_HZ * 40 // 1_000
    assert np.array_equal(np.concatenate([chunk.pcm for chunk in heard]), whole[kept:])
    assert heard[0].start_s == pytest.approx(kept / SAMPLE_RATE_HZ)
    assert sum(chunk.frames for chunk in heard) == len(chunks)
