"""The engine: owns the worker thread, which makes all open streams tick by tick, and chooses the lanes of each stream.

Nothing here takes a lock that the finalizer of a stream could need: the worker learns of what happens outside from one
`queue.SimpleQueue`, whose `put` finalizers may call too. Every method of `Engine` may be called from any thread of the
process that made it; threads do not survive `os.fork`."""

import contextlib
import gc
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import torch

from mktts.engine import capacity as capacities
from mktts.engine.admission import Admission, AdmissionLimits, Capacity
from mktts.engine.options import SCHEDULE, Guard, Plan, StreamOptions
from mktts.engine.runner import EngineStats, Runner
from mktts.engine.script import Script
from mktts.engine.stream import FORKED, EngineName, Notifier, Utterance
from mktts.errors import EngineError, SamplingError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice

_LOG = logging.getLogger(__name__)
_CLOSE = object()
_MEASURE_S = 120.0  # the longest wait for a measurement
_EXIT_WAIT_S = 5.0  # at interpreter exit: a step in flight may finish, but a hung device must not hang the exit
# Streams that are made singly where both kinds of lanes exist: on an H200 two frames of the megakernel take 2.9 ms and
# three take 4.3 ms; one frame of many streams together takes 4.0 to 4.5 ms.
SINGLE_STREAMS = 2
# Open streams on the single lanes, those that wait for text or for a reader included: all of them may go on at once,
# and then take turns. Half of the listeners that the megakernel serves on an H200.
OPEN_SINGLY = 8


