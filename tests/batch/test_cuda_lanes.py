"""Many utterances in one tick against the oracle, one by one, as an engine plays them: see `lane_player`."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lane_player import CountingCodec, Player, differences, expected_codes, random_segments

from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.engine.pages import Copy, Pages
from mktts.engine.scheduler import Piece, Tick, TickSettings
from mktts.engine.stream import Segment
from mktts.errors import EngineError, PromptError, SamplingError
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling

pytestmark = pytest.mark.gpu
SETTINGS = TickSettings(
    buckets=((4, 0), (4, 64), (16, 0), (16, 64), (16, 256)), max_lanes=16, max_rows=256, few_lanes=4
)
FRAMES, SLOTS = 10, 12


def lanes_of(checkpoint, graphs: bool = True, slots: int = SLOTS):
    from mktts.batch.cuda.lanes import CudaLanes

    device = torch.device("cuda")
    return CudaLanes(
        checkpoint.config, checkpoint.tensors(), device, torch.float32, slots=slots, positions=256, pages=6 * slots,
        codec=CountingCodec(slots + 1, device), settings=SETTINGS, graphs=graphs,
        primed=lambda: SimpleNamespace(of=len),
    )  # fmt: skip


def oracle_of(checkpoint) -> TorchBackend:
    return TorchBackend(checkpoint.config, checkpoint.tensors(), torch.device("cuda"), torch.float32)


def segments_of(checkpoint, count: int, **settings):
    return random_segments(checkpoint.config, torch.device("cuda"), count, FRAMES, **settings)


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


@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.bfloat16, True), (torch.float32, False)])
def test_all_that_a_bucket_launches_is_compiled_before_it_is_recorded(tiny, dtype, deterministic, monkeypatch):
    """Else it would compile one kernel after the other, for minutes: what is asked for once must be every binary."""
    from triton import knobs

    from mktts.batch.cuda.codec import CudaCodec
    from mktts.batch.cuda.kernels import attention, draws, products, rows
    from mktts.batch.cuda.lanes import CudaLanes
    from mktts.codec import product_kernels, row_kernels
    from mktts.kernel import rows as kernel_rows

    for module in (attention, product_kernels, row_kernels, draws, products, rows, kernel_rows):
        for kernel in vars(module).values():
            if hasattr(kernel, "device_caches"):
                kernel.device_caches.clear()  # as in a new process
    device = torch.device("cuda")
    codec = CudaCodec(partial(CodecDecoder, tiny.codec_config, tiny.codec_tensors(), device), SLOTS + 1, "fast")
    lanes = CudaLanes(
        tiny.config, tiny.tensors(), device, dtype, slots=SLOTS, positions=256, pages=6 * SLOTS, codec=codec,
        settings=SETTINGS, deterministic=deterministic,
    )  # fmt: skip
    built: dict[str, list[str]] = {}

    @contextmanager
    def announce(what: str):
        built[what] = []
        yield

    def heard(*, src, **_of_it):  # of a kernel from Triton's cache on the disk too
        built[next(reversed(built))].append(src.name)

    monkeypatch.setattr("mktts.batch.cuda.lanes.announced", announce)
    knobs.compilation.listener = heard
    try:
        lanes.prepare()
    finally:
        knobs.compilation.listener = None
    loaded, recorded = built.values()
    assert recorded == [] and 20 < len(loaded) < 300, "a kernel is built once, not once a launch"


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

    pages, device, rng = 12, torch.device("cuda"), np.random.default_rng(0)
    book = Pages(pages, 4, 128)
    memory = PagedMemory(book, tiny.config.talker, pages, device, torch.float32)
    memory.memory.normal_()
    expected = memory.memory.cpu()
    for _ in range(5):
        for source, target, rows in zip(*rng.integers(0, pages, (2, 9)), rng.integers(1, 65, 9), strict=True):
            if source != target:
                book._copies.append(Copy(int(source), int(target), int(rows)))
                expected[target, ..., :rows, :] = expected[source, ..., :rows, :]
        memory.push()
    assert torch.equal(memory.memory.cpu(), expected)
