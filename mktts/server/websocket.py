"""`/tts/ws`: text as it is written in, audio and timings out, any number of utterances one after the other.

Two tasks: one receives and must never wait for anything else, because a `cancel` or a closed connection shows there;
one sends an utterance, and may be held up by a slow client. The receiving task sends only where nothing else does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import TypeAdapter, ValidationError

from mktts.errors import MkttsError
from mktts.server.access.gate import owner_of_request
from mktts.server.problems import Problem, from_error, from_validation
from mktts.server.schemas import (
    Cancel,
    ChunkNote,
    ChunkTimings,
    ClientMessage,
    Finish,
    Finished,
    Refused,
    Start,
    Started,
    StrictModel,
    Text,
)
from mktts.server.studio import Studio
from mktts.server.utterance import Utterance
from mktts.spec import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.speech.options import Chunk
    from mktts.speech.stream import Session

_MESSAGES: TypeAdapter[Any] = TypeAdapter(ClientMessage)
_MAX_WAITING = 8  # utterances started and cancelled while the client has read none of their ends
_POLICY_VIOLATION = 1008  # RFC 6455, 7.4.1

log = logging.getLogger(__name__)


class SpeechSocket:
    """One connection. At most one utterance takes text; a cancelled one may still be on its way out before it."""

    def __init__(self, socket: WebSocket, studio: Studio) -> None:
        self._socket = socket
        self._studio = studio
        self._owner = owner_of_request(socket.scope)
        self._utterance: Utterance | None = None  # the latest
        self._session: Session | None = None
        self._begun = False  # there was a start
        self._writing = False  # more text may come
        self._sending: asyncio.Task[None] | None = None  # the last of a chain, each waiting for the one before
        self._waiting = 0  # of the chain, not done

    async def run(self) -> None:
        await self._socket.accept()
        try:
            while True:
                self._take(await self._message())
        except WebSocketDisconnect:
            pass
        except Problem as problem:  # a message that makes no sense
            self._end()
            with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                await self._refuse(problem)
                await self._socket.close(_POLICY_VIOLATION, problem.code)
        finally:
            self._end()
            if self._sending is not None:
                self._sending.cancel()  # the ones before it end by themselves: their connection is gone

    async def _message(self) -> Any:
        """The next message. Raises Problem, and WebSocketDisconnect at the end of the connection."""
        while True:
            try:
                async with asyncio.timeout(self._studio.limits.idle_s if self._waits_for_text() else None):
                    text = await self._socket.receive_text()
                return _MESSAGES.validate_json(text)
            except TimeoutError:
                self._fail(Problem(408, "idle", f"no text for {self._studio.limits.idle_s:g} s"))
            except KeyError:
                raise Problem(422, "not_text", "expected a JSON message, got a binary one") from None
            except ValidationError as error:
                raise from_validation(error.errors(include_input=False), tagged=True) from None

    def _take(self, message: StrictModel) -> None:
        if isinstance(message, Start):
            self._start(message)
            return
        if not self._begun:
            raise Problem(422, "not_started", "expected start before anything else")
        if self._utterance is None or self._utterance.closed or not self._writing:
            if isinstance(message, Cancel):
                self._end()
            return  # it ended, or was refused, before the client could know
        if isinstance(message, Text):
            self._feed(message.text)
        elif isinstance(message, Finish):
            self._writing = False
            self._utterance.fed()
            self._try(self._session.finish)
        else:
            self._end()

    def _start(self, message: Start) -> None:
        if self._utterance is not None and not self._utterance.closed:
            raise Problem(422, "not_finished", "expected cancel, or finish and its finished, before another start")
        self._begun = True
        try:
            if message.text is None:
                self._utterance, self._session = self._studio.listen("tts_ws", message, self._owner)
            else:
                self._utterance = self._studio.speak("tts_ws", message.text, message, owner=self._owner)
        except Problem as problem:
            self._studio.meters.refused.labels(problem.code).inc()
            self._then(partial(self._refuse, problem))
            return
        self._writing = message.text is None
        self._then(partial(self._send_all, self._utterance, known=not self._writing))

    def _then(self, send: Callable[[], Awaitable[None]]) -> None:
        """Sends after all that is being sent. Raises Problem when a client that does not read asks for ever more."""
        before = self._sending

        async def go() -> None:
            if before is not None:
                await asyncio.wait([before])
            try:
                await send()
            finally:
                self._waiting -= 1

        if self._waiting == _MAX_WAITING:
            raise Problem(422, "too_many_starts", f"{_MAX_WAITING} answers wait to be read: read them")
        self._waiting += 1
        self._sending = asyncio.create_task(go())

    def _feed(self, text: str) -> None:
        utterance = self._utterance
        utterance.fed(text)
        self._try(self._studio.check_chars, utterance.chars)
        if not utterance.closed:
            self._try(self._session.feed, text)

    def _try(self, call: Any, *arguments: Any) -> None:
        """Calls; what is wrong with the text ends the utterance, not the connection."""
        try:
            call(*arguments)
        except MkttsError as error:
            self._fail(from_error(error))

    def _fail(self, problem: Problem) -> None:
        self._writing = False
        self._utterance.fail(problem)

    def _end(self) -> None:
        """No more text, no more audio."""
        self._writing = False
        if self._utterance is not None:
            self._utterance.close()

    def _waits_for_text(self) -> bool:
        return self._writing and not self._utterance.closed

    async def _send_all(self, utterance: Utterance, known: bool) -> None:
        """known: the whole text, so that a place is found, or not, before anything is said of it."""
        try:
            if known and not await self._has_place(utterance):
                return
            weights = self._studio.model.random_weights
            await self._send(
                Started(id=utterance.id, seed=utterance.seed, sample_rate_hz=SAMPLE_RATE_HZ, random_weights=weights)
            )
            with contextlib.suppress(Problem):  # the state holds it
                async with contextlib.aclosing(utterance.chunks()) as chunks:
                    async for chunk in chunks:
                        await self._send_chunk(utterance, chunk)
            utterance.close()
            await self._send(Finished(**utterance.state.model_dump()))
        except (WebSocketDisconnect, RuntimeError):  # the connection is gone: the receiving task sees it too
            pass
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", utterance.id, self._studio.limits.stall_s)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                async with asyncio.timeout(1):
                    await self._socket.close(_POLICY_VIOLATION, "stalled")
        finally:
            utterance.close()

    async def _has_place(self, utterance: Utterance) -> bool:
        try:
            await utterance.begun()
        except Problem as problem:
            if problem.code == "busy":
                utterance.close()
                await self._refuse(problem)
                return False
        return True  # what else is wrong the state holds

    async def _send_chunk(self, utterance: Utterance, chunk: Chunk) -> None:
        note = ChunkNote(
            id=utterance.id,
            start_s=chunk.start_s,
            duration_s=chunk.duration_s,
            frames=chunk.frames,
            timings=ChunkTimings(**asdict(chunk.timings)),
        )
        with utterance.sending(chunk.duration_s):
            await self._send(note)
            async with asyncio.timeout(self._studio.limits.stall_s):
                await self._socket.send_bytes(chunk.pcm16)

    async def _send(self, message: StrictModel) -> None:
        async with asyncio.timeout(self._studio.limits.stall_s):
            await self._socket.send_text(message.model_dump_json())

    async def _refuse(self, problem: Problem) -> None:
        await self._send(Refused(error=problem.detail(), retry_after_s=problem.retry_after_s))
