"""Checkpoints that the whole suite shares: made once per run, whichever xdist worker comes first."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mktts.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(scope="session", autouse=True)
def checkpoint_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Points $MKTTS_CACHE at a folder all workers (and the processes they start) share, unless it is set already."""
    if "MKTTS_CACHE" in os.environ:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    os.environ["MKTTS_CACHE"] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "mktts-cache")
    yield
    del os.environ["MKTTS_CACHE"]


@pytest.fixture(scope="session")
def tiny(checkpoint_cache: None) -> Checkpoint:
    """CustomVoice, 64 wide, tiny codec."""
    return open_checkpoint("random:tiny")


@pytest.fixture(scope="session")
def tiny_base(checkpoint_cache: None) -> Checkpoint:
    return open_checkpoint("random:tiny:base")


@pytest.fixture(scope="session")
def tiny_design(checkpoint_cache: None) -> Checkpoint:
    return open_checkpoint("random:tiny:voice_design")


@pytest.fixture(scope="session")
def tiny_projected(checkpoint_cache: None) -> Checkpoint:
    """CustomVoice with the talker wider than the predictor, as in 1.7B; takes an instruction."""
    return open_checkpoint("random:tiny-projected")


@pytest.fixture(scope="session")
def tiny_margin(checkpoint_cache: None) -> Checkpoint:
    """CustomVoice whose greedy choices win by a wide margin."""
    return open_checkpoint("random:tiny:margin")
