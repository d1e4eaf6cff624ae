"""Lanes whose ticks take a time that is known."""

from __future__ import annotations

from types import SimpleNamespace


class TimedLanes:
    """Notes its ticks; each takes as long as it has lanes, twice that with a codec, a tenth more when ordered."""

    def __init__(self, codec: str | None, ordered: bool, slots: int, rows: int) -> None:
        self.settings = SimpleNamespace(max_rows=700, max_lanes=4, bucket=lambda model, lanes, rows: (lanes, rows))
        self.model, self.rows, self.factor = (
            None,
            dict.fromkeys(range(slots), 0),
            (2 if codec else 1) * (1.1 if ordered else 1),
        )
        self.pages = SimpleNamespace(rows_per_slot=rows, open=lambda slot, rows: None)
        self.prompts: dict[int, int] = {}

    def enter(self, slot, reference):
        assert reference is None

    def begin(self, slot, prompt, sampling, seed, copies=()):
        self.prompts[slot] = len(prompt)

    def launch(self, tick, rows):
        assert len(rows) == len(tick.lanes) and sum(row is None for row in rows) == tick.new_lanes and tick.rows <= 700
        for piece in tick.pieces:
            assert piece.start == self.rows[piece.slot]
            self.rows[piece.slot] += piece.rows
            assert piece.last == (self.rows[piece.slot] == self.prompts[piece.slot])
        for slot in tick.lanes.tolist():
            assert self.rows[slot] >= self.prompts[slot]
            self.rows[slot] += slot not in [piece.slot for piece in tick.pieces]
            assert self.rows[slot] <= self.pages.rows_per_slot
        return 1e-3 * len(tick.lanes) * self.factor

    def collect(self, launched):
        return SimpleNamespace(took_s=launched)
