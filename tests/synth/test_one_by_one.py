"""A lone stream's turn is what the scheduler would decide, without asking it."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from mktts.batch.board import Board
from mktts.batch.scheduler import next_tick
from mktts.batch.tick import Tick
from mktts.synth import one_by_one


@pytest.mark.parametrize("paced", [True, False])
def test_a_lone_streams_ticks_are_the_schedulers(paced):
    board, slot = Board(8), 5
    board.enter(slot, 1.0, paced)
    board.prompt(slot, 1)
    for frame in range(40):  # without a reader: its lead grows beyond every limit
        now_s = 1.0 + 0.01 * frame
        decided = next_tick(board, now_s, one_by_one._TICK_MODEL, one_by_one._TICKS)
        tick = one_by_one._tick_of(board, slot, now_s)
        for field in fields(Tick):
            expected, found = getattr(decided, field.name), getattr(tick, field.name)
            assert type(expected) is type(found) and np.array_equal(expected, found), (frame, field.name)
        board.begin(tick)
        board.chunk(slot, frame, frame + 1)
        board.finish(tick, now_s + 0.005)
