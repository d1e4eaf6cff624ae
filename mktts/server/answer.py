"""An utterance as the body of one HTTP response, sent while it is made."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from fastapi.responses import Response

from mktts.audio import to_pcm16
from mktts.server import formats
from mktts.server.problems import Problem
from mktts.server.utterance import Utterance
from mktts.spec import SAMPLE_RATE_HZ

log = logging.getLogger(__name__)


def headers(utterance: Utterance, format: formats.Format, random_weights: bool) -> dict[str, str]:
    """What is known before the first sample; the rest is at GET /tts/stream/{X-Request-Id}."""
    return {
        "Content-Type": formats.MEDIA_TYPES[format],
        "X-Request-Id": utterance.id,
        "X-Seed": str(utterance.seed),
        "X-Sample-Rate-Hz": str(SAMPLE_RATE_HZ),
        "X-Sample-Format": "s16le",
        "X-Channels": "1",
        "X-Random-Weights": str(random_weights).lower(),
        "Cache-Control": "no-store",
        "X-Accel-Buffering": "no",  # tells a proxy (nginx) to pass on what comes
    }


class AudioAnswer(Response):
    """Status and headers wait for the first chunk, so that what fails before it is an error and not half a file.

    A client that reads slowly stops the generation (see StreamOptions.buffer_frames), one that goes away ends it. A
    generation that fails or is ended by the server after the first chunk breaks the connection off: the body lacks
    its last chunk, which no client takes for a whole one.
    """

    def __init__(self, utterance: Utterance, format: formats.Format, head: dict[str, str], stall_s: float) -> None:
        self.status_code = 200  # Response's own __init__ would announce an empty body
        self.background = None
        self.init_headers(head)
        self._utterance = utterance
        self._format: formats.Format = format
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
        started = False
        try:
            async with contextlib.aclosing(self._utterance.chunks()) as chunks:
                async for chunk in chunks:
                    pcm = to_pcm16(chunk.pcm)
                    if not started:
                        started = True
                        await self._start(send)
                        pcm = formats.header(self._format) + pcm
                    async with asyncio.timeout(self._stall_s):
                        await send(_body(pcm))
        except Problem as problem:
            if not started:
                self._utterance.close()
                await problem.response({"X-Request-Id": self._utterance.id})(scope, receive, send)
            return
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", self._utterance.id, self._stall_s)
            return
        if self._utterance.closed:  # the client went away
            return
        self._utterance.close()  # before the last byte: a client that has it all finds the record complete
        if not started:
            await self._start(send)
            await send(_body(formats.header(self._format)))
        await send({**_body(b""), "more_body": False})

    async def _start(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
