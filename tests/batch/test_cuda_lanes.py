"""Many utterances in one tick against the oracle, one by one, as an engine plays them: see `lane_player`.

deterministic=True: a stream's codes are the same bits whatever its neighbours, the number of lanes, how its prompt was
cut over ticks, and whether its prefix was kept. In bf16, sampled."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lane_player import CountingCodec, Player, differences, exact_buckets, expected_codes, pages_for, random_segments
from torch import Tensor

from mktts.batch import BatchSettings
from mktts.checkpoint import open_checkpoint
from mktts.engine.lanes import Lanes
from mktts.engine.pages import Copy, Pages
from mktts.engine.scheduler import Piece, Tick, TickSettings
from mktts.engine.stream import Segment
from mktts.errors import EngineError, PromptError, SamplingError
from mktts.measure.parity.kernel import RowStream
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Choice, Sampling
from mktts.spec import ModelConfig
from mktts.synth import Synthesizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SETTINGS = TickSettings(((4, 0), (4, 64), (16, 0), (16, 64), (16, 256)), max_lanes=16, max_rows=256, few_lanes=4)
FRAMES, SLOTS = 10, 12


def lanes_of(checkpoint, graphs: bool = True, slots: int = SLOTS):
    from mktts.batch.cuda.lanes import CudaLanes

    return CudaLanes(
        checkpoint.config, checkpoint.tensors(), DEVICE, torch.float32, slots=slots, positions=256, pages=6 * slots,
        codec=CountingCodec(slots + 1, DEVICE), settings=SETTINGS, graphs=graphs,
        primed=lambda: SimpleNamespace(of=len),
    )  # fmt: skip


def oracle_of(checkpoint) -> TorchBackend:
    return TorchBackend(checkpoint.config, checkpoint.tensors(), DEVICE, torch.float32)


def segments_of(checkpoint, count: int, **settings):
    return random_segments(checkpoint.config, DEVICE, count, FRAMES, **settings)


@pytest.mark.parametrize("name", ["random:tiny:margin:eos5", "random:tiny-projected:margin:eos5"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_codes_are_the_oracles_under_joins_skips_ends_cuts_and_kept_prefixes(name, graphs):
    opened = open_checkpoint(name)
    ends = opened.tensors()["talker.model.codec_embedding.weight"].float()
    segments = segments_of(opened, 36, ends_after=ends)
    # the first of two may end by itself, with a tick launched behind its end
    streams = [[segments[i + 1], segments[i]] for i in range(0, 36, 2)] + [[s] for s in segments[1::4]]
    player = Player(lanes_of(opened, graphs), streams, cancelled={3: 1, 8: 2})
    player.lanes.prepare()
    player.play()
    assert differences(player, oracle_of(opened)) == []
    assert min(player.cut, player.kept, player.wasted) > 0


def test_a_lane_of_nan_harms_no_other(tiny):
    segments = segments_of(tiny, 6)
    broken = replace(segments[3], embeds=torch.full_like(segments[3].embeds, torch.nan))
    choices = [Sampling(talker=s.sampling.talker, predictor=s.sampling.talker) for s in segments]  # also with filters
    broken = [[replace(broken, sampling=sampling)] for sampling in choices]
    player = Player(lanes_of(tiny), [[s] for s in segments] + broken)
    player.play()
    for stream in range(6, 12):
        assert not player.made.pop(stream)[0], "a stream of NaN has no frames"
    assert differences(player, oracle_of(tiny)) == []


def test_a_slot_whose_pages_are_full_harms_no_other(tiny):
    """A stream that goes on beyond its pages, and beyond the table, as a tick launched too far ahead may."""
    segments = segments_of(tiny, 3)
    lanes = lanes_of(tiny)
    others = [[replace(s, text=s.text[:1].expand(FRAMES, -1).contiguous())] for s in segments[:2]]
    long = segments[2].embeds[:1].expand(250, -1).contiguous()
    lanes.pages.open(SLOTS - 1, 250)
    lanes.begin(SLOTS - 1, Segment(PromptRows(long), Sampling().greedy(), 1))
    lane = np.array([SLOTS - 1], np.int32)
    lanes.collect(lanes.launch(Tick((16, 256), lane, 1, pieces=(Piece(SLOTS - 1, 0, 250, True),)), [None]))
    player = Player(lanes, others)
    player._free.remove(SLOTS - 1)
    for frame in range(12):
        lanes.collect(lanes.launch(Tick((4, 0), lane), [long[0]]))
        if frame == 3:
            player.play()
    assert differences(player, oracle_of(tiny)) == []


def test_what_cannot_be_begun_or_run_is_named_and_changes_nothing(tiny):
    lanes, (segment, *_) = lanes_of(tiny), segments_of(tiny, 1)
    prompt, width = segment.embeds, segment.embeds.shape[1]
    with pytest.raises(PromptError, match=f"256, {width}"):
        lanes.begin(0, Segment(PromptRows(prompt[:, 1:]), Sampling(), 0))
    with pytest.raises(PromptError, match=f"256, {width}"):
        lanes.begin(0, Segment(PromptRows(prompt[:1].expand(257, -1)), Sampling(), 0))
    with pytest.raises(SamplingError, match="seed"):
        lanes.begin(0, Segment(PromptRows(prompt), Sampling(), -1))
    lanes.pages.open(0, len(prompt) + 10)
    lanes.begin(0, Segment(PromptRows(prompt), segment.sampling, segment.seed))
    lane, rows = np.array([0], np.int32), len(prompt)
    first = Tick((16, 256), lane, 1, pieces=(Piece(0, 0, rows, True),))
    for wrong, text, error in (
        (replace(first, bucket=(4, 32)), [None], EngineError),
        (replace(first, bucket=(4, 0)), [None], EngineError),
        (replace(first, pieces=(Piece(1, 0, rows, True),)), [None], EngineError),
        (replace(first, pieces=(Piece(0, 1, rows, True),)), [None], EngineError),
        (replace(first, pieces=(Piece(0, 0, rows, False),)), [None], EngineError),
        (replace(first, new_lanes=0), [prompt[0]], EngineError),
        (first, [prompt[0]], PromptError),
        (first, [], PromptError),
        (Tick((4, 0), lane), [None], PromptError),
        (Tick((4, 0), lane), [prompt[0, 1:]], PromptError),
    ):
        with pytest.raises(error):
            lanes.launch(wrong, text)
    waiting = [lanes.launch(first, [None])]
    waiting.append(lanes.launch(Tick((4, 0), lane), [segment.row(0).cpu().double()]))
    with pytest.raises(EngineError, match="collect one"):
        lanes.launch(Tick((4, 0), lane), [prompt[0]])
    with pytest.raises(EngineError, match="order"):
        lanes.collect(waiting[1])
    found = [lanes.collect(one).codes[0].tolist() for one in waiting]
    assert found == expected_codes(segment, oracle_of(tiny))[:2].tolist()


def test_copies_of_pages_are_made_as_if_one_after_the_other(tiny):
    from mktts.batch.cuda.frame import PagedMemory

    pages, rng = 12, np.random.default_rng(0)
    book = Pages(pages, 4, 128)
    memory = PagedMemory(book, tiny.config.talker, pages, DEVICE, torch.float32)
    memory.memory.normal_()
    expected = memory.memory.cpu()
    for _ in range(5):
        for source, target, rows in zip(*rng.integers(0, pages, (2, 9)), rng.integers(1, 65, 9), strict=True):
            if source != target:
                book._copies.append(Copy(int(source), int(target), int(rows)))
                expected[target, ..., :rows, :] = expected[source, ..., :rows, :]
        memory.push()
    assert torch.equal(memory.memory.cpu(), expected)


SIZES = (8, 32, 64, 128, 192, 256, 384, 512)
PROMPTS = (2, 31, 64, 65, 75, 100, 130, 150)  # rows of the streams that are compared; the last four share a prefix
PREFIX_ROWS, SHARING, KEY = 70, 4, "voice"  # one whole page and a part of the next
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


@pytest.fixture(scope="module", params=["random:0.6b", "small"])
def played(request) -> Iterator[SimpleNamespace]:
    """codes: of each stream alone in a tick of the smallest bucket, no prefix kept."""
    from mktts.batch.cuda.lanes import CudaLanes

    checkpoint = open_checkpoint(request.param)
    streams = streams_of(checkpoint.config.talker.hidden_size)
    lanes = CudaLanes(
        checkpoint.config, checkpoint.tensors(), DEVICE, torch.bfloat16, slots=max(SIZES), deterministic=True,
        pages=pages_for([*streams, *neighbours(checkpoint.config, max(SIZES))]), positions=max(PROMPTS) + FRAMES,
        settings=exact_buckets(SIZES), codec=CountingCodec(max(SIZES) + 1, DEVICE),
    )  # fmt: skip
    lanes.prepare()
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
