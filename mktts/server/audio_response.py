"""One stream of speech as a response's body: encoded while it is made, as events, or whole and kept."""

import asyncio
import base64
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi.responses import Response, StreamingResponse

from mktts.audio.encoding import UNCODED, Encoder, StreamFormat
from mktts.engine.options import Chunk, WordTime
from mktts.server.api_errors import REQUEST_ID_HEADER, ApiError
from mktts.server.service import ServedStream

_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
MEDIA_TYPES: dict[StreamFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate={rate_hz};channels=1;format=s16le",
    "mulaw": "audio/PCMU;rate={rate_hz}",
    "alaw": "audio/PCMA;rate={rate_hz}",
}
AUDIO_HEADERS = {
    REQUEST_ID_HEADER: "for GET /tts/stream/{id}",
    "X-Seed": "repeats this draw",
    "X-Sample-Rate-Hz": "of the samples",
    "X-Sample-Format": "s16le: signed 16 bits, little endian; or the name of the format that holds them",
    "X-Random-Weights": "true: the audio is noise, not speech",
}

log = logging.getLogger(__name__)


def documented(*media_types: str) -> dict[str, Any]:
    """FastAPI's entry for a streamed body and its headers."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    binary = {"type": "string", "format": "binary"}
    text = {"type": "string"}
    headers = {key: {"description": what, "required": True, "schema": text} for key, what in AUDIO_HEADERS.items()}
    return {
        "description": "Audio, sent while it is made.",
        "content": {kind: {"schema": event if kind == "text/event-stream" else binary} for kind in media_types},
        "headers": headers,
    }


class AudioResponse(StreamingResponse):
    """A stream of speech as a response's body. Status and headers wait for the first bytes, so that what fails before
    them is raised as an ApiError and is not half a file. Where those are all there is, the headers say how many.

    A client that reads slowly stops the generation (see StreamOptions.buffer_frames), one that goes away, or takes no
    byte for `Limits.stall_s`, ends it. A generation that fails or is ended by the server after the first bytes breaks
    the connection off: the body lacks its last chunk, so that no client takes it for a whole one. Events end with one
    that says what happened.

    encoder: makes the bytes.
    events_of: the text, for server-sent events as OpenAI's (stream_format: sse), of which the last says how many
        tokens it has; those between tell the words whose times are known. None sends the bytes as they are.
    kept: makes the response, of headers and bytes, where the first bytes are all there is."""

    def __init__(
        self,
        stream: ServedStream,
        encoder: Encoder,
        *,
        events_of: str | None = None,
        ignored_keys: Sequence[str] = (),
        kept: Callable[[Mapping[str, str], bytes], Response] | None = None,
    ) -> None:
        kind, rate_hz = encoder.kind, encoder.rate_hz
        plain = MEDIA_TYPES[kind].format(rate_hz=rate_hz)
        headers = {  # what is known before the first sample; the rest is at GET /tts/stream/{X-Request-Id}
            "Content-Type": plain if events_of is None else "text/event-stream",
            REQUEST_ID_HEADER: stream.id,
            "X-Seed": str(stream.state.seed),
            "X-Sample-Rate-Hz": str(rate_hz),
            "X-Sample-Rate": str(rate_hz),  # as other servers of this model call it
            "X-Sample-Format": "s16le" if kind in UNCODED else kind,
            "X-Channels": "1",
            "X-Random-Weights": str(stream.service.model.random_weights).lower(),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # a proxy (nginx) passes on what comes at once
        }
        if ignored_keys:
            headers["X-Mktts-Ignored"] = ", ".join(ignored_keys)
        super().__init__(stream.chunks(), headers=headers)
        self._stream = stream
        self._encoder = encoder
        self._events_of = events_of
        self._kept = kept
        self._words = 0  # that were sent

    async def stream_response(self, send: Any) -> None:
        """Sends it all. Where the client goes away, Starlette cancels this, if the server's ASGI is older than 2.4, as
        uvicorn's is."""
        stream, sound_s, started = self._stream, 0.0, False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                if not more:
                    self.headers["Content-Length"] = str(len(data))
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for chunk in self.body_iterator:
                data = await self._encoded(chunk)
                sound_s += chunk.duration_s / self._encoder.speed
                if data:
                    async with stream.sending(sound_s):
                        await write(data)
                    sound_s = 0.0
            rest = await self._encoded(None)
            stream.close()  # before the last byte: a client that has it all finds the record complete
            if self._kept is not None and not started:
                found = self._kept(dict(self.headers), rest)
                self.status_code, self.raw_headers, rest = found.status_code, found.raw_headers, found.body
            await write(rest, more=False)
        except ApiError as error:
            if not started:
                raise
            stream.close()
            if self._events_of is not None:  # OpenAI's clients raise it
                await write(_event({"type": "error", "error": error.detail().shown()}), more=False)
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", stream.id, stream.service.limits.stall_s)
        finally:
            stream.close()

    async def _encoded(self, chunk: Chunk | None) -> bytes:
        """What can be sent once `chunk` is in, perhaps nothing yet; for None the rest. An encoder works in a thread."""
        encoder, stream = self._encoder, self._stream
        if encoder.takes_pcm16:
            data = encoder.feed_pcm16(b"" if chunk is None else chunk.pcm16)
        elif chunk is None:
            data = await asyncio.to_thread(encoder.finish)
        else:
            data = await asyncio.to_thread(encoder.feed, chunk.pcm)
        if self._events_of is None:
            return data
        if data:
            data = _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
        if words := (stream.state.words or [])[self._words :] if chunk is None else chunk.words:
            self._words += len(words)
            data += _event({"type": "speech.audio.words", "words": [self._as_played(word) for word in words]})
        if chunk is None:
            tokenizer, frames = stream.service.tokenizer, stream.state.frames
            tokens = len(await asyncio.to_thread(lambda: tokenizer().encode(self._events_of)))
            usage = {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}
            data += _event({"type": "speech.audio.done", "usage": usage})
        return data

    def _as_played(self, word: WordTime) -> dict[str, Any]:
        times = {"start_s": word.start_s / self._encoder.speed, "end_s": word.end_s / self._encoder.speed}
        return asdict(word) | {name: round(time_s, 3) for name, time_s in times.items()}


