"""A stream: its state in the worker while it is made, the queue of its chunks, and the object that its consumer holds.

Text longer than a segment is spoken segment by segment, each with its own prompt and talker state, while the codec
state goes on: the waveform is continuous over a join."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from mktts.audio import joined
from mktts.codec.decoder import PendingPcm
from mktts.engine.options import Chunk, Chunker, FinishReason, GuardState, Plan, WordTime
from mktts.engine.script import Script
from mktts.engine.words import WordTimes
from mktts.errors import EngineError, TextError
from mktts.model.sampling import Sampling
from mktts.spec import FRAME_RATE_HZ, NUM_CODEBOOKS, SAMPLE_RATE_HZ
from mktts.text.split import check_length, clean_piece

if TYPE_CHECKING:
    from mktts.text.parts import TextFeed

EngineName = Literal["single", "batch"]
NO_PCM = np.zeros(0, np.float32)
FORKED = "the worker thread stayed in the parent of this fork: load a synthesizer in the child, or start it by spawn"
_BEGUN: weakref.WeakSet[Utterance] = weakref.WeakSet()
_NOT_KEPT = deque(maxlen=0)
MAX_SEGMENT_FRAMES = int(160 * FRAME_RATE_HZ)  # of one prompt, if the caller sets no limit
# The worker sleeps so long after a single stream's first chunk: a thread that waits for the interpreter gets it then,
# and otherwise after the 5 ms of sys.getswitchinterval; on a CPU a first chunk was read 1.3 to 2.4 ms late.
_YIELD_S = 20e-6
# Consumers that an event loop wakes before it turns to others. A tick may have chunks for a hundred, whose next ones
# are not wanted soon; with 600 listeners of a server, p95 of a new request's audible start was 77 ms with this, not 96.
_WOKEN_AT_ONCE = 8


class Notifier:
    """Wakes event loops for the worker. waiters: by loop, the futures that are done at the next `flush`, which wakes
    each loop once. after: called at the end of every `flush`."""

    after: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.waiters: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)

    def flush(self) -> None:
        if self.waiters:
            waiters, self.waiters = self.waiters, defaultdict(list)
            for loop, of_loop in waiters.items():
                _wake(loop, of_loop)
        if self.after is not None:
            self.after()


@dataclass(eq=False)
class Segment:
    """What the frames of one segment are made from, and how far they are. prompt: a `Prompt`, or a `FedPrompt` that is
    ready. stream: whose segment it is; None in measurements and tests of lanes. reference: codes (R, 16) that the codec
    hears first, or None. guard: counts the frames that were read. begun: it has memory, and `Lanes.begin` was called.
    launched: frames in ticks that were launched. row: the text row (H,) of the frame after those, None if not known."""

    prompt: Any
    sampling: Sampling
    seed: int
    max_frames: int = MAX_SEGMENT_FRAMES
    stream: Utterance | None = None
    reference: Tensor | None = None
    guard: GuardState | None = None
    begun: bool = False
    launched: int = 0
    row: Tensor | None = None


class Utterance:
    """One stream between the worker, which makes it, and its consumer, which takes its chunks.

    engine: the lanes that make it, None before it has text. open: frames may be made for it, from `begin` until it is
    over. codes: one (16,) int64 tensor or array for each frame so far, of all segments. idle: it waits for its text, or
    for its consumer. late_s: by how much chunks came too late, in all, for a listener who plays from the first one on.

    The worker's own: chunker, set when its runner has it; arrived_s, when the runner got it or its first text; segment,
    the one that is being made, None before the first and between two; segment_number, from 0; begins_anew: a pause
    precedes the segment, so that the codec begins anew; silent_s, of pauses that were delivered; submit, which decodes
    frames to a pending result where lanes give no PCM; on_close, called once, at the end."""

    def __init__(self, plan: Plan, inbox: SimpleQueue[Any], notifier: Notifier, sink: Any = None) -> None:
        """sink: for a consumer in another process, instead of `take`: the worker calls it with this utterance; "chunk",
        "idle" where that has changed, or "over"; and the chunk or None."""
        self.plan, self.sink = plan, sink
        self.codes: list[Tensor | np.ndarray] = []
        self.cancelled = self.open = self.idle = False
        self.late_s = self.silent_s = self.arrived_s = 0.0
        self.error: BaseException | None = None
        self.engine: EngineName | None = None
        self.number = -1  # its number in another process
        self.buffer_frames = plan.options.buffer_frames
        self.made_frames = 0  # in chunks; written by the worker
        self.taken_frames = 0  # written by the consumer
        self.lately_read = _NOT_KEPT  # the worker's queue of streams that were read, until this one is over
        self.watched = False  # the worker has found the buffer full: the consumer wakes it with the next chunk it takes
        self._inbox, self._notifier = inbox, notifier
        self.script: Script | None = None  # None again once it is over, so that its caches are free
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()  # None: the end
        self._reason: FinishReason | None = None
        self.read = False  # the consumer has seen the end
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._when_over: Callable[[], None] | None = None
        self.chunker: Chunker | None = None
        self.segment: Segment | None = None
        self.segment_number = -1
        self.begins_anew = False
        self._silent_samples = 0  # to be delivered before the segment, or at once where there is none
        self.submit: Callable[[list[Any]], Any] | None = None
        self.on_close: Callable[[], None] | None = None

    def begin(self, script: Script | None, engine: EngineName) -> None:
        """Sets its text and its lanes, before the worker learns of it. script: None if another process speaks it."""
        self.script, self.open = script, True
        _BEGUN.add(self)
        self.engine = engine  # last: from now on the worker may look at it

    # ---- consumer, any thread

    @property
    def finish_reason(self) -> FinishReason | None:
        return "cancelled" if self.cancelled else self._reason

    @property
    def over(self) -> bool:
        return self.cancelled or (self.engine is not None and not self.open)

    def cancel(self) -> None:
        """Ends the stream: no chunk is handed out after this. No effect on one that is over and read."""
        if self.cancelled or (self.engine is not None and not self.open and self._chunks.qsize() <= 1):
            return  # nothing is left in the queue but the end
        self.cancelled = True
        self.deliver(None, at_once=True)
        self.update()

    def update(self) -> None:
        """Has the worker look at it again. Any thread."""
        self._inbox.put(self)

    def when_over(self, call: Callable[[], None]) -> None:
        """Calls `call`, which must be quick, once the worker is done with it: in its thread, or here, or in both."""
        self._when_over = call
        if not self.open:  # read after `call` was stored: either `end` has seen it, or we see the end
            call()

    def take(self, wait: bool = True) -> Chunk | None:
        """Waits for the next chunk; None at the end. Raises the stream's error, and queue.Empty if it may not wait."""
        chunk = self._chunks.get(wait)
        if chunk is None or self.cancelled:
            self._chunks.put(None)  # for the next call
            self.read = True
            if self.error is not None and not self.cancelled:
                raise self.error
            return None
        self.taken_frames += chunk.frames
        self.lately_read.append(self)
        if self.watched:  # otherwise the worker does not wait for this
            self.update()
        return chunk

    async def take_async(self, within_s: float | None = None) -> Chunk | None:
        """As `take`, for an event loop, whose other tasks have a turn before every chunk; no thread waits. Raises
        TimeoutError if nothing comes within `within_s`, by which nothing is lost; EngineError if another task waits."""
        loop = asyncio.get_running_loop()
        if self._waiter is not None:
            raise EngineError("another task waits for this stream: a stream has one consumer at a time")
        if not self._chunks.empty():  # otherwise others have their turn during the wait
            await asyncio.sleep(0)
        try:
            async with contextlib.nullcontext() if within_s is None else asyncio.timeout(within_s):
                while self._chunks.empty():
                    waiter = loop.create_future()
                    self._waiter = (loop, waiter)
                    if self._chunks.empty():  # checked again: one may have come before the waiter was stored
                        await waiter
                return self.take(wait=False)
        finally:
            self._waiter = None

    # ---- worker: text, segments and frames

    @property
    def has_rest(self) -> bool:
        """Whether something can be delivered without another frame: sound, a pause, or the end."""
        spoken = self.segment is None and self.script.ended
        return spoken or bool(self.chunker.undecoded or self.chunker.decoding) or self._silent_samples > 0

    def next_segment(self, positions: int) -> bool:
        """Whether the next `segment` is known and may begin. positions: the most for it, prompt and frames."""
        if self.segment is not None:
            return True
        begun_s = time.perf_counter()
        prompt, voice, silent_samples = self.script.next_segment()
        self.begins_anew = self.begins_anew or silent_samples is not None
        self._silent_samples += silent_samples or 0
        self.chunker.prefill_ms += 1e3 * (time.perf_counter() - begun_s)
        if prompt is None:
            return False
        plan = self.plan
        limit = MAX_SEGMENT_FRAMES if plan.max_frames is None else plan.max_frames - len(self.codes)
        limit = max(1, min(limit, positions - len(prompt.embeds)))
        # Keys and values for no more frames than the guard allows; the frame that reaches its limit is the last.
        guarded = plan.options.guard.limit_frames(prompt.text_tokens) if prompt.text_ended else math.inf
        self.segment_number += 1
        seed, frames = plan.seed + self.segment_number, max(1, min(limit, guarded))
        reference, guard = None if voice is None else voice.codes, GuardState(plan.options.guard, limit)
        self.segment = Segment(prompt, plan.sampling, seed, frames, self, reference, guard)
        return True

    @property
    def unread(self) -> bool:
        """Whether frames of the segment are in flight: launched, but their codes are not known yet."""
        return self.segment is not None and self.segment.launched > self.segment.guard.frames

    def add_frame(
        self, codes: Tensor | np.ndarray | None, pcm: tuple[bytearray, bytes | None] | None, ahead: bool
    ) -> None:
        """Adds a frame of the segment, codes (16,) int64 or None at end of speech, and delivers the chunk that it
        completes. pcm: its samples (1920,) float32, and the same in 16 bits if that was made; None where `submit` makes
        them. ahead: see `Chunker.take`."""
        if codes is None:
            self.segment = None
            over = "eos" if self.script.ended else None
        else:
            self.codes.append(codes)
            self.chunker.undecoded.append(codes if pcm is None else pcm)
            self.chunker.pending_frames += 1
            over = self.segment.guard.count(codes, self.segment.prompt.text_tokens)
        self._hand_on(over, over is not None, ahead and over is None)

    def flush(self) -> None:
        """Delivers what there is, without a frame: at the end, or because the text has stopped for now."""
        self._hand_on("eos" if self.segment is None and self.script.ended else None, True)

    def _hand_on(self, over: FinishReason | None, flush: bool, ahead: bool = False) -> None:
        """Delivers the next chunk, if there is one, and pauses. over: why the stream ends with them, or None."""
        if self.cancelled:
            self.end(None)
            return
        chunk = self.chunker.take(self.submit or _decoded, flush, ahead)
        if chunk is not None:
            first = not self.made_frames
            self.deliver(chunk)
            if first and self.engine == "single":
                self._notifier.flush()  # the consumer takes it now
                time.sleep(_YIELD_S)
        if self._silent_samples:
            for silence in self.chunker.silence(self._silent_samples):
                self.deliver(silence)
            self.silent_s += self._silent_samples / SAMPLE_RATE_HZ
            self._silent_samples = 0
        if over is not None:
            self.end(over)

    # ---- worker: what becomes of it

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error, which its consumer gets. No effect on one that is over."""
        if not self.open:
            return
        traceback.clear_frames(error.__traceback__)  # they would keep the stream's caches
        self.error = error
        self.end(None)

    def end(self, reason: FinishReason | None) -> None:
        """Ends the stream: frees what it was made with, and ends the queue of chunks. No effect on one that is over."""
        if not self.open:
            return
        self._reason = reason
        self.set_idle(False)
        self.open = False
        self.script = self.segment = self.submit = None
        self.lately_read = _NOT_KEPT
        on_close, self.on_close = self.on_close, None
        try:
            if on_close is not None:
                on_close()
        finally:  # even if closing fails, nobody waits for more
            self.deliver(None)
            if self._when_over is not None:
                self._when_over()

    def set_idle(self, idle: bool) -> None:
        if idle is not self.idle:
            self.idle = idle
            if self.sink is not None:
                self.sink(self, "idle", None)

    def full(self, pending_frames: int) -> bool:
        """Whether the consumer must take something first; it then wakes the worker. pending_frames: in no chunk yet."""
        self.watched = True  # before `taken_frames` is read: what is taken from now on wakes the worker
        waiting = self.made_frames - self.taken_frames
        self.watched = waiting > 0 and waiting + pending_frames >= self.buffer_frames
        return self.watched

    def deliver(self, chunk: Chunk | None, at_once: bool = False) -> None:
        """Delivers the next chunk, or None for the end. at_once: called by another thread than the worker's."""
        if chunk is not None:
            self.made_frames += chunk.frames
        if self.sink is not None:
            if not at_once:  # otherwise the other process has cancelled it
                self.sink(self, "over" if chunk is None else "chunk", chunk)
            return
        self._chunks.put(chunk)
        if (waiter := self._waiter) is not None:
            loop, future = waiter
            _wake(loop, [future]) if at_once else self._notifier.waiters[loop].append(future)


