"""deterministic=True: a stream's codes are the same bits whatever its neighbours, the number of lanes, how its prompt
was cut over ticks, and whether its prefix was kept. In bf16, sampled, on a CUDA device."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lane_player import CountingCodec, Player, exact_buckets, pages_for, random_segments
from torch import Tensor

from mktts.batch import BatchSettings
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.engine.lanes import Lanes
from mktts.measure.parity.kernel import RowStream
from mktts.model.sampling import Choice, Sampling
from mktts.spec import ModelConfig
from mktts.synth import Synthesizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SIZES = (8, 32, 64, 128, 192, 256, 384, 512)
PROMPTS = (2, 31, 64, 65, 75, 100, 130, 150)  # rows of the streams that are compared; the last four share a prefix
PREFIX_ROWS, SHARING, KEY = 70, 4, "voice"  # one whole page and a part of the next
FRAMES = 8
SAMPLINGS = (Sampling(), Sampling(Choice(top_p=0.8), Choice(top_p=0.8)), Sampling().greedy(), Sampling(Choice(top_k=0)))


def rows(count: int, width: int, seed: int) -> Tensor:
    return (0.5 * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))).to(DEVICE, torch.bfloat16)


def streams_of(width: int) -> list[RowStream]:
    prefix, streams = rows(PREFIX_ROWS, width, 1), []
    for index, count in enumerate(PROMPTS):
        prompt, shares = rows(count, width, 10 + index), index >= len(PROMPTS) - SHARING
        if shares:
            prompt[:PREFIX_ROWS] = prefix
        text, sampling = rows(FRAMES, width, 50 + index), SAMPLINGS[index % len(SAMPLINGS)]
        key, kept = (KEY, PREFIX_ROWS) if shares else (None, 0)
        streams.append(RowStream(prompt, text, sampling, 7 * index + (3 << 33), key, kept))
    return streams


def neighbours(config: ModelConfig, count: int) -> list[RowStream]:
    """Short streams, so that many come and go; a page of keys and values each."""
    return [replace(one, key=None, prefix=0) for one in random_segments(config, DEVICE, count, FRAMES, longest=12)]


def played_on(lanes: Lanes, streams: list[RowStream], size: int, seed: int = 0) -> tuple[Player, list[Tensor]]:
    """A player, and the codes (T, 16) of each stream."""
    player = Player(lanes, [[one] for one in streams], sounds=False, seed=seed, size=size, plain=True)
    player.play()
    return player, [torch.stack(player.made[stream][0]) for stream in range(len(streams))]


def lanes_of(checkpoint: Checkpoint, pages: int) -> Lanes:
    from mktts.batch.cuda.lanes import CudaLanes

    lanes = CudaLanes(
        checkpoint.config, checkpoint.tensors(), DEVICE, torch.bfloat16, slots=max(SIZES), pages=pages,
        positions=max(PROMPTS) + FRAMES, settings=exact_buckets(SIZES), deterministic=True,
        codec=CountingCodec(max(SIZES) + 1, DEVICE),
    )  # fmt: skip
    lanes.prepare()
    return lanes


@pytest.fixture(scope="module", params=["random:0.6b", "small"])
def played(request) -> Iterator[SimpleNamespace]:
    """codes: of each stream alone in a tick of the smallest bucket, no prefix kept."""
    checkpoint = open_checkpoint(request.param)
    streams = streams_of(checkpoint.config.talker.hidden_size)
    lanes = lanes_of(checkpoint, pages_for([*streams, *neighbours(checkpoint.config, max(SIZES))]))
    codes = []
    for stream in streams:
        lanes.pages.forget(KEY.__eq__)
        codes += played_on(lanes, [stream], SIZES[0])[1]
    assert lanes.deterministic and len({tuple(found.flatten().tolist()) for found in codes}) == len(codes)
    yield SimpleNamespace(lanes=lanes, config=checkpoint.config, streams=streams, codes=codes)
    del lanes
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("size", SIZES)
def test_codes_do_not_depend_on_lanes_neighbours_cuts_or_kept_prefixes(played, size, kept):
    chance = np.random.default_rng(size + kept)
    count = len(played.streams)
    crowd = neighbours(played.config, max(size, count) - count)
    places = sorted(chance.choice(len(crowd) + count, count, replace=False).tolist())
    for place, stream in zip(places, played.streams, strict=True):
        crowd.insert(place, stream)
    if kept:
        played_on(played.lanes, played.streams[-1:], SIZES[0])
    else:
        played.lanes.pages.forget(KEY.__eq__)
        crowd = [replace(stream, key=None) for stream in crowd]
    playing, made = played_on(played.lanes, crowd, size, seed=2 * size + kept)
    assert all(torch.equal(made[place], codes) for place, codes in zip(places, played.codes, strict=True))
    assert playing.kept == (SHARING if kept else 0)
    assert playing.cut > 0 or size == SIZES[0]


def test_a_stream_of_the_synthesizer_sounds_the_same_alone_and_beside_sixty_others():
    text, settings = "Whoever listens to this hears the same, whoever else is here.", {"seed": 11, "max_frames": 40}
    batch = BatchSettings(max_streams=64, memory_bytes=1 << 30)
    with Synthesizer.load("small", device="cuda", deterministic=True, batch=batch) as synth:
        alone = synth.stream(text, **settings)
        pcm, codes = alone.read(), alone.codes
        others = [synth.stream(f"Somebody else says sentence {i}.", seed=i, max_frames=60) for i in range(60)]
        beside = synth.stream(text, **settings)
        assert np.array_equal(beside.read(), pcm) and torch.equal(beside.codes, codes) and len(codes) > 1
        assert synth.lanes.deterministic and synth.ticks["open"].max() > 20 and synth.ticks["lanes"].max() > 4
        for other in others:
            other.cancel()
