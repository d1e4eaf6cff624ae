"""An utterance as the body of one HTTP response, sent while it is made."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import Response

from mktts.audio.encoding import UNCODED, Encoder, Samples, StreamFormat, encoder_of
from mktts.errors import MkttsError
from mktts.server import events
from mktts.server.problems import Problem
from mktts.server.utterance import Utterance
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.options import Chunk

MEDIA_TYPES: dict[StreamFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate={rate_hz};channels=1;format=s16le",
}

log = logging.getLogger(__name__)


class Body:
    """The bytes of an answer in `format`; speed, sample_rate_hz, whole: as `encoder_of`. Raises Problem where it
    cannot be made.

    as_events: in server-sent events instead of as they are; then `usage` is asked for (tokens of the text, frames).
    """

    def __init__(
        self,
        format: StreamFormat,
        *,
        speed: float = 1.0,
        sample_rate_hz: int = SAMPLE_RATE_HZ,
        whole: bool = False,
        as_events: bool = False,
        usage: Callable[[], Awaitable[tuple[int, int]]] | None = None,
    ) -> None:
        try:
            self._encoder: Encoder = encoder_of(format, speed=speed, sample_rate_hz=sample_rate_hz, whole=whole)
        except MkttsError as error:
            raise Problem(400, "bad_format", str(error), "response_format") from None
        media_type = MEDIA_TYPES[format].format(rate_hz=sample_rate_hz)
        self.media_type = events.MEDIA_TYPE if as_events else media_type
        self.format = format
        self.sample_rate_hz = sample_rate_hz
        self.as_events = as_events
        self.speed = speed
        self._usage = usage

    async def feed(self, chunk: Chunk) -> bytes:
        """What can be sent once `chunk` is in; may be nothing yet. An encoder's work is done beside the event loop."""
        if isinstance(self._encoder, Samples):
            return self._sent(self._encoder.feed_pcm16(chunk.pcm16))
        return self._sent(await asyncio.to_thread(self._encoder.feed, chunk.pcm))

    async def finish(self) -> bytes:
        """The rest."""
        idle = isinstance(self._encoder, Samples)
        rest = self._sent(self._encoder.finish() if idle else await asyncio.to_thread(self._encoder.finish))
        if self.as_events and self._usage is not None:
            rest += events.done(*await self._usage())
        return rest

    def _sent(self, data: bytes) -> bytes:
        return events.delta(data) if self.as_events and data else data


def headers(utterance: Utterance, body: Body, random_weights: bool) -> dict[str, str]:
    """What is known before the first sample; the rest is at GET /tts/stream/{X-Request-Id}."""
    return {
        "Content-Type": body.media_type,
        "X-Request-Id": utterance.id,
        "X-Seed": str(utterance.seed),
        "X-Sample-Rate-Hz": str(body.sample_rate_hz),
        "X-Sample-Rate": str(body.sample_rate_hz),  # as other servers of this model call it
        "X-Sample-Format": "s16le" if body.format in UNCODED else body.format,
        "X-Channels": "1",
        "X-Random-Weights": str(random_weights).lower(),
        "Cache-Control": "no-store",
        "X-Accel-Buffering": "no",  # tells a proxy (nginx) to pass on what comes
    }


class AudioAnswer(Response):
    """Status and headers wait for the first bytes, so that what fails before them is an error and not half a file.
    Where those are all there is, the headers say how many.

    A client that reads slowly stops the generation (see StreamOptions.buffer_frames), one that goes away ends it. A
    generation that fails or is ended by the server after the first bytes breaks the connection off: the body lacks
    its last chunk, which no client takes for a whole one. Events end with one that says what happened.
    """

    def __init__(self, utterance: Utterance, body: Body, head: dict[str, str], stall_s: float) -> None:
        self.status_code = 200  # Response's own __init__ would announce an empty body
        self.background = None
        self.init_headers(head)
        self._utterance = utterance
        self._body = body
        self._stall_s = stall_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._send_all(scope, receive, send)
        finally:
            watch.cancel()
            self._utterance.close()

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._utterance.close()

    async def _send_all(self, scope: Any, receive: Any, send: Any) -> None:
        started, sound_s = False, 0.0
        try:
            async with contextlib.aclosing(self._utterance.chunks()) as chunks:
                async for chunk in chunks:
                    data = await self._body.feed(chunk)
                    sound_s += chunk.duration_s / self._body.speed
                    if not data:
                        continue
                    if not started:
                        started = True
                        await self._start(send)
                    with self._utterance.sending(sound_s):
                        async with asyncio.timeout(self._stall_s):
                            await send(_body(data))
                    sound_s = 0.0
            rest = b"" if self._utterance.closed else await self._body.finish()
        except Problem as problem:
            if not started:
                self._utterance.close()
                await problem.response({"X-Request-Id": self._utterance.id})(scope, receive, send)
            elif self._body.as_events:
                self._utterance.close()
                await send({**_body(events.failed(problem)), "more_body": False})
            return
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", self._utterance.id, self._stall_s)
            return
        if self._utterance.closed:  # the client went away
            return
        self._utterance.close()  # before the last byte: a client that has it all finds the record complete
        if not started:
            self.headers["Content-Length"] = str(len(rest))
            await self._start(send)
        await send({**_body(rest), "more_body": False})

    async def _start(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