def _decoded(frames: list[tuple[bytearray, bytes | None]]) -> PendingPcm:
    """Joins frames whose PCM the lanes have given."""
    pcm, pcm16 = zip(*frames, strict=True)
    return PendingPcm(None, pcm16=None if None in pcm16 else b"".join(pcm16), samples=joined(pcm))


def _wake(loop: asyncio.AbstractEventLoop, waiters: Sequence[asyncio.Future[None]]) -> None:
    with contextlib.suppress(Exception):  # a closed loop has no waiters; any other error is the loop's own
        loop.call_soon_threadsafe(_set, waiters)


def _set(waiters: Sequence[asyncio.Future[None]]) -> None:
    for waiter in waiters[:_WOKEN_AT_ONCE]:
        if not waiter.done():
            waiter.set_result(None)
    if rest := waiters[_WOKEN_AT_ONCE:]:
        asyncio.get_running_loop().call_soon(_set, rest)


def _end_in_child() -> None:
    """After a fork: nobody makes the streams that are open, and their readers must not wait for ever."""
    for utterance in list(_BEGUN):
        utterance.on_close = utterance.sink = None
        utterance.fail(EngineError(FORKED))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)


class Stream(contextlib.AbstractContextManager["Stream"], contextlib.AbstractAsyncContextManager["Stream"]):
    """Chunks of one utterance, in order, made while they are taken. Iterate with `for` or with `async for`, one
    consumer at a time. Leaving the `with` block, `close`, `aclose`, dropping the object, an exception while waiting
    (Ctrl-C), and cancelling the task that waits all end the generation within one frame. Errors of the generation are
    raised here. seed: determines every draw; the same seed and text give the same speech."""

    def __init__(self, engine: Any, utterance: Utterance, words: WordTimes | None = None) -> None:
        """words: finds the times of its words; None if they are not wanted."""
        self.seed, self._words = utterance.plan.seed, words
        self._engine = engine  # kept: dropping the synthesizer must not end a stream that is being read
        self._utterance = utterance
        # Once called, it does not hold the utterance, whose error may hold this stream by the frames of its traceback.
        self._give_up = weakref.finalize(self, utterance.cancel)
        self._give_up.atexit = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the generation ended; None while it runs, and when it failed."""
        return self._utterance.finish_reason

    @property
    def idle(self) -> bool:
        """Whether it waits for its text or for its consumer."""
        return self._utterance.idle

    @property
    def late_s(self) -> float:
        """Seconds by which chunks came too late so far, for a listener who plays from the first one on."""
        return self._utterance.late_s

    @property
    def codes(self) -> Tensor:
        """The frames made so far, (T, 16) int64, of all segments; they may be ahead of the chunks taken."""
        frames = [torch.as_tensor(codes) for codes in list(self._utterance.codes)]
        return torch.stack(frames) if frames else torch.empty((0, NUM_CODEBOOKS), dtype=torch.int64)

    @property
    def words(self) -> tuple[WordTime, ...]:
        """Words of the chunks taken so far, at the end all of them; none without `StreamOptions.word_times`."""
        return () if self._words is None else tuple(self._words.settled)

    @property
    def engine(self) -> EngineName | None:
        """What makes it: "single", one stream a step, or "batch", many together; None until it has text."""
        return self._utterance.engine

    def cancel(self) -> None:
        """Ends the generation within one frame; no chunk comes after this. Any thread, any number of times."""
        self._utterance.cancel()

    close = cancel

    def when_over(self, call: Callable[[], None]) -> None:
        """Calls `call`, perhaps twice, when the generation has ended, however it did; at once if it has already. It
        runs in the worker's thread and must neither wait nor raise. Only for a stream whose text is known."""
        self._utterance.when_over(call)

    def read(self) -> np.ndarray:
        """All PCM that is left, (S,) float32; waits for the end. Raises EngineError as `__iter__`."""
        return np.concatenate([NO_PCM, *(chunk.pcm for chunk in self)])

    async def aread(self) -> np.ndarray:
        """As `read`, for an event loop."""
        return np.concatenate([NO_PCM, *[chunk.pcm async for chunk in self]])

    def __repr__(self) -> str:
        state = self.finish_reason or ("over" if self._utterance.over else "open")
        return f"<{type(self).__name__}: {len(self._utterance.codes)} frames, {state}, seed {self.seed}>"

    def __iter__(self) -> Stream:
        """Raises EngineError if every chunk was taken already; a cancelled stream is empty, without an error."""
        utterance = self._utterance
        if utterance.read and not utterance.cancelled and utterance.error is None:
            raise EngineError("this stream was read to its end, and chunks are not kept: make another stream")
        return self

    __aiter__ = __iter__

    def __next__(self) -> Chunk:
        try:
            chunk = self._utterance.take()
        except BaseException:
            self._give_up()
            raise
        chunk = chunk if self._words is None else self._with_words(chunk)
        if chunk is None:
            raise StopIteration
        return chunk

    def _with_words(self, chunk: Chunk | None) -> Chunk | None:
        if chunk is None:
            self._words.end(complete=self.finish_reason == "eos")
            return None
        return replace(chunk, words=tuple(self._words.add(chunk.pcm)))

    async def take(self, within_s: float | None = None) -> Chunk | None:
        """The next chunk; None at the end. Raises as `__anext__`, and TimeoutError if there is none within `within_s`:
        the stream then goes on."""
        try:
            chunk = await self._utterance.take_async(within_s)
        except BaseException as error:  # cancelling the task that waits cancels the generation
            if within_s is None or not isinstance(error, TimeoutError):
                self._give_up()
            raise
        return chunk if self._words is None else self._with_words(chunk)

    async def __anext__(self) -> Chunk:
        chunk = await self.take()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __exit__(self, *_: object) -> None:
        self._utterance.cancel()

    async def __aexit__(self, *_: object) -> None:
        self._utterance.cancel()

    aclose = __aexit__  # for contextlib.aclosing


