"""One stream of speech on its way to one connection, from its admission to its record, and as a response's body."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response

from mktts import audio
from mktts.audio.encoding import UNCODED, Encoder, Samples, StreamFormat
from mktts.engine.metrics import Player
from mktts.engine.options import Chunk, Timings, WordTime
from mktts.errors import MkttsError
from mktts.server.api_errors import REQUEST_ID_HEADER, ApiError, current_id, from_error, new_id
from mktts.server.meters import Meters
from mktts.server.schemas import Route, StreamState
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.engine.stream import Session, Stream

KEPT_LEAD_S = 0.5  # that a listener has to play while something is held back
MAX_HELD_FRAMES = round(FRAME_RATE_HZ)  # a second
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_HELD_UP_S = 0.05  # a write that took longer waited for the client
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

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ServedStream:
    """Belongs to the event loop's thread. `close` must be called, once or more; it ends what still runs.

    stream: what makes the speech. chars: of the text, so far. check_chars: raises ApiError for too many of them.
    on_close: called once, with this. word_times: the stream finds them. error: what ended it; None otherwise."""

    route: Route
    stream: Stream | Session
    chars: int
    meters: Meters
    check_chars: Callable[[int], None]
    on_close: Callable[[ServedStream], None]
    word_times: bool = False

    def __post_init__(self) -> None:
        # A request over HTTP speaks once; its id is that of its stream.
        self.id = new_id() if self.route == "tts_ws" else (current_id.get() or new_id())
        self.seed = self.stream.seed
        self.error: ApiError | None = None
        self.closed = False
        self.frames = 0  # handed to the connection so far
        self.first_audio_ms: float | None = None
        self._samples = 0
        self._started_s = time.perf_counter()
        self._reason: str | None = None
        self._player = Player()

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Chunks as they are to be written, each within `sending`: at once, or several together where the listener has
        time. A write costs the event loop about the same whatever it holds, and the network a packet. Ends where the
        stream does. Raises ApiError where it failed, or the server ended it, behind what was held back."""
        held: list[Chunk] = []
        ended = False
        while not ended:
            late = False
            try:
                chunk = await self.stream.take(max(0.0, self._lead_s() - KEPT_LEAD_S) if held else None)
                ended = chunk is None
                held += [chunk] if chunk else []
            except TimeoutError:
                late = True
            except Exception as error:
                ended = True
                if self.error is None:
                    self.error = from_error(error)
                    if self.error.status >= 500:
                        log.exception("stream %s failed", self.id)
            frames = sum(one.frames for one in held)
            if held and (late or ended or self._lead_s() <= KEPT_LEAD_S or frames >= MAX_HELD_FRAMES):
                if self.first_audio_ms is None:
                    self.first_audio_ms = round((time.perf_counter() - self._started_s) * 1_000, 3)
                self.frames += frames
                self._samples += sum(len(one.pcm) for one in held)
                yield _joined(held)
                held = []
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def sending(self, duration_s: float) -> Iterator[None]:
        """Around a write of sound of so many seconds. One that waits for the client makes nothing late."""
        began_s = time.perf_counter()
        if self._player.dry_s is None:
            self.meters.first_byte_s.labels(self.route).observe(began_s - self._started_s)
        _, late_s = self._player.play(began_s, duration_s)
        if late_s > 0:
            self.meters.underruns.inc()
            self.meters.late_s.inc(late_s)
        yield
        if (now_s := time.perf_counter()) - began_s > _HELD_UP_S:
            self._player.pause(now_s)

    def _lead_s(self) -> float:
        return self._player.lead_s(time.perf_counter())

    def feed(self, text: str | None) -> None:
        """More text of a session; None: no more comes. The stream fails where it cannot be spoken, or is too long. The
        clock of the first audio starts with the first text that can be seen."""
        if self.stream.idle:  # it waited for text: nothing is late until a frame's time after it
            self._player.pause(time.perf_counter() + 1 / FRAME_RATE_HZ)
        try:
            if text is None:
                self.stream.finish()
                return
            if self.chars == 0 and text.strip():
                self._started_s = time.perf_counter()
            self.chars += len(text)
            self.check_chars(self.chars)
            self.stream.feed(text)
        except MkttsError as error:
            self.fail(from_error(error))

    def fail(self, error: ApiError) -> None:
        """Ends the generation for a reason that the client receives."""
        self.error = self.error or error
        self.close()

    def close(self) -> None:
        """Ends the generation within one frame if it still runs, and gives the place back."""
        if self.closed:
            return
        self.closed = True
        self.stream.cancel()
        self._reason = "error" if self.error is not None else self.stream.finish_reason or "cancelled"
        self.on_close(self)
        error, first_ms = self.error, self.first_audio_ms
        how = "no audio" if first_ms is None else f"{self.frames} frames, first audio after {first_ms} ms"
        how = "refused" if error is not None and first_ms is None and error.status < 500 else f"{how}, {self._reason}"
        if error is not None:  # of its message only busy's, which has numbers in it: others may quote the text
            how += f", {error.code}: {error}" if error.code == "busy" else f", {error.code}"
        log.info("stream %s: %s, %d characters, seed %d, %s", self.id, self.route, self.chars, self.seed, how)

    @property
    def words(self) -> list[WordTime] | None:
        """Those whose times are known; None where nobody asked."""
        return list(self.stream.words) if self.word_times else None

    @property
    def state(self) -> StreamState:
        return StreamState(
            id=self.id,
            route=self.route,
            state="ended" if self.closed else "running",
            finish_reason=self._reason,
            seed=self.seed,
            frames=self.frames,
            audio_s=self._samples / SAMPLE_RATE_HZ,
            first_audio_ms=self.first_audio_ms,
            error=self.error.detail(self.id) if self.error is not None else None,
            words=self.words,
        )


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk of several that follow each other; it was ready when the last one was."""
    if len(chunks) == 1:
        return chunks[0]
    ready_ms, *spent_ms = zip(*(astuple(chunk.timings) for chunk in chunks), strict=True)
    timings = Timings(ready_ms[-1], *map(sum, spent_ms))
    ready = [chunk.ready_pcm16 for chunk in chunks]
    pcm16 = None if None in ready else b"".join(ready)
    frames = sum(chunk.frames for chunk in chunks)
    words = tuple(chain.from_iterable(chunk.words for chunk in chunks))
    return Chunk(audio.joined([chunk.pcm for chunk in chunks]), chunks[0].start_s, frames, timings, pcm16, words)


class AudioResponse(Response):
    """A stream of speech as a response's body. Status and headers wait for the first bytes, so that what fails before
    them is an error and not half a file. Where those are all there is, the headers say how many.

    A client that reads slowly stops the generation (see StreamOptions.buffer_frames), one that goes away ends it. A
    generation that fails or is ended by the server after the first bytes breaks the connection off: the body lacks its
    last chunk, so that no client takes it for a whole one. Events end with one that says what happened.

    encoder: makes the bytes; format, speed, sample_rate_hz: what of.
    stall_s: a client that takes no byte for this long is dropped.
    tokens: for server-sent events as OpenAI's (stream_format: sse): asked at the end, in a thread, how many the text
        has. None sends the bytes as they are. Words whose times are known have events between.
    kept: makes the response, of headers and bytes, where the first bytes are all there is."""

    def __init__(
        self,
        stream: ServedStream,
        encoder: Encoder,
        stall_s: float,
        random_weights: bool,
        *,
        format: StreamFormat = "pcm",
        speed: float = 1.0,
        sample_rate_hz: int = SAMPLE_RATE_HZ,
        tokens: Callable[[], int] | None = None,
        ignored_keys: Sequence[str] = (),
        kept: Callable[[Mapping[str, str], bytes], Response] | None = None,
    ) -> None:
        self.status_code = 200  # Response's own __init__ would announce an empty body
        self.background = None
        headers = {  # what is known before the first sample; the rest is at GET /tts/stream/{X-Request-Id}
            "Content-Type": "text/event-stream" if tokens else MEDIA_TYPES[format].format(rate_hz=sample_rate_hz),
            REQUEST_ID_HEADER: stream.id,
            "X-Seed": str(stream.seed),
            "X-Sample-Rate-Hz": str(sample_rate_hz),
            "X-Sample-Rate": str(sample_rate_hz),  # as other servers of this model call it
            "X-Sample-Format": "s16le" if format in UNCODED else format,
            "X-Channels": "1",
            "X-Random-Weights": str(random_weights).lower(),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # a proxy (nginx) passes on what comes at once
        }
        if ignored_keys:
            headers["X-Mktts-Ignored"] = ", ".join(ignored_keys)
        self.init_headers(headers)
        self._stream = stream
        self._encoder = encoder
        self._stall_s = stall_s
        self._speed = speed
        self._tokens = tokens
        self._kept = kept
        self._words = 0  # that were sent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        stream, sound_s, started = self._stream, 0.0, False

        async def close_on_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            stream.close()

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                if not more:
                    self.headers["Content-Length"] = str(len(data))
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        watch = asyncio.create_task(close_on_disconnect())
        try:
            async with contextlib.aclosing(stream.chunks()) as chunks:
                async for chunk in chunks:
                    data = await self._encoded(chunk)
                    sound_s += chunk.duration_s / self._speed
                    if data:
                        with stream.sending(sound_s):
                            async with asyncio.timeout(self._stall_s):
                                await write(data)
                        sound_s = 0.0
            if stream.closed:  # the client went away
                return
            rest = await self._encoded(None)
            if stream.closed:
                return
            stream.close()  # before the last byte: a client that has it all finds the record complete
            if started or self._kept is None:
                await write(rest, more=False)
            else:
                await self._kept(dict(self.headers), rest)(scope, receive, send)
        except ApiError as error:
            stream.close()
            if not started:
                shown = error.in_openai_terms() if stream.route == "openai_speech" else error
                await shown.response()(scope, receive, send)
            elif self._tokens is not None:  # OpenAI's clients raise it
                await write(_event({"type": "error", "error": error.detail().shown()}), more=False)
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", stream.id, self._stall_s)
        finally:
            watch.cancel()
            stream.close()

    async def _encoded(self, chunk: Chunk | None) -> bytes:
        """What can be sent once `chunk` is in, perhaps nothing yet; for None the rest. An encoder works in a thread."""
        encoder = self._encoder
        if isinstance(encoder, Samples):
            data = encoder.feed_pcm16(b"" if chunk is None else chunk.pcm16)
        elif chunk is None:
            data = await asyncio.to_thread(encoder.finish)
        else:
            data = await asyncio.to_thread(encoder.feed, chunk.pcm)
        if self._tokens is None:
            return data
        if data:
            data = _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
        if words := (self._stream.words or [])[self._words :] if chunk is None else chunk.words:
            self._words += len(words)
            data += _event({"type": "speech.audio.words", "words": [self._as_played(word) for word in words]})
        if chunk is None:
            tokens, frames = await asyncio.to_thread(self._tokens), self._stream.frames
            usage = {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}
            data += _event({"type": "speech.audio.done", "usage": usage})
        return data

    def _as_played(self, word: WordTime) -> dict[str, Any]:
        times = {"start_s": word.start_s / self._speed, "end_s": word.end_s / self._speed}
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
