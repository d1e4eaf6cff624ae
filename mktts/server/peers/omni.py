"""vLLM-Omni's `/v1/audio/speech/stream`: text in pieces, and at each `input.done` one utterance of all of them.

Messages as docs/serving/speech_api.md of vllm-project/vllm-omni has them at 078de2d. Its text waits for `input.done`;
`/tts/ws` speaks while the text is still being written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from fastapi import WebSocketDisconnect
from pydantic import ValidationError

from mktts.server.peers.socket import NORMAL, POLICY_VIOLATION, PeerSocket, Stalled
from mktts.server.problems import Problem, from_validation
from mktts.server.speaking import Begun
from mktts.server.speech_request import OpenAISpeechRequest

_MAX_WAITING = 8  # utterances that the client has flushed and that are not spoken yet
_TYPES = "session.config, input.text, input.done or session.close"
_OF_THE_SESSION = {"type", "stream_audio", "split_granularity"}  # keys of session.config that no request has

log = logging.getLogger(__name__)


class OmniSocket(PeerSocket):
    """One task receives and never waits for anything else, so that a closed connection shows there; one speaks."""

    _config: dict[str, Any] = {}
    _stream_audio = False
    _configured = False
    _text = ""
    _utterances = 0

    async def run(self) -> None:
        """Until the client closes, or is idle for too long."""
        await self.socket.accept()
        self._flushed: asyncio.Queue[tuple[int, OpenAISpeechRequest | None] | None] = asyncio.Queue()
        self._waiting = 0
        speaker = asyncio.create_task(self._speak_all())
        try:
            while await self._take(speaker):
                pass
            await speaker  # what was flushed before session.close
            await self.close(NORMAL)
        except (WebSocketDisconnect, RuntimeError, Stalled):
            pass
        except Problem as problem:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, Stalled):
                await self._refuse(problem)
            await self.close(POLICY_VIOLATION, problem.code)
        finally:
            speaker.cancel()

    async def _take(self, speaker: asyncio.Task[None]) -> bool:
        """One message; False for the last. Raises Problem for what ends the connection."""
        try:
            message = await self.receive(self.studio.limits.idle_s)
        except TimeoutError:
            if self._waiting:
                return True
            raise Problem(408, "idle", f"no message for {self.studio.limits.idle_s:g} s") from None
        if speaker.done():  # it stalled, or the connection is gone
            await speaker
            return False
        kind = message["type"]
        if kind == "session.close":
            self._flushed.put_nowait(None)
            return False
        if kind not in ("session.config", "input.text", "input.done"):
            raise Problem(400, "invalid_value", f"type: expected {_TYPES}, got {kind[:40]!r}", "type")
        if kind != "session.config" and not self._configured:
            raise Problem(400, "not_configured", "expected session.config before anything else")
        try:
            if kind == "session.config":
                self._configure(message)
            elif kind == "input.text":
                self._add(message.get("text"))
            else:
                self._flush()
        except Problem as problem:
            await self._refuse(problem)
        return True

    def _configure(self, message: dict[str, Any]) -> None:
        if self._text:
            raise Problem(400, "text_waits", "session.config: text is waiting; send input.done first")
        stream_audio = message.get("stream_audio") or False
        if not isinstance(stream_audio, bool):
            raise Problem(400, "invalid_value", "stream_audio: expected true or false", "stream_audio")
        config = {key: value for key, value in message.items() if key not in _OF_THE_SESSION}
        config["response_format"] = config.get("response_format") or ("pcm" if stream_audio else "wav")
        self._config, self._stream_audio = config, stream_audio
        self.speaking.check(self._request("Ready."))
        self._configured = True

    def _add(self, text: Any) -> None:
        if not isinstance(text, str):
            raise Problem(400, "invalid_value", "text: expected a string", "text")
        self.studio.check_chars(len(self._text) + len(text))
        self._text += text

    def _flush(self) -> None:
        text, self._text = self._text, ""
        if self._waiting >= _MAX_WAITING:
            raise Problem(400, "too_many_starts", f"{_MAX_WAITING} utterances wait to be spoken: read them")
        self._waiting += 1
        self._flushed.put_nowait((self._utterances, self._request(text) if text.strip() else None))
        self._utterances += 1

    def _request(self, text: str) -> OpenAISpeechRequest:
        whole = {} if self._stream_audio else {"stream": False, "stream_format": None}
        try:
            return OpenAISpeechRequest.model_validate({**self._config, **whole, "input": text})
        except ValidationError as error:
            raise from_validation(error.errors(include_input=False)) from None

    async def _speak_all(self) -> None:
        while (flushed := await self._flushed.get()) is not None:
            number, request = flushed
            try:
                if request is not None:
                    await self._speak(number, request)
                done = {"utterance_index": number, "total_sentences": int(request is not None)}
                await self.send({"type": "session.done", **done})
            finally:
                self._waiting -= 1

    async def _speak(self, number: int, request: OpenAISpeechRequest) -> None:
        place = {"utterance_index": number, "sentence_index": 0}
        try:
            begun = await self.speaking.begin(request, self.owner, "omni_ws")
        except Problem as problem:
            self.studio.meters.refused.labels(problem.code).inc()
            await self._refuse(problem, **place)
            return
        total_bytes, failed = 0, False
        try:
            try:
                await begun.utterance.begun()
            except Problem as problem:
                if problem.code == "busy":
                    await self._refuse(problem, **place)
                    return
            head = {"format": begun.sound.format, "sample_rate": begun.sound.sample_rate_hz}
            await self.send({"type": "audio.start", **place, "sentence_text": request.input, **head})
            try:
                total_bytes = await self._send_sound(begun)
            except Problem as problem:
                failed = True
                await self._refuse(problem, **place)
        finally:
            begun.utterance.close()
        await self.send({"type": "audio.done", **place, "total_bytes": total_bytes, "error": failed})

    async def _send_sound(self, begun: Begun) -> int:
        """Bytes sent. Raises Problem where the generation failed."""
        total_bytes, sound_s = 0, 0.0
        async with contextlib.aclosing(begun.utterance.chunks()) as chunks:
            async for chunk in chunks:
                sound_s += chunk.duration_s / begun.sound.speed
                if data := await begun.sound.feed(chunk):
                    with begun.utterance.sending(sound_s):
                        await self.send(data)
                    total_bytes, sound_s = total_bytes + len(data), 0.0
        if rest := await begun.sound.finish():
            await self.send(rest)
            total_bytes += len(rest)
        return total_bytes

    async def _refuse(self, problem: Problem, **place: int) -> None:
        detail = problem.detail()
        more = {} if problem.retry_after_s is None else {"retry_after_s": problem.retry_after_s}
        said = {"message": detail.message, "code": detail.code, "param": detail.param, "request_id": detail.request_id}
        await self.send({"type": "error", **said, **more, **place})
