"""A stream of speech as the body of one HTTP response, sent while it is made."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import Response

from mktts.audio.encoding import UNCODED, Samples, StreamFormat, encoder_of
from mktts.engine.options import Chunk
from mktts.errors import MkttsError
from mktts.server.api_errors import REQUEST_ID_HEADER, ApiError
from mktts.server.served_stream import ServedStream
from mktts.spec import SAMPLE_RATE_HZ

MEDIA_TYPES: dict[StreamFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate={rate_hz};channels=1;format=s16le",
}

log = logging.getLogger(__name__)


class SpeechEncoder:
    """The bytes of a response in `format`; speed, sample_rate_hz, whole: as `encoder_of`. Raises ApiError where it
    cannot be made.

    usage: for server-sent events as OpenAI's (stream_format: sse): asked at the end for the tokens of the text and the
        frames of the speech. None sends the bytes as they are.
    """

    def __init__(
        self,
        format: StreamFormat,
        *,
        speed: float = 1.0,
        sample_rate_hz: int = SAMPLE_RATE_HZ,
        whole: bool = False,
        usage: Callable[[], Awaitable[tuple[int, int]]] | None = None,
    ) -> None:
        try:
            self._encoder = encoder_of(format, speed=speed, sample_rate_hz=sample_rate_hz, whole=whole)
        except MkttsError as error:
            raise ApiError(400, "bad_format", str(error), "response_format") from None
        self.media_type = "text/event-stream" if usage else MEDIA_TYPES[format].format(rate_hz=sample_rate_hz)
        self.format = format
        self.sample_rate_hz = sample_rate_hz
        self.speed = speed
        self.usage = usage

    async def feed(self, chunk: Chunk) -> bytes:
        """What can be sent once `chunk` is in; may be nothing yet. An encoder's work is done beside the event loop."""
        if isinstance(self._encoder, Samples):
            return self._sent(self._encoder.feed_pcm16(chunk.pcm16))
        return self._sent(await asyncio.to_thread(self._encoder.feed, chunk.pcm))

    async def finish(self) -> bytes:
        """The rest."""
        light = isinstance(self._encoder, Samples)
        rest = self._sent(self._encoder.finish() if light else await asyncio.to_thread(self._encoder.finish))
        if self.usage is None:
            return rest
        input_tokens, output_tokens = await self.usage()
        usage = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        usage["total_tokens"] = input_tokens + output_tokens
        return rest + _event({"type": "speech.audio.done", "usage": usage})

    def _sent(self, data: bytes) -> bytes:
        if self.usage is None or not data:
            return data
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


class AudioResponse(Response):
    """Status and headers wait for the first bytes, so that what fails before them is an error and not half a file.
    Where those are all there is, the headers say how many.

    A client that reads slowly stops the generation (see StreamOptions.buffer_frames), one that goes away ends it. A
    generation that fails or is ended by the server after the first bytes breaks the connection off: the body lacks
    its last chunk, so that no client takes it for a whole one. Events end with one that says what happened.

    stall_s: a client that takes no byte for this long is dropped.
    """

    def __init__(
        self,
        stream: ServedStream,
        encoder: SpeechEncoder,
        stall_s: float,
        random_weights: bool,
        ignored_keys: list[str] | None = None,
    ) -> None:
        self.status_code = 200  # Response's own __init__ would announce an empty body
        self.background = None
        headers = {  # what is known before the first sample; the rest is at GET /tts/stream/{X-Request-Id}
            "Content-Type": encoder.media_type,
            REQUEST_ID_HEADER: stream.id,
            "X-Seed": str(stream.seed),
            "X-Sample-Rate-Hz": str(encoder.sample_rate_hz),
            "X-Sample-Rate": str(encoder.sample_rate_hz),  # as other servers of this model call it
            "X-Sample-Format": "s16le" if encoder.format in UNCODED else encoder.format,
            "X-Channels": "1",
            "X-Random-Weights": str(random_weights).lower(),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # tells a proxy (nginx) to pass on what comes
        }
        if ignored_keys:
            headers["X-Ignored-Keys"] = ",".join(ignored_keys)
        self.init_headers(headers)
        self._stream = stream
        self._encoder = encoder
        self._stall_s = stall_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watch = asyncio.create_task(self._close_on_disconnect(receive))
        try:
            await self._send_all(scope, receive, send)
        finally:
            watch.cancel()
            self._stream.close()

    async def _close_on_disconnect(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.close()

    async def _send_all(self, scope: Any, receive: Any, send: Any) -> None:
        started, sound_s = False, 0.0
        try:
            async with contextlib.aclosing(self._stream.chunks()) as chunks:
                async for chunk in chunks:
                    data = await self._encoder.feed(chunk)
                    sound_s += chunk.duration_s / self._encoder.speed
                    if not data:
                        continue
                    if not started:
                        started = True
                        await self._start(send)
                    with self._stream.sending(sound_s):
                        async with asyncio.timeout(self._stall_s):
                            await send(_body(data))
                    sound_s = 0.0
            rest = b"" if self._stream.closed else await self._encoder.finish()
        except ApiError as error:
            if not started:
                self._stream.close()
                if self._stream.route == "openai_speech":
                    error = error.in_openai_terms()
                await error.response({REQUEST_ID_HEADER: self._stream.id})(scope, receive, send)
            elif self._encoder.usage is not None:
                self._stream.close()
                event = _event({"type": "error", "error": error.detail().shown()})  # OpenAI's clients raise it
                await send(_body(event, more=False))
            return
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", self._stream.id, self._stall_s)
            return
        if self._stream.closed:  # the client went away
            return
        self._stream.close()  # before the last byte: a client that has it all finds the record complete
        if not started:
            self.headers["Content-Length"] = str(len(rest))
            await self._start(send)
        await send(_body(rest, more=False))

    async def _start(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
