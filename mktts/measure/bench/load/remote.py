"""A server of OpenAI's shape, as a crowd knows a synthesizer: `POST /v1/audio/speech`, raw PCM while it is made."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mktts.audio import from_pcm16
from mktts.errors import BackendUnavailable, BusyError, EngineError, MetricsError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.options import Chunk, Timings

_PATH = "/v1/audio/speech"
_CONNECT_S = 10.0
_REFUSALS = (429, 503)
_QUOTED_CHARS = 200
_READ_BYTES = 64 * 1024
_RATE = re.compile(r"rate=(\d+)")


def endpoint(url: str) -> str:
    """The address of the route: of a server's root, of its /v1, or the route itself. Raises MetricsError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MetricsError(f"--url takes the address of a server, as http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/")
    path = path if path.endswith(_PATH) else f"{path.removesuffix('/v1')}{_PATH}"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def is_here(url: str) -> bool:
    """Whether the address is one of this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class RemoteServer:
    """Opens streams of the server at `url` (see `endpoint`), each on a connection of its own. Of a stream's settings it
    sends `sends`, under the names that they have there.

    body: the keys that every request has. key: of the server.
    """

    url: str
    body: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    sends: tuple[str, ...] = ()

    def stream(self, text: str, **settings: Any) -> RemoteStream:
        """Asks for `text` once its chunks are asked for."""
        wishes = {name: settings[name] for name in self.sends}
        body = json.dumps({**self.body, **wishes, "input": text}).encode()
        return RemoteStream(self.url, self.key, body)

    def open(self, **settings: Any) -> Any:
        """Nothing of OpenAI's shape takes text while it is spoken."""
        raise MetricsError("a server of OpenAI's shape takes whole texts")


class RemoteStream:
    """The chunks of one answer, as they come off the connection. first_byte_s: of time.perf_counter, when the head of
    the answer was there.

    Raises BusyError where the server has no place, EngineError for any other status and for a body that breaks off.
    """

    engine = "server"

    def __init__(self, url: str, key: str | None, body: bytes) -> None:
        self._url, self._key, self._body = url, key, body
        self._task: asyncio.Task[Any] | None = None
        self.first_byte_s: float | None = None

    def cancel(self) -> None:
        """Hangs up."""
        if self._task is not None:
            self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        self._task, begun_s = asyncio.current_task(), time.perf_counter()
        samples, rest = 0, b""
        try:
            async with contextlib.aclosing(exchange("POST", self._url, self._key, self._body)) as events:
                answer = await anext(events)
                self.first_byte_s = time.perf_counter()
                await _check(answer, events)
                async for data in events:
                    whole = len(rest + data) // 2 * 2
                    data, rest = (rest + data)[:whole], (rest + data)[whole:]
                    pcm = from_pcm16(data)
                    frames = (samples + len(pcm)) // SAMPLES_PER_FRAME - samples // SAMPLES_PER_FRAME
                    ready_ms = 1e3 * (time.perf_counter() - begun_s)
                    yield Chunk(pcm, samples / SAMPLE_RATE_HZ, frames, Timings(ready_ms, 0.0, 0.0, 0.0, 0.0))
                    samples += len(pcm)
        except OSError as error:
            raise EngineError(f"the connection failed: {type(error).__name__}") from None
        finally:
            self._task = None
        if not samples:
            raise EngineError("the answer holds no sound")


async def exchange(method: str, url: str, key: str | None, body: bytes = b"") -> AsyncGenerator[Any]:
    """One request on a connection of its own: first h11's Response (or what stands for one), then the body's bytes as
    they come. Raises OSError, and EngineError for what is no HTTP and for a body that breaks off.

    h11 rather than a client with a pool: a pool that looks through hundreds of connections for every request makes its
    own listeners wait, by seconds at 150 of them.
    """
    h11, parts = _h11(), urlsplit(url)
    secure = parts.scheme == "https"
    connection = h11.Connection(h11.CLIENT)
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None), _CONNECT_S
    )
    try:
        headers = [("Host", parts.netloc.rpartition("@")[2]), ("Accept", "*/*"), ("Connection", "close")]
        headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))] if body else []
        headers += [] if key is None else [("Authorization", f"Bearer {key}")]
        request = connection.send(h11.Request(method=method, target=parts.path, headers=headers))
        writer.write(request + (connection.send(h11.Data(data=body)) if body else b""))
        connection.send(h11.EndOfMessage())
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                yield event
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            elif not isinstance(event, h11.InformationalResponse):
                return
    except h11.RemoteProtocolError as error:
        raise EngineError(f"the answer broke off, or is no HTTP: {error}") from None
    finally:
        writer.transport.abort()


def _h11() -> Any:
    """The library, which uvicorn brings."""
    try:
        from uvicorn.protocols.http.h11_impl import h11
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"bench --url needs the package {error.name}: pip install -r requirements.txt"
        ) from None
    return h11


async def _check(answer: Any, rest: AsyncIterator[bytes]) -> None:
    """Raises BusyError, EngineError. answer: h11's Response; rest: its body."""
    if answer.status_code in _REFUSALS:
        raise BusyError(f"the server answers {answer.status_code}")
    if answer.status_code != 200:
        said = b"".join([data async for data in rest]).decode(errors="replace")[:_QUOTED_CHARS]
        raise EngineError(f"the server answers {answer.status_code}: {said}")
    headers = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
    kind = headers.get("content-type", "")
    named = _RATE.search(kind)
    rate = headers.get("x-sample-rate") or (named and named[1]) or str(SAMPLE_RATE_HZ)
    if rate != str(SAMPLE_RATE_HZ) or "json" in kind or "event-stream" in kind:
        found = f"{kind or 'no content type'} at {rate} Hz"
        raise EngineError(f"expected raw 16-bit PCM at {SAMPLE_RATE_HZ} Hz, got {found}")
