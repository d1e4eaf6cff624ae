"""Times of single frames, and of chunks as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mktts.errors import MetricsError
from mktts.measure.bench.settings import BenchSettings
from mktts.model.backend import Backend, Frame
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling

if TYPE_CHECKING:
    from mktts.synth.one_by_one import StepModel

STEADY_FRAMES = 8  # of a chunk once a stream runs: the last entry of the default schedule
_SEEDS = 50  # streams that random weights may end early before a section gives up


def timed_frames(
    backend: Backend, prompt: Prompt, sampling: Sampling, settings: BenchSettings
) -> Iterator[tuple[float, Frame]]:
    """`samples` frames around the context: wall ms of `step`, codes on the host, and the frame."""
    left = settings.samples
    last = settings.context + settings.around
    for seed in range(_SEEDS):
        state = backend.start(prompt, sampling, seed, last + 1 - len(prompt.embeds))
        for position in range(len(prompt.embeds) - 1, last):  # of the talker's input of the frame
            row = prompt.row(position - len(prompt.embeds)) if position >= len(prompt.embeds) else None
            begun_s = time.perf_counter()
            frame = backend.step(state, row)
            elapsed_ms = 1e3 * (time.perf_counter() - begun_s)
            if frame.codes is None:
                break
            if position >= settings.context - settings.around and seed > 0 and row is not None:  # seed 0 warms up
                yield elapsed_ms, frame
                left -= 1
                if left == 0:
                    return
    raise MetricsError(f"{_SEEDS} streams ended before {settings.samples} frames at context {settings.context}")


def kernel_frames(model: StepModel, prompt: Prompt, sampling: Sampling, settings: BenchSettings) -> Iterator[Frame]:
    """`samples` frames around the context, several a launch and without the first: times of the kernel alone."""
    from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH

    rows, left = len(prompt.embeds), settings.samples
    for seed in range(_SEEDS):
        state, made = model.backend.start(prompt, sampling, seed, settings.context + settings.around), 0
        while rows + made + MAX_FRAMES_A_LAUNCH < settings.context + settings.around:
            text = [prompt.row(t - 1) if t else None for t in range(made, made + MAX_FRAMES_A_LAUNCH)]
            frames = [frame for frame in model.backend.frames(state, text) if frame.codes is not None]
            if seed and rows + made > settings.context - settings.around:
                for frame in frames[1 : 1 + left]:
                    left -= 1
                    yield frame
            made += len(frames)
            if left == 0:
                return
            if len(frames) < len(text):
                break
    raise MetricsError(f"{_SEEDS} streams ended before {settings.samples} frames at context {settings.context}")


def steady_frame_ms(chunks: Sequence[tuple[int, float]]) -> list[float]:
    """Milliseconds a frame with its codec: of each two chunks of STEADY_FRAMES that follow each other, the time
    between their arrivals over the frames. chunks: (frames, ms from the call to its PCM on the host), in order."""
    pairs = zip(chunks, chunks[1:], strict=False)
    return [(ready - before) / size for (last, before), (size, ready) in pairs if last == size == STEADY_FRAMES]
