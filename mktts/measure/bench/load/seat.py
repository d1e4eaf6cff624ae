"""One listener of another implementation, in a process of its own: `python -m mktts.measure.bench.load.seat SETTINGS`.

It says "ready" when it has spoken once, then, for every line `SECONDS SEED` that comes in, asks for one utterance
after the other, each when the one before it has been played, and prints a line of JSON for each: `begun_s` (of
`time.monotonic`, which all processes share) and `chunks`, [frames, seconds from begun_s]; then "done".
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from mktts.checkpoint import open_checkpoint
from mktts.measure.bench.peers import FasterPeer, Run, UpstreamPeer
from mktts.measure.bench.settings import sentence_of
from mktts.model.backend import default_dtype
from mktts.spec import FRAME_RATE_HZ


@dataclass(frozen=True)
class Seat:
    """peer: "faster" or "upstream". frames: the least and the most of an utterance. chunk_frames: where it streams."""

    checkpoint: str
    revision: str | None
    device: str
    peer: str
    frames: tuple[int, int]
    chunk_frames: int = 4

    @property
    def words(self) -> list[str]:
        """The program that is this seat."""
        return [sys.executable, "-m", "mktts.measure.bench.load.seat", json.dumps(asdict(self))]


def utterances(
    speak: Callable[[int, int], Run], frames: tuple[int, int], seconds: float, seed: int
) -> Iterator[dict[str, Any]]:
    """Until `seconds` are over: what came of `speak(frames, seed)`, as the module says. Waits while it is played."""
    rng = np.random.default_rng(seed)
    end_s = time.monotonic() + seconds
    index = 0
    while (begun_s := time.monotonic()) < end_s:
        run = speak(int(rng.integers(frames[0], frames[1] + 1)), 1_000 * seed + index)
        index += 1
        chunks = [(count, ms / 1e3) for count, ms in run.chunks]
        if not chunks and run.first_pcm_ms is not None:  # all at once
            chunks = [(round(run.audio_s * FRAME_RATE_HZ), run.first_pcm_ms / 1e3)]
        yield {"begun_s": begun_s, "chunks": chunks}
        if chunks:
            heard_s = begun_s + chunks[0][1] + sum(count for count, _ in chunks) / FRAME_RATE_HZ
            time.sleep(max(0.0, min(heard_s, end_s) - time.monotonic()))


def _speaker(seat: Seat) -> Callable[[int, int], Run]:
    checkpoint = open_checkpoint(seat.checkpoint, seat.revision)
    request, sampling = sentence_of(checkpoint), checkpoint.sampling()
    dtype = default_dtype(torch.device(seat.device))
    if seat.peer == "upstream":
        upstream = UpstreamPeer(checkpoint.folder, seat.device, dtype)
        return lambda frames, seed: upstream.utterance(request, sampling, seed, frames)
    faster = FasterPeer(checkpoint.folder, seat.device, dtype)
    return lambda frames, seed: faster.stream(request, sampling, seed, frames, seat.chunk_frames)


def main() -> None:
    """See the module."""
    words = json.loads(sys.argv[1])
    seat = Seat(**{**words, "frames": tuple(words["frames"])})
    speak = _speaker(seat)
    speak(26, 0)  # captures its graphs
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, seed = line.split()
        for utterance in utterances(speak, seat.frames, float(seconds), int(seed)):
            print(json.dumps(utterance), flush=True)
        print("done", flush=True)


if __name__ == "__main__":
    main()
