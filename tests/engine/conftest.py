"""Synthesizers on fake models, on each engine."""

from collections.abc import Iterator
from functools import partial

import pytest
from fakes import FAKE_ENGINES, FakeBackend, fake_synthesizer

from mktts.synth import Synthesizer


@pytest.fixture(params=FAKE_ENGINES)
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


@pytest.fixture(scope="session")
def speaking() -> Iterator[Synthesizer]:
    """The voice in the box."""
    with Synthesizer.load("small", device="cpu", engine="single") as synthesizer:
        yield synthesizer


@pytest.fixture
def held(make):
    """A synthesizer whose every step waits for a permit."""
    backend = FakeBackend(held=True)
    with make(backend) as synth:
        yield synth, backend
        backend.release()
