"""What lanes of many streams need of the host, tried without a GPU: pages, blocks of ticks, memory, tiles of products.
States of the codec by slot are in ../test_lanes.py."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mktts.batch import BatchSettings
from mktts.batch.cuda.memory import shared_spaces, space_shapes
from mktts.batch.cuda.stage import PENALTY, BlockLayout, packed
from mktts.batch.cuda.tiles import _MEASURED, MEASURED, Kind, plan_of, product_tile, step_depth
from mktts.engine.admission import Admission
from mktts.engine.pages import NO_OWNER, Pages
from mktts.engine.scheduler import Piece, Tick
from mktts.errors import BackendUnavailable, CapacityError
from mktts.model.sampling import Choice, Sampling
from mktts.synth.loading import batch_runner

CPU = torch.device("cpu")
SHARED_BYTES = {"H100": 232_448, "A100": 166_912, "RTX 4090": 101_376}  # of one program, CUDA Programming Guide
ROWS = (1, 16, 17, 64, 128, 256, 512, 1_024, 2_048)


def test_a_tick_stands_in_its_block():
    layout = BlockLayout(4, 8)
    settings = np.stack([packed(Sampling(repetition_penalty=1 + slot), slot) for slot in range(9)])
    pieces = (Piece(7, 64, 2, True), Piece(3, 0, 4, False), Piece(5, 1, 1, True))
    tick = Tick((4, 8), np.array([7, 5, 2], np.int32), 2, pieces=pieces)
    prompts = [10_000 * (1 + i) + 256 * np.arange(66) for i in range(3)]
    block = layout.padded(9)
    layout.fill(block, tick, [777], settings, prompts)
    parts = layout.parts(torch.from_numpy(block))
    assert sum(part.numel() * part.element_size() for part in vars(parts).values()) == 8 * layout.words == block.nbytes
    assert parts.slots.tolist() == [7, 5, 2, 9] and parts.fresh.tolist() == [1, 1, 0, 1]
    assert parts.ends.tolist() == [66, 2, 0, 0] and parts.text.tolist() == [0, 0, 777, 0]
    assert parts.selected.tolist() == [4 + 1, 4 + 6, 2, 3]
    assert parts.row_slots.tolist() == [7, 7, 3, 3, 3, 3, 5, 9]
    assert parts.row_positions.tolist() == [64, 65, 0, 1, 2, 3, 1, 0]
    assert parts.row_addresses.tolist() == [
        10_000 + 64 * 256, 10_000 + 65 * 256, 20_000, 20_256, 20_512, 20_768, 30_256, 0,
    ]  # fmt: skip
    assert parts.settings[:, PENALTY].view(torch.float32).tolist() == [8.0, 6.0, 3.0, np.float32(1.05)]
    assert parts.settings[:, 0].tolist() == [7, 5, 2, 0]


def test_settings_are_packed_by_their_bits():
    talker, predictor = Choice(temperature=0.3, top_k=7, top_p=0.9), Choice(do_sample=False, top_k=2**40)
    row = packed(Sampling(talker, predictor, repetition_penalty=1.5), (3 << 32) | 0xFFFFFFFE)
    floats = row.view(np.float32)
    assert row[:2].tolist() == [-2, 3]
    assert (row[2], row[4], row[6], row[8]) == (1, 7, 0, 2**31 - 1)
    assert floats[[3, 5, 7, 9, 10]] == pytest.approx([0.3, 0.9, 0.9, 1.0, 1.5])


def test_buckets_share_one_memory_as_large_as_the_largest_needs(tiny):
    shapes = [space_shapes(tiny.config, torch.float32, *size) for size in ((2, 16, 8), (8, 0, 1), (4, 4, 2))]
    spaces = shared_spaces(shapes, CPU)
    for name, (shape, dtype) in shapes[1].items():
        tensors = [getattr(space, name) for space in spaces]
        assert tensors[1].shape == shape and tensors[1].dtype == dtype
        assert len({tensor.data_ptr() for tensor in tensors}) == 1


SIZES = [(768, 5376, 768), (96, 672, 96), (288, 384, 192), (6144, 3072, 1536), (12, 84, 12)]


@given(
    rows=st.integers(1, 1_000_000),
    size=st.sampled_from(SIZES + [key[:3] for key in MEASURED]),
    split=st.booleans(),
    shared=st.sampled_from(sorted(SHARED_BYTES.values())),
)
def test_every_tile_fits_its_device_and_steps_alike_whatever_the_rows(rows, size, split, shared):
    tile = product_tile(rows, *size, split, shared)
    assert tile.shared_bytes(split) <= shared
    assert tile.depth == step_depth(size[2]) and tile.rows >= 64
    assert {n & (n - 1) for n in (tile.rows, tile.outs, tile.extra, tile.depth)} == {0}


@pytest.mark.parametrize("limit", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("kind", "columns", "depth"), [*_MEASURED, (Kind.JOINED, 64, 96), (Kind.JOINED, 1_024, 2_560)])
def test_a_program_fits_its_card_parts_are_whole_blocks_and_no_others_are_split(kind, columns, depth, itemsize, limit):
    plan = plan_of(kind, columns, depth, itemsize, limit)
    for rows in ROWS:
        tile = plan.tile(rows).fitted(kind, itemsize, limit)
        assert tile.shared_bytes(kind, itemsize) <= limit and tile.stages >= 2
    assert kind is Kind.JOINED or plan.parts == 1
    for _, tile in plan.tiles:
        assert plan.parts == 1 or depth % (plan.parts * tile.depth) == 0
        assert plan.parts > 1 or not tile.split


def test_where_triton_is_missing_it_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "mktts.batch.cuda.lanes", None)  # importing it then fails, as without triton
    with pytest.raises(BackendUnavailable, match="engine='batch' needs triton"):
        batch_runner(tiny, SimpleNamespace(device=torch.device("cuda"), batch=BatchSettings()), None, Admission())


PAGE_ROWS, SLOTS = 4, 6
KEYS = st.sampled_from(["voice a", "voice b", "voice c"])
PREFIX_ROWS = {"voice a": 3, "voice b": 8, "voice c": 10}


class Device(RuleBasedStateMachine):
    """The book beside a device on which every row really is written, copied and read back through the table."""

    opened = Bundle("opened")

    @initialize(pages=st.sampled_from([30, 12, 5]), max_kept=st.sampled_from([8, 4, 0]))
    def begin(self, pages, max_kept):
        self.book = Pages(pages, SLOTS, 40, PAGE_ROWS, max_kept)
        self.memory, self.table = np.full((pages, PAGE_ROWS), "", object), self.book.table.copy()
        self.total = pages - 1
        self.held: dict[int, tuple[int, list[str]]] = {}  # slot -> most rows, what its rows must hold

    def write(self, slot: int, start: int, rows: list[str]) -> None:
        for position, row in enumerate(rows, start):
            self.memory[self.table[slot, position // PAGE_ROWS], position % PAGE_ROWS] = row

    def change(self) -> None:
        copies, slots = self.book.changes()
        for source, target, rows in copies:
            self.memory[target, :rows] = self.memory[source, :rows]
        self.table[slots] = self.book.table[slots]
        assert not any(map(len, self.book.changes()))

    @rule(target=opened, key=KEYS | st.none(), own=st.integers(1, 9), keeps=st.booleans())
    def open(self, key, own, keeps):
        prefix = [f"{key} {row}" for row in range(PREFIX_ROWS[key])] if key else []
        rows = len(prefix) + own
        slot = next((slot for slot in range(SLOTS) if slot not in self.held), None)
        if slot is None:
            return multiple()
        before = self.book.free, self.book.kept
        if not self.book.fits(rows, key):
            with pytest.raises(CapacityError):
                self.book.open(slot, rows, key)
            assert (self.book.free, self.book.kept) == before
            return multiple()
        kept_rows = self.book.open(slot, rows, key)
        assert kept_rows in (0, len(prefix))
        shared = kept_rows // PAGE_ROWS  # full pages; a partial one is copied
        assert not shared or tuple(self.book.table[slot, :shared]) == tuple(self.book._kept[key].pages[:shared])
        self.change()
        content = prefix + [f"slot {slot} {row}" for row in range(own)]
        self.write(slot, kept_rows, content[kept_rows:])
        if key and keeps:
            self.book.keep(slot, key, len(prefix))
            self.change()
        self.held[slot] = rows, content
        return slot

    @rule(slot=consumes(opened))
    def close(self, slot):
        if slot in self.held:
            self.book.close(slot)
            del self.held[slot]

    @rule(key=KEYS)
    def forget(self, key):
        self.book.forget(key.__eq__)
        assert self.book.find(key) == 0

    @invariant()
    def every_row_is_what_its_stream_wrote(self):
        for slot, (_, content) in self.held.items():
            pages = self.table[slot]
            found = [self.memory[pages[row // PAGE_ROWS], row % PAGE_ROWS] for row in range(len(content))]
            assert found == content

    @invariant()
    def pages_are_conserved(self):
        book, free = self.book, self.book._free
        used = {int(page) for slot in self.held for page in book.table[slot] if page != NO_OWNER}
        kept = {page for prefix in book._kept.values() for page in prefix.pages}
        assert len(set(free)) == len(free) and not set(free) & (used | kept) and NO_OWNER not in free
        assert len(free) + len(used | kept) == self.total and len(kept) == book.kept <= book.max_kept
        for slot in range(SLOTS + 1):
            held = int((book.table[slot] != NO_OWNER).sum())
            assert held >= book.count(self.held[slot][0]) if slot in self.held else held == 0

    @invariant()
    def what_no_stream_uses_can_be_had(self):
        used = {int(page) for slot in self.held for page in self.book.table[slot] if page != NO_OWNER}
        idle = {page for prefix in self.book._kept.values() for page in prefix.pages} - used
        needed = {p for prefix in self.book._kept.values() if used & set(prefix.pages) for p in prefix.pages}
        most = min(self.book.free + len(idle - needed), 10)
        assert most == 0 or self.book.fits(most * PAGE_ROWS)
        assert most == 10 or not self.book.fits(most * PAGE_ROWS + 1)

    def teardown(self):
        if hasattr(self, "book"):
            for slot in list(self.held):
                self.book.close(slot)
            self.book.forget(PREFIX_ROWS.__contains__)
            assert self.book.free == self.total


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_prefix_that_was_used_longest_ago_gives_way():
    book = Pages(8, 4, 28, PAGE_ROWS, max_kept=4)
    for slot, key in enumerate("abc"):
        book.open(slot, 4, key)
        book.keep(slot, key, 4)
        book.close(slot)
    book.open(0, 8, "a")
    book.close(0)
    book.open(1, 20)  # five pages: four are free
    assert [bool(book.find(key)) for key in "abc"] == [True, False, True]