class Engine:
    """Owns the worker thread. Close it at the end; an engine that is dropped is closed too.

    With both kinds of lanes, one or two streams at a time are made singly and further ones together; streams that wait
    for text or for their reader do not count. A stream stays on the lanes on which it began."""

    gone = False  # True only for an engine whose process has died: see `mktts.engine.remote`

    def __init__(
        self,
        single: Runner | None,
        batch: Runner | None,
        later: Callable[[], Runner] | None = None,
        *,
        admission: Admission,
        cpu_threads: int | None = None,
        capacity_key: str = "",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """single, batch: the runners, of which one may be None. later: makes `batch` once more streams are open than
        are made singly. admission: of the runners. cpu_threads: for torch's operators on the worker; None: torch's own
        choice. capacity_key: what a measured capacity is kept under. device, dtype: of the model."""
        self.backend_name, self.device, self.dtype = (single or batch).lanes.name, device, dtype
        self.admission, self._capacity_key = admission, capacity_key
        # The worker clears it when it ends.
        self.runners: dict[EngineName, Runner] = {one.name: one for one in (single, batch) if one is not None}
        self._later, self._singly = later, SINGLE_STREAMS
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self.notifier = Notifier()
        self._lock, self.closed = threading.Lock(), False
        self._utterances: weakref.WeakSet[Utterance] = weakref.WeakSet()
        self._pid = os.getpid()
        self._worker = _Worker(self._inbox, self.runners, self.notifier)
        self._thread = threading.Thread(target=self._worker.run, args=(cpu_threads,), name="mktts-worker", daemon=True)
        self._thread.start()
        weakref.finalize(self, _abandon, self._inbox, self._thread)  # also at interpreter exit

    def reserve(self, plan: Plan, sink: Any = None) -> Utterance:
        """Creates a stream, of which the worker knows nothing before `begin`. sink: see `Utterance`. Raises EngineError
        after `close` and in a forked child, SamplingError for draws that no lanes make."""
        utterance = Utterance(plan, self._inbox, self.notifier, sink)
        with self._lock:
            self._check(plan.sampling)
            self._utterances.add(utterance)
        return utterance

    def begin(self, utterance: Utterance, script: Callable[[Runner], Script], engine: EngineName | None = None) -> None:
        """Starts a reserved stream. script: makes its text for a runner. engine: None chooses. Raises as `reserve`."""
        with self._lock:
            self._check(utterance.plan.sampling)
            runner = self._choose(utterance.plan.sampling, engine)
            utterance.begin(script(runner), runner.name)
            self._inbox.put(utterance)

    def feed(self, utterance: Utterance, texts: Sequence[Any]) -> None:
        """Adds text to a stream that has begun with a `FedScript`; no effect on one that is over."""
        script = utterance.script
        if texts and script is not None:
            script.feed(*texts)
            utterance.update()

    def _check(self, sampling: Sampling | None = None) -> None:
        """Raises EngineError where no stream can be made, and SamplingError for rng="torch" without single lanes."""
        if os.getpid() != self._pid:
            raise EngineError(FORKED)
        if self.closed:
            raise EngineError("the synthesizer is closed: load another one")
        if sampling is not None and sampling.rng == "torch" and "single" not in self.runners:
            hint = "for rng='torch' take backend='torch', engine='single'"
            raise SamplingError(f"the batch engine draws with rng='philox': {hint}")

    def _choose(self, sampling: Sampling, engine: EngineName | None = None) -> Runner:
        if engine is not None:
            return self.runners[engine]
        single, batch = self.runners.get("single"), self.runners.get("batch")
        if single is None or batch is None and self._later is None:
            return single or batch
        active = (one for one in self._utterances if one.open and not one.idle)
        few = len(list(islice(active, self._singly))) < self._singly  # there may be thousands: stops at the first few
        few = few and sum(one.open and one.engine == "single" for one in self._utterances) < OPEN_SINGLY
        if few or sampling.rng == "torch":
            return single
        if batch is None:  # no daemon: the program waits for it at exit, because to kill a compiler would abort it
            threading.Thread(target=self.make_batch, name="mktts-batch-loading", daemon=False).start()
        return batch or single

    def make_batch(self) -> None:
        """Makes the lanes of many streams now if that was put off; takes seconds."""
        later, self._later = self._later, None
        if later is None:
            return
        try:
            with torch.inference_mode():
                runner = later()
            with self._lock:
                self._check()
                self.runners[runner.name] = runner
            self.admission.measured = capacities.kept(self._capacity_key, runner)  # not that of single lanes any more
        except Exception as reason:
            _LOG.warning("streams go on taking turns, the batch engine cannot run: %s", reason)

    @property
    def stats(self) -> dict[EngineName, EngineStats]:
        return {name: runner.stats for name, runner in list(self.runners.items())}

    @property
    def capacity(self) -> Capacity:
        return self.admission.capacity

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Sets what the operator of a server limits, and makes the lanes of many streams if that was put off. On a CPU
        all streams are then made together, so that one set of lanes has the cores to itself."""
        self.make_batch()
        self.admission.limits = limits
        single = self.runners.get("single")
        if "batch" in self.runners and single is not None and not single.lanes.decodes_beside:
            self._singly = 0

    def warm_up(self, request: Request) -> None:
        """Runs one short stream of this checked request on each set of lanes, so that the first real one finds all
        allocated and compiled. It has one chunk of every size of the default schedule."""
        self._check()
        for runner in list(self.runners.values()):
            self._make_stream(runner, request, sum(SCHEDULE))

    def measure_capacity(self, request: Request, renew: bool = False, only_kept: bool = False) -> Capacity:
        """Sets `capacity` to that of this machine: the one kept from an earlier run, or else a new measurement, which
        takes some seconds and makes lanes that were put off. request: checked, to be measured with. renew: measures
        anew. only_kept: does not measure. Raises EngineError after `close`, BusyError where every slot is taken."""
        self._check()
        if not only_kept:
            self.make_batch()
        runner = self.runners.get("batch") or self.runners["single"]
        before = found = None if renew else capacities.kept(self._capacity_key, runner)
        if not only_kept and (found is None or runner.name == "batch"):
            self.warm_up(request)
            if runner.name == "single":
                speak = partial(self._make_stream, runner, request, capacities.FRAMES)
                found = capacities.measure_single(runner, speak)
            else:
                found = self._on_worker(lambda: capacities.measure(runner, runner.build(request), before))
        if found != before:
            capacities.keep(self._capacity_key, runner, found)
        self.admission.measured = found
        return self.capacity

    def _on_worker(self, call: Callable[[], Any]) -> Any:
        """Returns or raises what `call` does, run between two ticks. Raises EngineError where it cannot run in time."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self._inbox.put(work)
        until_s = time.perf_counter() + _MEASURE_S
        while not wait([done], timeout=0.5).done:
            if not self._thread.is_alive() or time.perf_counter() >= until_s:
                raise EngineError("the engine was closed, or was too busy, before this could be measured")
        return done.result()

    def _make_stream(self, runner: Runner, request: Request, frames: int) -> int:
        """Makes an unpaced stream of up to `frames` frames on these lanes, and waits for its end."""
        plan = Plan(Sampling(), 0, frames, StreamOptions(guard=Guard.off()), paced=False)
        utterance = self.reserve(plan)
        self.begin(utterance, partial(Script, [request], started_s=0.0), runner.name)
        while utterance.take() is not None:
            pass
        return len(utterance.codes)

    def forget(self, voice: Voice) -> None:
        """Drops what caches hold of `voice`, soon, in the worker's thread. Raises EngineError after `close`."""
        self._check()
        for runner in list(self.runners.values()):
            self._inbox.put(partial(runner.forget, voice))

    def close(self) -> None:
        """Ends every open stream as cancelled, within one frame, and waits for the worker to finish."""
        with self._lock:
            if not self.closed:
                self.closed = True
                for utterance in self._utterances:
                    utterance.cancel()
                self._inbox.put(_CLOSE)
        if os.getpid() == self._pid and self._thread is not threading.current_thread():
            self._thread.join()
        self.runners, self._later = {}, None


class _Worker:
    """Has no reference to the engine, so that dropping the engine ends its thread. sleeps: only an update wakes it."""

    def __init__(self, inbox: SimpleQueue[Any], runners: dict[EngineName, Runner], notifier: Notifier) -> None:
        self.sleeps, self.runners = True, runners
        self._inbox, self._notifier = inbox, notifier
        self._many = ManyStreams()

    @torch.inference_mode()
    def run(self, cpu_threads: int | None) -> None:
        if cpu_threads is not None:
            torch.set_num_threads(cpu_threads)  # OpenMP keeps the number per calling thread: others keep theirs
        wake_s = math.inf
        while self._take_in(wake_s):
            runners = list(self.runners.values())  # a copy: `make_batch` may add one
            alone = sum(len(runner.open_streams) for runner in runners) == 1
            for runner in runners:
                runner.lanes.alone = alone
            if runners[0].lanes.decodes_beside and len(runners[-1].open_streams) > MANY:
                runners += runners[:1]  # the single lanes get a turn before and after the long one of the others
            wake_s = math.inf
            for runner in runners:
                try:
                    wake_s = min(wake_s, runner.turn(time.perf_counter()))
                except BaseException as error:  # this runner's streams are lost, but the worker goes on
                    _LOG.exception("the streams of the engine %r end: a turn failed", runner.name)
                    try:
                        runner.fail_all(error)
                    except BaseException:
                        _LOG.exception("the state of that engine could not be cleared")
            self._notifier.flush()
            # Here, not in the runner: after every turn, also one that failed or ended streams before they had begun.
            if "batch" in self.runners:
                self._many.count(len(self.runners["batch"].open_streams))
            self.sleeps = wake_s == math.inf
        for runner in self.runners.values():
            try:
                runner.close()
            except BaseException:
                _LOG.exception("the streams of %r could not be closed", runner.name)
        self._many.count(0)
        self.runners.clear()  # frees the models, even if somebody keeps the closed engine
        self._notifier.flush()

    def _take_in(self, wake_s: float) -> bool:
        """Handles what happened outside, waiting for it until `wake_s`. Returns False once the engine is closed."""
        wait_s = wake_s - time.perf_counter()
        try:
            item = self._inbox.get(wait_s > 0, None if math.isinf(wait_s) else max(wait_s, 0.0))
            self.sleeps = False
            while item is not _CLOSE:
                if isinstance(item, Utterance):
                    if item.engine is not None:  # otherwise it was cancelled before it began
                        self.runners[item.engine].update(item)
                else:
                    try:
                        item()
                    except Exception:
                        _LOG.exception("a call in the worker's thread failed")
                item = self._inbox.get_nowait()
        except Empty:
            return True
        return False


def _abandon(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put(_CLOSE)
    if thread is not threading.current_thread():
        thread.join(_EXIT_WAIT_S)


SWITCH_S = 0.5e-3  # how long a thread that wants to run waits for the one that runs
# Objects, net of those freed, that are made between two garbage collections; 2,100 streams hold 190,000.
YOUNG_OBJECTS = 1_000_000
MANY, FEW = 16, 8  # open streams of one engine: above MANY the process is set for many, until FEW are left


class ManyStreams:
    """Sets the process up for many open streams: one object for each engine or client, used by one thread.

    While any of them has many, a thread waits SWITCH_S for the interpreter instead of 5 ms, and garbage is collected
    only when YOUNG_OBJECTS more objects exist: streams are freed without the collector, which stops every thread for up
    to 66 ms. With 1,600 listeners of an engine without a device, on two cores, p99 first PCM was 218 ms with the 5 ms
    interval and 71 ms with this one. When the last of them has few again, the former settings are restored."""

    _lock = threading.Lock()
    _restore = contextlib.ExitStack()  # closing it restores the former settings; under the lock
    _with_many = 0  # objects that have many streams; under the lock

    def __init__(self) -> None:
        self._many = False

    def count(self, open_streams: int) -> None:
        many = open_streams > (FEW if self._many else MANY)
        if many == self._many:
            return
        self._many = many
        with self._lock:
            ManyStreams._with_many += 1 if many else -1
            if not self._with_many:
                self._restore.close()
            elif many and self._with_many == 1:
                self._set()

    def _set(self) -> None:
        switch_s, (young, *older) = sys.getswitchinterval(), gc.get_threshold()
        self._restore.callback(sys.setswitchinterval, switch_s)
        self._restore.callback(gc.set_threshold, young, *older)
        if not gc.get_freeze_count():  # otherwise somebody else froze objects, and will unfreeze them
            self._restore.callback(gc.unfreeze)
            gc.freeze()
        if young:  # 0: nothing is collected anyway
            gc.set_threshold(max(young, YOUNG_OBJECTS), *older)
        sys.setswitchinterval(min(switch_s, SWITCH_S))
