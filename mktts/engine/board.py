"""What the scheduler knows about the open streams: arrays by slot, written by the engine as news comes in.

A stream has the same slot from `open` to `close`. Times are seconds of one clock, which the caller reads. A listener
is taken to play from the first PCM on, in real time; where PCM came late, the listener has waited, and the frames
after it are wanted that much later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mktts.engine.tick import Tick
from mktts.errors import EngineError
from mktts.spec import FRAME_RATE_HZ

FRAME_S = 1 / FRAME_RATE_HZ
# A full buffer from which nothing was taken for so long: nobody reads. Who plays in real time takes more.
ABSENT_S = 2.0


class Board:
    """The open streams. All arrays have one entry a slot; read them freely, change them by the methods.

    open: in use. paced: somebody listens in real time; otherwise the frames are wanted as soon as others allow it.
    text_known: the talker's next input is there. full: the reader's buffer takes no more. serial: counts the streams
    that a slot has had. prompt_rows: rows of the prompt still to enter. context_rows: rows in the keys and values.
    frames_made, frames_taken: of all segments; made counts the tick that runs. chunk_start, chunk_end: frames made
    where the chunk begins that is being made, and where it is whole: before that its listener has none of it.
    arrived_s, newest_s (of the newest frame), playing_since_s (-inf before the first PCM), taken_s (of the newest frame
    that the reader took). resumed: waited for its text, which has come, and was in no tick since.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.open = np.zeros(slots, bool)
        self.paced = np.zeros(slots, bool)
        self.text_known = np.zeros(slots, bool)
        self.full = np.zeros(slots, bool)
        self.resumed = np.zeros(slots, bool)
        self.serial = np.zeros(slots, np.int64)
        self.prompt_rows = np.zeros(slots, np.int64)
        self.context_rows = np.zeros(slots, np.int64)
        self.frames_made = np.zeros(slots, np.int64)
        self.frames_taken = np.zeros(slots, np.int64)
        self.chunk_start = np.zeros(slots, np.int64)
        self.chunk_end = np.zeros(slots, np.int64)
        self.arrived_s = np.zeros(slots)
        self.newest_s = np.zeros(slots)
        self.playing_since_s = np.full(slots, -np.inf)
        self.taken_s = np.zeros(slots)

    # ---- news, in any order

    def enter(self, slot: int, arrived_s: float, paced: bool = True) -> None:
        """A stream takes a free slot. It makes nothing before `prompt`. Raises EngineError where the slot is in use."""
        if self.open[slot]:
            raise EngineError(f"slot {slot} belongs to an open stream: leave it first")
        self.open[slot], self.paced[slot] = True, paced
        self.text_known[slot], self.full[slot], self.resumed[slot] = True, False, False
        self.serial[slot] += 1
        for array in (
            self.prompt_rows, self.context_rows, self.frames_made, self.frames_taken, self.chunk_start, self.chunk_end,
        ):  # fmt: skip
            array[slot] = 0
        self.arrived_s[slot] = self.newest_s[slot] = self.taken_s[slot] = arrived_s
        self.playing_since_s[slot] = -np.inf

    def leave(self, slot: int) -> None:
        """The stream is over, or cancelled: it is in no tick from now on. Raises EngineError for a free slot."""
        if not self.open[slot]:
            raise EngineError(f"slot {slot} has no open stream")
        self.open[slot] = False

    def prompt(self, slot: int, rows: int, kept_rows: int = 0) -> None:
        """A segment begins: `rows` (> 0) are to enter behind `kept_rows` that lie in shared pages already."""
        if rows < 1:
            raise EngineError(f"a prompt has at least one row to compute, got {rows}")
        self.prompt_rows[slot], self.context_rows[slot] = rows, kept_rows

    def text(self, slot: int, known: bool, now_s: float) -> None:
        """Whether the talker's next input is known. A listener who waited for text hears a pause: no frame was late
        before the text came, and the next one has a frame's time."""
        if known and not self.text_known[slot]:
            latest_s = now_s - FRAME_S * (self.frames_made[slot] - 1)
            if np.isfinite(self.playing_since_s[slot]):
                self.playing_since_s[slot] = max(self.playing_since_s[slot], latest_s)
        self.text_known[slot] = known

    def chunk(self, slot: int, start: int, end: int) -> None:
        """The chunk that is being made goes from frame `start` to frame `end` of the stream."""
        self.chunk_start[slot], self.chunk_end[slot] = start, end

    def taken(self, slot: int, frames: int, full: bool = False) -> None:
        """The reader has taken `frames` in all; `full`: its buffer takes no more."""
        self.frames_taken[slot], self.full[slot] = frames, full

    def read(self, slots: Sequence[int], frames: Sequence[int], now_s: float) -> None:
        """The readers of these slots have taken so many frames in all by now."""
        where, taken = np.asarray(slots, np.int64), np.asarray(frames, np.int64)
        self.taken_s[where[self.frames_taken[where] != taken]] = now_s
        self.frames_taken[where] = taken

    # ---- ticks

    def begin(self, tick: Tick) -> None:
        """The tick runs now: the next one may be planned as if it had ended."""
        for piece in tick.pieces:
            self.prompt_rows[piece.slot] -= piece.rows
            self.context_rows[piece.slot] += piece.rows
            self.resumed[piece.slot] = False
        self.resumed[tick.lanes] = False
        self.frames_made[tick.lanes] += 1
        self.context_rows[tick.lanes[tick.new_lanes :]] += 1  # a new lane's first frame comes from its last prompt row

    def finish(self, tick: Tick, ended_s: float) -> np.ndarray:
        """The tick's PCM is on the host; before this, `leave` what has ended. Returns seconds (n,) by which each of the
        tick's lanes was late for its listener, 0 for those in time, first frames, frames that complete no chunk, and
        streams that left."""
        lanes = tick.lanes
        if len(lanes) == 1:
            return np.array([self._finish_one(int(lanes[0]), int(tick.frames[0]), int(tick.serials[0]), ended_s)])
        here = self.open[lanes] & (self.serial[lanes] == tick.serials)
        self.newest_s[lanes[here]] = ended_s
        first = here & (tick.frames == 0)
        self.playing_since_s[lanes[first]] = ended_s
        playing = here & ~first & self.paced[lanes] & np.isfinite(self.playing_since_s[lanes])
        # A chunk is heard when its last frame is made, from the place of its first one on.
        chunked = self.chunk_end[lanes] > tick.frames
        whole = ~chunked | (tick.frames + 1 >= self.chunk_end[lanes])
        start = np.where(chunked, self.chunk_start[lanes], tick.frames)
        heard_out = playing & whole & (self.frames_taken[lanes] >= start)
        late_s = ended_s - (self.playing_since_s[lanes] + FRAME_S * start)
        late_s = np.where(heard_out & (late_s > 0), late_s, 0.0)
        self.playing_since_s[lanes] += late_s
        return late_s

    def _finish_one(self, slot: int, frame: int, serial: int, ended_s: float) -> float:
        """As `finish`, of one lane: what does it for many takes as long as for a hundred."""
        if not self.open[slot] or self.serial[slot] != serial:
            return 0.0
        self.newest_s[slot] = ended_s
        if frame == 0:
            self.playing_since_s[slot] = ended_s
            return 0.0
        chunked = self.chunk_end[slot] > frame
        start = int(self.chunk_start[slot]) if chunked else frame
        whole = not chunked or frame + 1 >= self.chunk_end[slot]
        if not (whole and self.paced[slot] and self.frames_taken[slot] >= start):
            return 0.0
        late_s = max(0.0, ended_s - (float(self.playing_since_s[slot]) + FRAME_S * start))
        if np.isinf(late_s):  # it plays nothing yet
            return 0.0
        self.playing_since_s[slot] += late_s
        return late_s

    # ---- for admission

    def listened(self, now_s: float) -> np.ndarray:
        """Slots (bool) of streams that need frames in time: paced ones, but those whose readers have gone away, and
        those that wait for their text and have played what was made."""
        absent = self.full & (now_s >= self.taken_s + ABSENT_S)
        return self.open & self.paced & (self.text_known | (self.played_until_s > now_s)) & ~absent

    def changes_s(self, now_s: float) -> float:
        """When `listened` next changes by time alone; inf for never."""
        gone_s = self.taken_s[self.open & self.full] + ABSENT_S
        played_s = self.played_until_s[self.open & ~self.text_known]
        return min([*gone_s[gone_s > now_s], *played_s[played_s > now_s]], default=np.inf)

    @property
    def played_until_s(self) -> np.ndarray:
        """When a listener will have played what was made; -inf before the first PCM."""
        return self.playing_since_s + FRAME_S * self.frames_made

    # ---- for the scheduler

    def able(self) -> np.ndarray:
        """Slots (n,) that could be in a tick now. One that waits for text or for its reader is none of them."""
        ready = (self.prompt_rows > 0) | (self.context_rows > 0)
        return np.flatnonzero(self.open & self.text_known & ~self.full & ready)

    def lead_s(self, slots: np.ndarray, now_s: float, unpaced_s: float) -> np.ndarray:
        """Seconds (n,) from now until each stream's next frame is wanted.

        What the reader has not taken is certainly ahead, whatever the clock says. An unpaced stream's next frame is
        wanted `unpaced_s` after its last one; a stream that made none, at once (-inf).
        """
        made = self.frames_made[slots]
        heard = np.where(made < self.chunk_end[slots], self.chunk_start[slots], made)  # as far as chunks are whole
        ahead_s = FRAME_S * (heard - self.frames_taken[slots])
        lead_s = self.playing_since_s[slots] + FRAME_S * heard - now_s
        lead_s = np.where(ahead_s > 0, np.maximum(lead_s, ahead_s), lead_s)  # else late ones would be equally late
        return np.where(self.paced[slots], lead_s, self.newest_s[slots] + unpaced_s - now_s)
