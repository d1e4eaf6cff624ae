"""A server of OpenAI's shape as a source of streams: `POST /v1/audio/speech`, raw PCM while it is made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from mktts.audio import from_pcm16
from mktts.errors import BusyError, EngineError, MetricsError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.options import Chunk, Timings

PATH = "/v1/audio/speech"
_CONNECT_S = 10.0
_REFUSALS = (429, 503)
_QUOTED_CHARS = 200
_READ_BYTES = 64 * 1024
_RATE = re.compile(r"rate=(\d+)")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")

Events = AsyncGenerator[Any, None]


@dataclass(frozen=True)
class HttpSource:
    """Opens streams of a server, each over a connection of its own.

    url: of the route. key: the server's
    body: the keys that every request has
    sends: names of a stream's settings that are sent as keys of the request
    """

    url: str
    key: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    sends: tuple[str, ...] = ()

    async def stream(self, text: str, **settings: Any) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer; the first, when the answer begins, has no samples.

        Raises BusyError where the server refuses, EngineError for any other status, for what is no raw PCM, and for an
        answer that breaks off.
        """
        begun_s, samples, rest = time.perf_counter(), 0, b""
        wishes = {name: settings[name] for name in self.sends}

        def chunk(pcm: np.ndarray) -> Chunk:
            frames = (samples + len(pcm)) // SAMPLES_PER_FRAME - samples // SAMPLES_PER_FRAME
            ready_ms = 1e3 * (time.perf_counter() - begun_s)
            return Chunk(pcm, samples / SAMPLE_RATE_HZ, frames, Timings(ready_ms, 0.0, 0.0, 0.0, 0.0))

        try:
            body = json.dumps({**self.body, **wishes, "input": text}).encode()
            async with contextlib.aclosing(exchange("POST", self.url, self.key, body)) as events:
                status, headers = await anext(events)
                if status != 200:
                    await _refuse(status, events)
                _check_sound(headers)
                yield chunk(np.zeros(0, np.float32))
                async for data in events:
                    whole = len(rest + data) // 2 * 2
                    data, rest = (rest + data)[:whole], (rest + data)[whole:]
                    pcm = from_pcm16(data)
                    yield chunk(pcm)
                    samples += len(pcm)
        except OSError as error:
            raise EngineError(f"the connection failed: {type(error).__name__}") from None
        if not samples:
            raise EngineError("the answer holds no sound")


async def _refuse(status: int, events: Events) -> None:
    if status in _REFUSALS:
        raise BusyError(f"the server answers {status}")
    said = b"".join([data async for data in events]).decode(errors="replace")[:_QUOTED_CHARS]
    raise EngineError(f"the server answers {status}: {said}")


def _check_sound(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "")
    named = _RATE.search(kind)
    rate = headers.get("x-sample-rate") or (named and named[1]) or str(SAMPLE_RATE_HZ)
    if rate != str(SAMPLE_RATE_HZ) or "json" in kind or "event-stream" in kind:
        found = f"{kind or 'no content type'} at {rate} Hz"
        raise EngineError(f"expected raw 16-bit PCM at {SAMPLE_RATE_HZ} Hz, got {found}")


def endpoint(url: str) -> str:
    """The address of the route: of a server's root, of its /v1, or the route itself. Raises MetricsError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MetricsError(f"--url takes the address of a server, as http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/")
    path = path if path.endswith(PATH) else f"{path.removesuffix('/v1')}{PATH}"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


async def exchange(method: str, url: str, key: str | None = None, body: bytes = b"") -> Events:
    """One request on a connection of its own: (status, headers by lower-case names), then the body's bytes.

    Raises OSError, and EngineError for what is no HTTP and for a body that breaks off. Read here rather than by a
    client with a pool: one that looks through hundreds of connections for every request makes its listeners wait.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    address = parts.hostname, parts.port or (443 if secure else 80)
    headers: dict[str, str] = {}
    reader, writer = await asyncio.wait_for(asyncio.open_connection(*address, ssl=secure or None), _CONNECT_S)
    try:
        lines = [f"{method} {parts.path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Accept: */*"]
        lines += ["Connection: close", f"Content-Length: {len(body)}", "Content-Type: application/json"]
        lines += [] if key is None else [f"Authorization: Bearer {key}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
        yield status, headers
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:size]
            return
        left = int(headers.get("content-length", "-1"))
        while left and (data := await reader.read(_READ_BYTES)):
            left -= len(data)
            yield data
        if left > 0:
            raise EngineError("the answer broke off")
    except asyncio.IncompleteReadError as error:
        raise EngineError("the answer broke off" if headers else f"the answer is no HTTP: {error}") from None
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise EngineError(f"the answer is no HTTP: {error}") from None
    finally:
        writer.transport.abort()


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises ValueError."""
    first, *lines = data.rstrip().split(b"\r\n")
    if not (status := _STATUS.match(first)):
        raise ValueError(f"it begins with {first[:40]!r}")
    pairs = (line.decode("latin-1").partition(":") for line in lines)
    return int(status[1]), {name.lower(): value.strip() for name, _, value in pairs}
