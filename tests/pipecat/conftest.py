"""What the tests of Pipecat's services speak with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mktts.checkpoint import Checkpoint
from mktts.synth import Synthesizer


@pytest.fixture(scope="module")
def synth(tiny: Checkpoint) -> Iterator[Synthesizer]:
    with Synthesizer.load(tiny, device="cpu", cpu_threads=1, engine="single") as loaded:
        yield loaded
