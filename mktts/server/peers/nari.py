"""Nari's `/v1/audio/speech/ws`, subprotocol `nari.speech.v1`: one utterance whose text comes in numbered pieces.

Messages as docs/websocket.md and the server of nari-labs/nari-qwen3-tts have them at e8c5b2b.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import WebSocketDisconnect
from pydantic import ValidationError

from mktts.errors import MkttsError
from mktts.server.peers.socket import FAILED, NORMAL, POLICY_VIOLATION, PeerSocket, Stalled
from mktts.server.problems import Problem, from_error, from_validation
from mktts.server.speaking import KEYS
from mktts.server.speech_request import OpenAISpeechRequest
from mktts.spec import SAMPLE_RATE_HZ

PROTOCOL = "nari.speech.v1"
_NO_PROTOCOL = 1002  # RFC 6455, 7.4.1: a protocol error
_AUDIO = {"encoding": "pcm_s16le", "sample_rate": SAMPLE_RATE_HZ, "channels": 1}
_ORDER = "expected request.start, then input_text.append any number of times, then input_text.end"


class NariSocket(PeerSocket):
    """One task receives, one sends the sound."""

    _utterance: Any = None
    _session: Any = None
    _output: asyncio.Task[int] | None = None
    _next = 0  # sequence number expected

    async def run(self) -> None:
        """Until the utterance has ended, or the client goes away."""
        if PROTOCOL not in self.socket.scope.get("subprotocols", ()):
            await self.socket.accept()
            await self.close(_NO_PROTOCOL, f"required subprotocol: {PROTOCOL}")
            return
        await self.socket.accept(PROTOCOL)
        receiving: asyncio.Task[None] | None = None
        try:
            await self.send({"type": "session.created", "protocol": PROTOCOL, "audio": _AUDIO})
            cancelled = await self._listen()
            receiving = asyncio.create_task(self._until_cancelled())
            chunks = await self._finished(receiving, cancelled)
            reason = "cancelled" if cancelled or receiving.done() else "stop"
            await self._end({"type": "response.done", "stop_reason": reason, "audio_chunks": chunks}, NORMAL)
        except (WebSocketDisconnect, RuntimeError, Stalled):
            pass
        except Problem as problem:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, Stalled):
                detail = problem.detail(None if self._utterance is None else self._utterance.id)
                said = {"type": detail.type, "code": detail.code, "message": detail.message}
                code = FAILED if problem.status >= 500 else POLICY_VIOLATION
                await self._end({"type": "error", "error": said, "server_request_id": detail.request_id}, code)
        finally:
            for task in (receiving, self._output):
                if task is not None:
                    task.cancel()
            if self._utterance is not None:
                self._utterance.close()

    async def _listen(self) -> bool:
        """Takes the text, to its end; True where the client cancels. Raises Problem."""
        while True:
            try:
                message = await self.receive(self.studio.limits.idle_s)
            except TimeoutError:
                raise Problem(408, "input_timeout", f"no text for {self.studio.limits.idle_s:g} s") from None
            if self._output is not None and self._output.done():
                self._output.result()  # it failed: why
            kind = message["type"]
            if kind == "request.start" and self._utterance is None:
                self._start(message)
                await self.send({"type": "request.configured"})
            elif self._utterance is None:
                raise Problem(400, "invalid_request", _ORDER)
            elif kind == "response.cancel":
                self._utterance.close()
                return True
            elif kind in ("input_text.append", "input_text.end"):
                await self._text(kind, message)
                if kind == "input_text.end":
                    return False
            else:
                raise Problem(400, "unknown_event", f"{_ORDER}; got {kind[:40]!r}")

    def _start(self, message: dict[str, Any]) -> None:
        wishes = {key: value for key, value in message.items() if key != "type"}
        format = wishes.pop("response_format", None)
        if format not in (None, "pcm", "pcm16", "pcm_s16le"):
            raise Problem(400, "invalid_value", "response_format: expected pcm", "response_format")
        if "instruction" in wishes:
            wishes["instructions"] = wishes.pop("instruction")
        try:
            body = OpenAISpeechRequest.model_validate({**wishes, "input": "Ready."})
        except ValidationError as error:
            raise from_validation(error.errors(include_input=False)) from None
        self.speaking.check(body)
        manner = body.manner(self.studio.limits.max_frames)
        self._utterance, self._session = self.studio.listen("nari_ws", manner, self.owner)

    async def _text(self, kind: str, message: dict[str, Any]) -> None:
        sequence = message.get("sequence")
        if sequence != self._next or isinstance(sequence, bool):
            raise Problem(400, "invalid_sequence", f"expected sequence {self._next}", "sequence")
        self._next += 1
        try:
            if kind == "input_text.append":
                self._append(message.get("text"))
            else:
                self._utterance.fed()
                self._session.finish()
        except MkttsError as error:
            raise from_error(error) from None
        if self._output is None:
            id = self._utterance.id
            await self.send({"type": "response.started", "request_id": id, "audio": _AUDIO})
            self._output = asyncio.create_task(self._send_sound())
        ack = {"event": kind, "sequence": sequence, "request_id": self._utterance.id}
        await self.send({"type": "input_text.ack", **ack})

    def _append(self, text: Any) -> None:
        if not isinstance(text, str) or not text:
            raise Problem(400, "invalid_value", "text: expected a string that is not empty", "text")
        self._utterance.fed(text)
        self.studio.check_chars(self._utterance.chars, "text", KEYS)
        self._session.feed(text)

    async def _send_sound(self) -> int:
        """Pieces sent. Raises Problem where the generation failed."""
        sent = 0
        async with contextlib.aclosing(self._utterance.chunks()) as chunks:
            async for chunk in chunks:
                with self._utterance.sending(chunk.duration_s):
                    await self.send(chunk.pcm16)
                sent += 1
        return sent

    async def _finished(self, receiving: asyncio.Task[None], cancelled: bool) -> int:
        """Pieces sent in all, once the sound has ended or the client has cancelled it."""
        if self._output is None:
            return 0
        if not cancelled:
            await asyncio.wait((self._output, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # the connection is gone, or it was cancelled
                self._utterance.close()
        return await self._output

    async def _until_cancelled(self) -> None:
        while (await self.receive(None))["type"] != "response.cancel":
            pass

    async def _end(self, message: dict[str, Any], code: int) -> None:
        id = None if self._utterance is None else self._utterance.id
        await self.send({**message, "request_id": id})
        await self.close(code, message["type"])
