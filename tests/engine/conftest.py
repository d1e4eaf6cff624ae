"""Synthesizers on fake models, on each engine."""

from __future__ import annotations

from functools import partial

import pytest
from fakes import FAKE_ENGINES, FakeBackend, fake_synthesizer


@pytest.fixture(params=FAKE_ENGINES)
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


@pytest.fixture
def held(make):
    """A synthesizer whose every step waits for a permit."""
    backend = FakeBackend(held=True)
    with make(backend) as synth:
        yield synth, backend
        backend.release()
