"""Page table of the keys and values: which stream or prefix has which page. It is the host's; the pages themselves lie
on the device. One thread at a time.

A stream takes every page that its declared maximum may need when it opens, so none stops for want of one. The rows of a
prompt's prefix can be kept by key: full pages are shared, read only; a partial last page is copied. Prefixes that no
open stream uses are dropped, least recently used first. Page 0 is nobody's: it fills unused entries of the table."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from mktts.errors import CapacityError, EngineError

PAGE_ROWS = 64
NO_OWNER = 0


class Copy(NamedTuple):
    """The first `rows` rows of page `source` are to be copied to page `target` before the next tick."""

    source: int
    target: int
    rows: int


class KeptPrefix(NamedTuple):
    """A prefix of `rows` rows; its pages in order, the last one partial where `rows` is no multiple of a page."""

    rows: int
    pages: list[int]


class Pages:
    """The pages of one device. table: (slots + 1, pages a slot) int32, the page of each `page_rows` positions of a
    slot; its last row belongs to no stream."""

    def __init__(
        self, pages: int, slots: int, rows_per_slot: int, page_rows: int = PAGE_ROWS, max_kept: int | None = None
    ) -> None:
        """pages: with page 0. rows_per_slot: the most that one stream may declare. max_kept: pages that prefixes may
        hold; None: an eighth of all, 256 at most. Raises CapacityError where not even one stream could open."""
        self.page_rows = page_rows
        self.rows_per_slot = min(rows_per_slot, (pages - 1) * page_rows)
        if min(page_rows, slots, self.rows_per_slot) < 1:
            got = f"{pages} pages of {page_rows} rows, {slots} slots of {rows_per_slot} rows"
            expected = "at least 2 pages and one row a page, slot and stream"
            raise CapacityError(f"expected {expected}, got {got}: free device memory or lower the limits")
        self.max_kept = min(pages // 8, 256) if max_kept is None else max_kept
        self.table = np.full((slots + 1, self.count(self.rows_per_slot)), NO_OWNER, np.int32)
        self._free = list(range(pages - 1, NO_OWNER, -1))
        self._users = [0] * pages  # slots that hold the page
        self._keepers = [0] * pages  # prefixes that hold it
        self._kept: OrderedDict[Hashable, KeptPrefix] = OrderedDict()
        self._changed: set[int] = set()
        self._copies: list[Copy] = []

    def count(self, rows: int) -> int:
        return -(-rows // self.page_rows)

    @property
    def all(self) -> int:
        """Pages that streams and prefixes may hold."""
        return len(self._users) - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def kept(self) -> int:
        """Pages that prefixes hold, those that streams share included."""
        return len({page for kept in self._kept.values() for page in kept.pages})

    def find(self, key: Hashable | None) -> int:
        """Rows of the prefix kept under `key`; 0 where there is none."""
        return self._kept[key].rows if key in self._kept else 0

    def fits(self, rows: int, key: Hashable | None = None, beside: int = 0) -> bool:
        """Whether a stream of at most `rows` rows with this prefix could open now and leave `beside` pages."""
        if not 0 < rows <= self.rows_per_slot:
            return False
        more = self.count(rows) - self.find(key) // self.page_rows + beside
        return more <= len(self._free) or more <= len(self._free) + len(self._idle(key))

    def changes(self) -> tuple[list[Copy], np.ndarray]:
        """What has changed since the last call and must reach the device before the next tick: copies, to be made one
        after the other, and then the slots (n,) whose rows of `table` changed."""
        copies, changed = self._copies, np.array(sorted(self._changed), np.int64)
        self._copies, self._changed = [], set()
        return copies, changed

    def open(self, slot: int, rows: int, key: Hashable | None = None) -> int:
        """Gives `slot` every page that `rows` positions need. Returns how many rows the prefix kept under `key` has
        filled already, 0 for none. Raises CapacityError, without changing anything, where there are too few pages (see
        `fits`)."""
        if not self.fits(rows, key):
            takes = f"takes {self.count(rows)} pages; {len(self._free) + len(self._idle(None))} can be had"
            hint = "shorten the text or lower max_frames, or wait until other streams end"
            limit = f"one stream may have 1 to {self.rows_per_slot} rows: {hint}"
            raise CapacityError(f"a stream of {rows} rows {takes}, and {limit}")
        kept, kept_rows = self._kept.get(key), self.find(key)
        shared = [] if kept is None else kept.pages[: kept_rows // self.page_rows]
        count = self.count(rows) - len(shared)
        while len(self._free) < count:
            if not self._forget_one(but=key):
                raise EngineError(f"{count} pages were promised, {len(self._free)} are free: the page table is wrong")
        own = [self._free.pop() for _ in range(count)]
        pages = shared + own
        for page in pages:
            self._users[page] += 1
        self.table[slot, : len(pages)] = pages
        self._changed.add(slot)
        if kept is not None:
            self._kept.move_to_end(key)
            if partial := kept_rows % self.page_rows:
                self._copies.append(Copy(kept.pages[-1], own[0], partial))
        return kept_rows

    def close(self, slot: int) -> None:
        """Frees the pages of `slot`, if it has any, except those that others share."""
        for page in reversed(self.table[slot].tolist()):
            if page != NO_OWNER:
                self._users[page] -= 1
                if not self._users[page] and not self._keepers[page]:
                    self._free.append(page)
        self.table[slot] = NO_OWNER
        self._changed.add(slot)

    def keep(self, slot: int, key: Hashable, rows: int) -> None:
        """Keeps the first `rows` rows of `slot` under `key`, unless the key is known or there is no room."""
        held = self.table[slot].tolist()
        full, partial = divmod(rows, self.page_rows)
        if key in self._kept or full + bool(partial) > self.max_kept:
            return
        assert NO_OWNER not in held[: full + bool(partial)], f"slot {slot} has no {rows} rows"
        new = sum(not self._keepers[page] for page in held[:full]) + bool(partial)
        while self.kept + new > self.max_kept or (partial and not self._free):
            if not self._forget_one():
                return
        last = [self._free.pop()] if partial else []
        pages = held[:full] + last
        for page in pages:
            self._keepers[page] += 1
        self._kept[key] = KeptPrefix(rows, pages)
        if partial:
            self._copies.append(Copy(held[full], last[0], partial))

    def forget(self, unwanted: Callable[[Hashable], bool]) -> None:
        """Drops the prefixes whose keys are `unwanted`; streams that share their pages go on."""
        for key in [key for key in self._kept if unwanted(key)]:
            self._drop(key)

    def _idle(self, but: Hashable | None) -> set[int]:
        """Pages that would become free if all prefixes without a user, except `but`, were dropped."""
        idle: set[int] = set()
        needed: set[int] = set()
        for key, kept in self._kept.items():
            in_use = any(self._users[page] for page in kept.pages)
            (needed if key == but or in_use else idle).update(kept.pages)
        return idle - needed

    def _drop(self, key: Hashable) -> None:
        for page in reversed(self._kept.pop(key).pages):
            self._keepers[page] -= 1
            if not self._users[page] and not self._keepers[page]:
                self._free.append(page)

    def _forget_one(self, but: Hashable | None = None) -> bool:
        """Drops the prefix that was used longest ago, of those without a user. Returns False where there is none."""
        for key, kept in self._kept.items():
            if key != but and not any(self._users[page] for page in kept.pages):
                self._drop(key)
                return True
        return False