class Session(Stream):
    """A stream whose text is written while it is spoken; `feed` and `finish` never wait, and may be called from any
    thread.

    A word is spoken once it is complete, that is, when the next one begins; where the checkpoint names a text front
    end, once its reading is certain: numbers and names wait for the words around them, other words for the next one's
    end."""

    def __init__(
        self, engine: Any, utterance: Utterance, script: Callable[..., Script], text: TextFeed, words: WordTimes | None
    ) -> None:
        """script: a `FedScript` without its first texts. text: what the text goes through before the engine, which
        learns of the stream with the first visible text. words: see `Stream`."""
        super().__init__(engine, utterance, words)
        self._script, self._text = script, text
        self._early: list[Any] = []  # parts of pieces before anything visible
        self._writing = threading.Lock()
        self._chars, self._finished = 0, False

    def feed(self, piece: str) -> None:
        """Adds text; an empty piece is allowed, and text for a stream that is over is dropped. Raises TextError if
        `piece` is not a str or the whole exceeds MAX_TEXT_CHARS, and as `TextFeed.take`; such a piece is not spoken.
        Raises EngineError after `finish`, and in a forked child before the first text."""
        piece = clean_piece(piece)
        with self._writing:
            if self._finished:
                raise EngineError("feed after finish: open another session for more text")
            if self._utterance.over:
                return
            check_length(self._chars + len(piece))
            parts = self._text.take(piece)
            if self._words is not None:
                self._words.feed(piece)
            self._chars += len(piece)
            if self._utterance.engine is not None:
                self._engine.feed(self._utterance, parts)
            elif not piece.strip():
                self._early += parts
            else:
                try:
                    self._engine.begin(self._utterance, partial(self._script, texts=[*self._early, *parts]))
                except EngineError:
                    if not self._utterance.over:  # otherwise the engine was closed meanwhile
                        raise

    def finish(self) -> None:
        """Says that no more text comes; a second call does nothing. Raises TextError if nothing visible was fed, and as
        `TextFeed.take`; the stream is then cancelled."""
        with self._writing:
            if self._finished:
                return
            self._finished, over = True, self._utterance.over
            try:
                if self._utterance.engine is None and not over:
                    raise TextError("expected text to speak before finish, got none")
                parts = () if over else self._text.take("", final=True)
            except TextError:
                self._utterance.cancel()
                raise
            if self._words is not None:
                self._words.finish()
            self._engine.feed(self._utterance, [*parts, None])
