"""All listeners of a run on one event loop in a thread of its own: each opens its stream at its arrival, takes every
chunk as soon as it is there, and notes when.

A task a listener costs about 12 us a chunk (8,000 to 20,000 chunks a second are a part of one core), a thread a
listener would cost more in switches alone. How late the loop itself was stands in the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mktts.errors import CapacityError
from mktts.measure.bench.load.attendance import LAG_BUCKETS, Attendance, Mark
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.texts import Said, arguments_of_open
from mktts.measure.bench.load.visits import Visit
from mktts.speech.serving import many_streams

_BEAT_S = 0.01  # of the pulse by which the loop's lateness is seen
_BETWEEN_WORDS_S = 0.1  # of a fed text
_GOODBYE_S = 30.0  # for streams to end once they were all cancelled; then they hang


class Opens(Protocol):
    """A synthesizer, as far as a crowd knows it."""

    def stream(self, text: str, **settings: Any) -> Any: ...

    def open(self, **settings: Any) -> Any: ...


def attend(
    synthesizer: Opens,
    said: Said,
    plan: list[Visit],
    begin_s: float,
    end_s: float,
    close_s: float,
    meanwhile: Callable[[threading.Event], None] | None = None,
) -> Attendance:
    """Plays the plan. begin_s, end_s, close_s: from its beginning. meanwhile: runs in the caller's thread beside it,
    and returns when its event is set. Ctrl-C ends the streams and is raised."""
    crowd = _Crowd(synthesizer, said, plan, begin_s, end_s, close_s)
    done, failed = threading.Event(), []

    def play() -> None:
        try:
            crowd.play()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=play, name="listeners", daemon=True)
    with many_streams():
        thread.start()
        try:
            if meanwhile is not None:
                meanwhile(done)
            done.wait()
        finally:
            crowd.stop()
            thread.join()
    if failed:
        raise failed[0]
    return crowd.seen


class _Crowd:
    def __init__(
        self, synthesizer: Opens, said: Said, plan: list[Visit], begin_s: float, end_s: float, close_s: float
    ) -> None:
        self.seen = Attendance(visits=plan)
        self._synthesizer, self._said, self._plan = synthesizer, said, plan
        self._times_s = begin_s, end_s, close_s
        self._open: dict[int, Any] = {}  # by the index of the visit
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames = self._chunks = 0
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._collecting_since_s = 0.0

    def stop(self) -> None:
        """Ends the run early. Any thread; nothing where it is over."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._stopped.set)

    def play(self) -> None:
        """The whole run, in the calling thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        begun_s = time.perf_counter()
        begin_s, end_s, close_s = (begun_s + at_s for at_s in self._times_s)
        gc.callbacks.append(self._collected)
        services = [
            asyncio.create_task(work) for work in (self._arrive(begun_s), self._beat(), self._mark(begin_s, end_s))
        ]
        try:
            await asyncio.wait(
                [asyncio.create_task(self._stopped.wait()), *services],
                timeout=close_s - time.perf_counter(),
                return_when=asyncio.FIRST_COMPLETED,  # the services run until they are cancelled
            )
            for service in services:
                if service.done():
                    service.result()  # a crowd that fails says so
        finally:
            for service in services:
                service.cancel()
            gc.callbacks.remove(self._collected)
            await self._close()

    async def _close(self) -> None:
        self.seen.closed_s = time.perf_counter()
        self._closing = True
        for stream in list(self._open.values()):
            stream.cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_GOODBYE_S)
            self.seen.hung = len(pending)
        self._open.clear()

    async def _arrive(self, begun_s: float) -> None:
        for visit in self._plan:
            planned_s = begun_s + visit.at_s
            if (wait_s := planned_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            else:
                await asyncio.sleep(0)  # many at once: those that play have their turns in between
            self._enter(visit, planned_s)
        await asyncio.Event().wait()

    def _enter(self, visit: Visit, planned_s: float) -> None:
        listener = Listener(planned_s, timed=visit.kind in ("reads", "leaves"))
        self.seen.listeners.append(listener)
        text, settings = self._said.of(visit.index, visit.frames)
        listener.opened_s = time.perf_counter()
        try:
            if visit.kind == "feeds":
                stream = self._synthesizer.open(**arguments_of_open(settings))
                self._start(self._feed(stream, text, listener))
            else:
                stream = self._synthesizer.stream(text, **settings)
        except Exception as error:
            self._failed(listener, error)
            return
        listener.engine = getattr(stream, "engine", "single")
        self._open[visit.index] = stream
        task = None if visit.kind == "never reads" else self._start(self._listen(visit, listener, stream))
        if visit.leaves_s is not None:
            self._loop.call_later(visit.leaves_s, self._leave, visit, listener, stream, task)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self, visit: Visit, listener: Listener, stream: Any) -> None:
        seen, clock, last = self.seen, time.perf_counter, LAG_BUCKETS - 1
        try:
            async for chunk in stream:
                now_s = clock()
                listener.hear(now_s, chunk.pcm, chunk.frames)
                self._frames += chunk.frames
                self._chunks += 1
                lag_ms = 1e3 * (now_s - listener.opened_s) - chunk.timings.ready_ms
                seen.lag_ms[min(max(int(lag_ms), 0), last)] += 1
        except asyncio.CancelledError:  # left in the middle of a wait
            pass
        except Exception as error:
            self._failed(listener, error)
        listener.byte_s = getattr(stream, "first_byte_s", None)
        listener.engine = getattr(stream, "engine", "single")  # of a fed text only known since its beginning
        if visit.keeps and not self._closing:
            seen.kept.append((visit, stream.codes, stream.finish_reason))
        self._over(visit, listener)

    async def _feed(self, session: Any, text: str, listener: Listener) -> None:
        try:
            for word in text.split():
                session.feed(f"{word} ")
                await asyncio.sleep(_BETWEEN_WORDS_S)
            session.finish()
        except Exception as error:
            self._failed(listener, error)

    def _leave(self, visit: Visit, listener: Listener, stream: Any, task: asyncio.Task[None] | None) -> None:
        """Half of them close the stream, half have the task cancelled that waits for the next chunk."""
        if listener.ended_s is not None or self._closing:
            return
        listener.left = True
        if task is not None and visit.index % 2:
            task.cancel()
            return
        stream.cancel()
        if task is None:
            self._over(visit, listener)

    def _over(self, visit: Visit, listener: Listener) -> None:
        self._open.pop(visit.index, None)
        if not self._closing and listener.ended_s is None:
            listener.ended_s = time.perf_counter()

    def _failed(self, listener: Listener, error: Exception) -> None:
        if isinstance(error, CapacityError) and listener.first_s is None:
            listener.refused = True
        else:
            listener.error = f"{type(error).__name__}: {error}"
        if listener.ended_s is None:
            listener.ended_s = time.perf_counter()

    async def _beat(self) -> None:
        while True:
            wanted_s = time.perf_counter() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.seen.beat_late_s.append(time.perf_counter() - wanted_s)

    async def _mark(self, begin_s: float, end_s: float) -> None:
        await _until(begin_s)
        self.seen.lag_ms[:] = [0] * LAG_BUCKETS
        self.seen.beat_late_s.clear()
        self.seen.gc_s.clear()
        self.seen.begin = self._now()
        await _until(self.seen.begin.at_s + end_s - begin_s)  # the whole time, also where it began late
        self.seen.end = self._now()
        await asyncio.Event().wait()

    def _now(self) -> Mark:
        return Mark(time.perf_counter(), self._frames, self._chunks, time.process_time(), time.thread_time())

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._collecting_since_s = now_s
        else:
            self.seen.gc_s.append(now_s - self._collecting_since_s)


async def _until(at_s: float) -> None:
    """Returns at that time of time.perf_counter or later, never before."""
    while (wait_s := at_s - time.perf_counter()) > 0:
        await asyncio.sleep(wait_s)
