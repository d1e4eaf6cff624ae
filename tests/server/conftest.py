"""A server over the tiny checkpoint: one a module, and between its tests nothing open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served, served, until

from mktts.checkpoint import Checkpoint
from mktts.synth import Synthesizer


@pytest.fixture(scope="module")
def synthesizer(tiny: Checkpoint) -> Iterator[Synthesizer]:
    with Synthesizer.load(tiny, engine="single") as made:
        yield made


@pytest.fixture(scope="module")
def running(synthesizer: Synthesizer) -> Iterator[Served]:
    with served(synthesizer) as server:
        yield server


@pytest.fixture
def server(running: Served) -> Served:
    until(lambda: running.studio.streams_open == 0, "the streams of the test before to end")
    running.watched.streams.clear()
    return running
