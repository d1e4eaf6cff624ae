"""Talker and codec in threads of their own: the same frames as in the caller's, in whatever order ticks are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from lane_player import Player, differences, random_segments

from mktts.batch.lanes import Made
from mktts.batch.plain.lanes import InOrder, TorchLanes
from mktts.batch.tick import Piece, Tick
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.errors import EngineError
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling
from mktts.spec import SAMPLES_PER_FRAME

SLOTS = 9


class Noted(TorchLanes):
    """Notes what every tick made."""

    def collect(self, launched) -> Made:
        made = super().collect(launched)
        self.all_made = [*getattr(self, "all_made", []), made]
        return made


def lanes_of(checkpoint: Checkpoint, threads: bool, dtype: torch.dtype = torch.float32) -> Noted:
    decoder = CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors())
    return Noted(checkpoint.config, checkpoint.tensors(), decoder, SLOTS, 200, 1 << 28, dtype, threads=threads)


def played(
    opened: Checkpoint, threads: bool = False, dtype: torch.dtype = torch.float32, count: int = 24, **changes: object
) -> Player:
    """Streams that joined, skipped ticks, ended, were cancelled and had slots of others, with the oracle's codes."""
    table = opened.tensors()["talker.model.codec_embedding.weight"].float()
    segments = random_segments(opened.config, "cpu", count, 9, longest=20, ends_after=table)
    segments = [replace(segment, key=None, prefix=0, **changes) for segment in segments]
    # the first of two may end by itself, with a tick launched behind its end
    streams = [[segments[i + 1], segments[i]] for i in range(0, count, 2)]
    player = Player(lanes_of(opened, threads, dtype), streams, hurry=0.9, cancelled={3: 2, 8: 1}, sounds=False)
    player.play()
    assert not differences(player, TorchBackend(opened.config, opened.tensors(), "cpu", dtype))
    return player


@pytest.mark.parametrize("name", ["random:tiny", "random:tiny-projected", "small"])
def test_codes_are_the_oracles_under_joins_skips_cancels_and_reuse(name: str) -> None:
    played(open_checkpoint(name))


def test_bfloat16_gives_the_oracles_greedy_codes(tiny_margin: Checkpoint) -> None:
    played(tiny_margin, dtype=torch.bfloat16, count=8, sampling=Sampling().greedy())


def test_two_threads_make_what_one_makes() -> None:
    opened = open_checkpoint("random:tiny:margin:eos5")
    one, two = (played(opened, threads) for threads in (False, True))
    assert two.wasted > 0, "some end while their next tick is on its way"
    assert max(len(made.codes) for made in one.lanes.all_made) >= 6, "so many that the codec works beside the next tick"
    for first, second in zip(one.lanes.all_made, two.lanes.all_made, strict=True):
        assert np.array_equal(first.ended, second.ended) and second.took_s > 0
        assert np.array_equal(first.codes, second.codes) and np.array_equal(first.pcm, second.pcm)


def entered(lanes: TorchLanes, tiny: Checkpoint, slots: Sequence[int]) -> Tick:
    """A tick that begins a stream in each of the slots."""
    prompt = 0.5 * torch.randn(7, tiny.config.talker.hidden_size, generator=torch.Generator().manual_seed(1))
    for slot in slots:
        lanes.enter(slot, None)
        lanes.begin(slot, prompt, Sampling().greedy(), slot)
    pieces = tuple(Piece(slot, 0, len(prompt), True) for slot in slots)
    return Tick((len(slots), 7 * len(slots)), np.array(slots, np.int32), len(slots), pieces)


def test_a_tick_of_few_lanes_is_waited_for_and_one_of_many_runs_beside(tiny: Checkpoint) -> None:
    lanes, alone = lanes_of(tiny, True), lanes_of(tiny, False)
    for slots, beside in ((range(2), False), (range(2, 9), True)):
        made = lanes.collect(lanes.launch(entered(lanes, tiny, slots), [None] * len(slots)))
        assert lanes.overlaps == beside and made.pcm.shape == (len(slots), SAMPLES_PER_FRAME)
        alone.launch(entered(alone, tiny, slots), [None] * len(slots))
        assert not alone.overlaps
    assert lanes.settings.max_tick_s < alone.settings.max_tick_s, "a frame is heard two such ticks later"


def test_a_codec_that_fails_ends_its_tick_and_the_next_one_goes_on(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = lanes_of(tiny, True)
    with monkeypatch.context() as patch:
        patch.setattr(lanes._codec, "decode", lambda *_: 1 / 0)
        launched = lanes.launch(entered(lanes, tiny, range(7)), [None] * 7)
        with pytest.raises(ZeroDivisionError):
            lanes.collect(launched)
    for slot in range(7):
        lanes.leave(slot)
    made = lanes.collect(lanes.launch(entered(lanes, tiny, range(8)), [None] * 8))
    assert np.abs(made.pcm).max() > 0


@pytest.mark.parametrize("spoken", [range(2), range(2, 4)], ids=["they speak", "others speak"])
def test_streams_that_could_not_enter_are_told_once_with_the_next_tick(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, spoken: range
) -> None:
    lanes = lanes_of(tiny, True)
    with monkeypatch.context() as patch:
        patch.setattr(lanes._codec, "enter", lambda *_: 1 / 0)
        tick = entered(lanes, tiny, range(2))
        lanes._decoding.do(int).result()  # they have tried to
    if spoken != range(2):
        tick = entered(lanes, tiny, spoken)
    with pytest.raises(ZeroDivisionError):
        lanes.collect(lanes.launch(tick, [None] * 2))
    for slot in range(4):
        lanes.leave(slot)
    made = lanes.collect(lanes.launch(entered(lanes, tiny, range(3)), [None] * 3))
    assert np.abs(made.pcm).max(axis=1).all()


def test_a_prompt_that_is_not_finite_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(EngineError, match="gave no number"):
        lanes_of(tiny, True).begin(6, torch.full((3, tiny.config.talker.hidden_size), torch.nan), Sampling(), 1)


@pytest.mark.parametrize("name", [None, "one"])
def test_work_is_done_in_order_and_its_errors_are_kept_for_who_asks(name: str | None) -> None:
    line, done = InOrder(name), []
    waited = [line.do(lambda i=i: done.append((i, threading.current_thread().name))) for i in range(50)]
    failed = line.do(lambda: 1 / 0)
    assert [future.result() for future in waited] == [None] * 50
    assert [i for i, _ in done] == list(range(50))
    assert {who == threading.current_thread().name for _, who in done} == {name is None}
    with pytest.raises(ZeroDivisionError):
        failed.result()