class KeptSounds:
    """The last sounds that were made whole, by what they were asked for: a player that jumps asks again for a part.
    most_bytes: of all together. most: how many, as what they were asked for takes memory too."""

    def __init__(self, most_bytes: int = 64 * 2**20, most: int = 32) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._sounds: OrderedDict[Hashable, tuple[Mapping[str, str], bytes]] = OrderedDict()

    def answer(self, key: Hashable, wanted: str | None, headers: Mapping[str, str], data: bytes) -> Response:
        """Keeps a sound and its headers, and answers as `find`; one that alone is too large is not kept."""
        if len(data) <= self._most_bytes:
            self._sounds[key] = {**headers, "Accept-Ranges": "bytes"}, data
        while len(self._sounds) > self._most or sum(len(kept) for _, kept in self._sounds.values()) > self._most_bytes:
            self._sounds.popitem(last=False)
        return self.find(key, wanted) or Response(data, headers=headers)

    def find(self, key: Hashable, wanted: str | None) -> Response | None:
        """The sound or, where the header Range wants one, a part of it (RFC 9110, section 14). Raises ApiError 416."""
        if key not in self._sounds:
            return None
        self._sounds.move_to_end(key)
        headers, data = self._sounds[key]
        first, last = found.groups() if (found := _RANGE.fullmatch(wanted or "")) else ("", "")
        start = int(first) if first else max(0, len(data) - int(last or len(data)))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        if not (first or last) or (first and last and int(last) < int(first)):  # no range, or not a single one
            return Response(data, headers=headers)
        if start >= end:
            raise ApiError(416, "bad_range", f"Range: expected bytes of {len(data)}, got {wanted}", "Range")
        return Response(data[start:end], 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
