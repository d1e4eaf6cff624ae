"""Launches of a frame kernel that never ran: marks with known times, as a card would leave them."""

import numpy as np

from mktts.kernel.trace import PHASES, Marks, frame_points, talker_points
from mktts.measure.trace import BUILDS, Launch, document
from mktts.model.backend import Frame

GHZ = 1.9
FRAMES = 8
# Microseconds of a phase by its kind, beside the stream and alone; and of the first of them, waiting for weights.
TOOK_US = {"hop": (2.0, 1.0), "product": (1.0, 0.5), "other": (0.5, 0.5)}
STARVED_US = {"hop": 0.25, "product": 0.5, "other": 0.0}


def launch_of(layers: tuple[int, int], blocks: int, seed: int, alone: bool = False) -> Launch:
    """A block's mark lies around the time that all have in common, with a standard deviation of 20 cycles."""
    rng = np.random.default_rng(seed)
    points = frame_points(*layers)
    following = np.roll(points, -1)
    kinds = [PHASES[pair].kind for pair in zip(points, following, strict=True)]
    took = np.array([TOOK_US[kind][alone] for kind in kinds])
    ends = np.cumsum(np.tile(took, FRAMES)) * 1e3 * GHZ
    common = np.concatenate([[0.0], ends[:-1]])
    clocks = rng.integers(0, 1 << 38, blocks)
    noted = common + rng.normal(0, 20.0, (blocks, len(common)))
    cycles = np.rint(noted).astype(np.int64) + clocks[:, None] + 10_000
    starved = np.tile(np.roll([0 if alone else STARVED_US[kind] for kind in kinds], 1), FRAMES) * 1e3 * GHZ
    talker = talker_points(layers[0])
    frame = Frame(None, took[:talker].sum() / 1e3, took[talker:].sum() / 1e3)
    marks = Marks(np.tile(points, FRAMES), cycles, np.rint(np.tile(starved, (blocks, 1))).astype(np.int64))
    return Launch([frame] * FRAMES, marks)


def launches_of(layers: tuple[int, int], blocks: int, count: int = 2) -> dict[str, list[Launch]]:
    beside, alone = ([launch_of(layers, blocks, seed, alone) for seed in range(count)] for alone in (False, True))
    return {"": [Launch(launch.frames) for launch in beside], BUILDS[0]: beside, BUILDS[1]: alone}


def document_of(layers: tuple[int, int] = (28, 5), blocks: int = 128) -> dict:
    """What `python -m mktts lab trace` writes, of a card that is not there."""
    found = document(launches_of(layers, blocks, 1), layers)
    settings = {"checkpoint": "0b6 custom_voice", "blocks": blocks, "group": blocks // 8, "random_weights": True}
    about = {"device": "No GPU at all", "date": "2026-01-02T03:04:05+00:00", "revision": "0123456789abcdef"}
    settings["weight_bytes"] = {"talker": 887_000_000, "predictor": 2_422_000_000}
    return {**about, **found, "settings": {**found["settings"], **settings, "launches": 1, "context": 200}}
