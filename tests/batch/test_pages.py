"""Pages are conserved, nobody reads another stream's rows, and a stream that opened never lacks one."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mktts.engine.pages import NO_OWNER, Pages
from mktts.errors import CapacityError

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
