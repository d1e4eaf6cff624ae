"""The frame kernel's own source, run on the CPU in grids that do not divide: codes and errors are the oracles'."""

import ctypes
from collections.abc import Callable
from functools import cache

import pytest
import torch
from csrc_on_cpu import COMPILER, RINGS, backend_on_cpu, build, observed
from other_cards import FORCED_FRAMES, Model, error_ratio

from mktts.errors import EngineError
from mktts.kernel import grid
from mktts.kernel.backend import MegakernelBackend
from mktts.kernel.grid import Shape

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs g++")]
model_of = cache(lambda name: Model.make(name, "cpu", FORCED_FRAMES))


@pytest.fixture
def on_cpu(monkeypatch, tmp_path) -> Callable[..., MegakernelBackend]:
    def make(name: str, group: int, **changed: int) -> MegakernelBackend:
        """group: blocks of one. changed: as of `build`."""
        model = model_of(name)
        shape = Shape(model.config.talker, model.config.predictor, group * model.config.talker.num_key_value_heads)
        return backend_on_cpu(model, shape, build(shape, tmp_path, **changed), group, monkeypatch)

    return make


# Blocks of a group; rows that come at once. A share in several matrices; a remainder.
@pytest.mark.parametrize(("name", "group", "most_rows"), [("small", 3, 32), ("tiny-projected", 7, 128)])
def test_blocks_in_an_order_of_chance_make_the_oracles_frames(name, group, most_rows, monkeypatch, on_cpu):
    monkeypatch.setattr(grid, "MOST_ROWS", most_rows)
    model = model_of(name)
    found = observed(on_cpu(name, group, most_rows=most_rows), model.prompt)
    assert torch.equal(torch.stack([frame.codes for frame in found]), model.codes[:FORCED_FRAMES])
    assert error_ratio(model, found) <= 1.25


@pytest.mark.parametrize(("ring", "talker_copies", "group"), RINGS)
def test_every_cards_ring_takes_the_copies_of_every_size(ring, talker_copies, group, on_cpu):
    model = model_of("tiny-projected")
    backend = on_cpu("tiny-projected", group, ring=ring, talker_copies=talker_copies)
    (found,) = observed(backend, model.prompt, frames=1)
    assert torch.equal(found.codes, model.codes[0])


def test_a_copy_that_never_ends_ends_the_launch_by_name(on_cpu):
    backend = on_cpu("tiny-projected", 6, ring=2)
    backend._launcher.library.host_lose_copy(ctypes.c_ulonglong(1000))
    with pytest.raises(AssertionError, match="thread 2.. waited too long for the end of an earlier copy"):
        observed(backend, model_of("tiny-projected").prompt, frames=1)


@pytest.mark.parametrize(("tape", "at"), [("talker_head_tape", slice(None)), ("predictor_head_tape", 14)])
def test_logits_of_no_numbers_end_their_stream_by_name(tape, at, on_cpu):
    backend = on_cpu("tiny-projected", 6)
    backend._weights[tape][at] = torch.nan
    with pytest.raises(EngineError, match="gave no number"):
        observed(backend, model_of("tiny-projected").prompt, frames=1)
