"""Plays listeners against the scheduler on simulated time: what a GPU would carry, without one.

The real board, pages, admission and scheduler; only the ticks are not run: each takes what a tick model says. Listeners
get chunks as `TickSettings.chunks` says and play them in real time from the first on; utterances last 2 to 12 s;
arrivals are Poisson, in bursts besides.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mktts.batch.admission import AdmissionSettings, Arrival, Door
from mktts.batch.board import FRAME_S, Board
from mktts.batch.pages import Pages
from mktts.batch.scheduler import TickSettings, next_tick
from mktts.batch.tick import Tick, TickFit, TickLog, TickModel


@dataclass(frozen=True)
class Traffic:
    """Who comes. `listeners`: the offered load, arrivals a second times the mean seconds of an utterance.

    frames: the least and the most of an utterance. prompt_rows behind prefix_rows that are in the cache already.
    bursts times `burst` streams of 50 frames at once, evenly over the run. cancelled: the part of the listeners that
    leaves at a random time.
    """

    listeners: int
    frames: tuple[int, int] = (25, 150)
    prompt_rows: int = 32
    prefix_rows: int = 0
    burst: int = 0
    bursts: int = 5
    cancelled: float = 0.0
    seed: int = 0

    def arrivals(self, warm_s: float, seconds: float) -> list[tuple[float, int]]:
        """(arrival in s, frames), ascending. Over the first half of the warm-up come `listeners` streams that are
        already under way, so that the load is there when the run begins at `warm_s`."""
        rng = np.random.default_rng(self.seed)
        low, high = self.frames
        mean_s = FRAME_S * (low + high) / 2
        found = [
            (at, max(2, int(rng.uniform(0.15, 1.0) * rng.integers(low, high + 1))))
            for at in rng.uniform(0.0, warm_s / 2, self.listeners)
        ]
        at = warm_s / 4
        while self.listeners and (at := at + rng.exponential(mean_s / self.listeners)) < warm_s + seconds:
            found.append((at, int(rng.integers(low, high + 1))))
        for index in range(self.bursts if self.burst else 0):
            found += [(warm_s + (index + 0.5) * seconds / self.bursts, 50)] * self.burst
        return sorted(found)


@dataclass
class Run:
    """What came of it, after the warm-up. ttfc_s: from arrival to the first PCM of each stream, waits in line included.

    late_s: of every chunk that came late. late_streams: (slot, serial) of those that had such a chunk. verdicts:
    arrivals by decision and reason; one that waited in line counts again when it leaves it. log: all ticks, also of the
    warm-up. frames, finished: made, and streams that were made to their end.
    """

    seconds: float
    ttfc_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    late_streams: set[tuple[int, int]] = field(default_factory=set)
    verdicts: Counter = field(default_factory=Counter)
    finished: int = 0
    frames: int = 0
    log: TickLog = field(default_factory=TickLog)

    @property
    def underruns(self) -> int:
        return len(self.late_s)

    @property
    def refused(self) -> int:
        return sum(count for (decision, _), count in self.verdicts.items() if decision == "refuse")

    @property
    def ticks(self) -> np.ndarray:
        """See `mktts.batch.tick.TICKS`."""
        return self.log.table()

    def ttfc_ms(self, percent: float) -> float:
        """That percentile of the time to first PCM; NaN where nobody came."""
        return 1e3 * float(np.percentile(self.ttfc_s, percent)) if self.ttfc_s else float("nan")

    def open_mean(self, from_s: float = 0.0) -> float:
        """Streams being made, the mean over the ticks from then on, each as long as it took."""
        ticks = self.ticks
        ticks = ticks[ticks["ended_s"] - ticks["took_s"] >= from_s]
        return float(np.average(ticks["open"], weights=ticks["took_s"])) if len(ticks) else 0.0


def simulate(
    traffic: Traffic,
    ticks: TickSettings,
    model: TickModel,
    admission: AdmissionSettings | None = None,
    seconds: float = 10.0,
    warm_s: float = 6.0,
    truth: TickModel | None = None,
    noise: float = 0.0,
    slots: int = 2_200,
    pages: int = 17_000,
) -> Run:
    """Plays `traffic`. `model`: what the scheduler believes. `truth`: what ticks really take, as `model` where None;
    where given, the scheduler learns from what it sees. `noise`: standard deviation of a tick, as a part of it.
    """
    return _Play(traffic, ticks, model, admission or AdmissionSettings.h200(), truth, noise, slots, pages).run(
        warm_s, seconds
    )


class _Play:
    def __init__(
        self,
        traffic: Traffic,
        ticks: TickSettings,
        model: TickModel,
        admission: AdmissionSettings,
        truth: TickModel | None,
        noise: float,
        slots: int,
        pages: int,
    ) -> None:
        self._traffic, self._ticks, self._host_s, self._noise = traffic, ticks, admission.host_s, noise
        self._fit = None if truth is None else TickFit(model)
        self._model, self._truth = model, truth or model
        self._rng = np.random.default_rng(traffic.seed + 1)
        self._board = Board(slots)
        self._rows_ahead = traffic.prefix_rows + traffic.prompt_rows
        self._pages = Pages(pages, slots, self._rows_ahead + max(*traffic.frames, 50))
        self._door = Door(self._board, self._pages, ticks, admission)
        self._goal = np.zeros(slots, np.int64)
        self._chunks = ticks.chunks
        self._chunk = np.zeros(slots, np.int64)  # number of the one that is being made
        self._dry_s = np.zeros(slots)  # when the listener has played what came
        self._leaving: list[tuple[float, int, int]] = []  # when, slot, serial
        self._free = list(range(slots))

    def run(self, warm_s: float, seconds: float) -> Run:
        run = Run(seconds)
        arrivals = self._traffic.arrivals(warm_s, seconds)
        now_s, index = 0.0, 0
        while now_s < warm_s + seconds:
            live = now_s >= warm_s
            while self._leaving and self._leaving[0][0] <= now_s:
                self._cancel(*heapq.heappop(self._leaving)[1:])
            while left := self._door.next(now_s, self._model):
                self._enter(*left, now_s, run if live else None)
            while index < len(arrivals) and arrivals[index][0] <= now_s:
                at_s, frames = arrivals[index]
                index += 1
                request = Arrival(at_s, self._traffic.prompt_rows, self._rows_ahead + frames, name=frames)
                self._enter(request, self._door.ask(request, self._model), now_s, run if live else None)
            tick = next_tick(self._board, now_s, self._model, self._ticks)
            self._door.planned(tick)
            if tick.empty:
                coming_s = arrivals[index][0] if index < len(arrivals) else warm_s + seconds
                wake_s = min(tick.wake_s, coming_s, self._leaving[0][0] if self._leaving else np.inf)
                now_s = max(wake_s, now_s + 1e-4) if self._door.line == 0 else now_s + 1e-3
                continue
            now_s = self._play(tick, now_s, run, live)
        return run

    def _enter(self, request: Arrival, verdict: tuple[str, str], now_s: float, run: Run | None) -> None:
        if run is not None:
            run.verdicts[tuple(verdict)] += 1
        if verdict[0] != "admit":
            return
        slot = self._free.pop()
        self._pages.open(slot, request.max_rows)
        self._board.enter(slot, request.arrived_s)
        self._board.prompt(slot, request.prompt_rows, self._traffic.prefix_rows)
        self._goal[slot] = request.name
        self._chunk[slot] = 0
        self._board.chunk(slot, 0, min(self._chunks[0], request.name))
        if self._rng.random() < self._traffic.cancelled:
            when_s = now_s + self._rng.uniform(0.0, FRAME_S * request.name)
            heapq.heappush(self._leaving, (when_s, slot, int(self._board.serial[slot])))

    def _cancel(self, slot: int, serial: int) -> None:
        if self._board.open[slot] and self._board.serial[slot] == serial:
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        self._board.leave(slot)
        self._pages.close(slot)
        self._free.append(slot)

    def _play(self, tick: Tick, now_s: float, run: Run, live: bool) -> float:
        """Runs one tick; returns when its PCM is on the host."""
        board = self._board
        began_s = now_s + self._host_s
        took_s = self._truth.predict(*tick.bucket, tick.context_rows)
        took_s *= max(0.2, 1 + self._noise * self._rng.standard_normal())
        ended_s = began_s + took_s
        board.begin(tick)
        late_s = board.finish(tick, ended_s)
        if self._fit is not None:
            self._model = self._fit.observe(*tick.bucket, tick.context_rows, took_s)
        run.log.add(tick, took_s, ended_s, int(board.open.sum()), float(late_s.max(initial=0.0)))
        if live:
            first = tick.lanes[tick.frames == 0]
            run.ttfc_s += (ended_s - board.arrived_s[first]).tolist()
            run.frames += len(tick.lanes)
        for slot in tick.lanes[board.frames_made[tick.lanes] >= board.chunk_end[tick.lanes]].tolist():
            chunk_late_s = self._hand_over(slot, ended_s)
            if live and chunk_late_s > 0:
                run.late_s.append(chunk_late_s)
                run.late_streams.add((slot, int(board.serial[slot])))
        for slot in tick.lanes[board.frames_made[tick.lanes] >= self._goal[tick.lanes]].tolist():
            run.finished += live
            self._leave(slot)
        return ended_s

    def _hand_over(self, slot: int, now_s: float) -> float:
        """The listener takes a whole chunk; returns the seconds for which it had nothing to play."""
        board, made = self._board, int(self._board.frames_made[slot])
        late_s = now_s - self._dry_s[slot] if self._chunk[slot] else 0.0
        self._dry_s[slot] = max(now_s, self._dry_s[slot]) + FRAME_S * (made - board.chunk_start[slot])
        self._chunk[slot] += 1
        frames = self._chunks[min(int(self._chunk[slot]), len(self._chunks) - 1)]
        board.frames_taken[slot] = made
        board.chunk(slot, made, min(made + frames, int(self._goal[slot])))
        return late_s
