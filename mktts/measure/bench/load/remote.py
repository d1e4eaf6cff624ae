"""A server of OpenAI's shape, as a crowd knows a synthesizer: `POST /v1/audio/speech`, raw PCM while it is made."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from mktts.audio import from_pcm16
from mktts.errors import BackendUnavailable, BusyError, EngineError, MetricsError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.options import Chunk, Timings

if TYPE_CHECKING:
    import httpx

_PATH = "/v1/audio/speech"
_CONNECT_S = 10.0
_REFUSALS = (429, 503)
_QUOTED_CHARS = 200
_RATE = re.compile(r"rate=(\d+)")


def endpoint(url: str) -> str:
    """The address of the route: of a server's root, of its /v1, or the route itself. Raises MetricsError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MetricsError(f"--url takes the address of a server, as http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/")
    path = path if path.endswith(_PATH) else f"{path.removesuffix('/v1')}{_PATH}"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def client_of(url: str, key: str | None) -> httpx.AsyncClient:
    """Any number of connections, without an end to waiting for sound. Raises BackendUnavailable without httpx."""
    try:
        import httpx
    except ModuleNotFoundError:
        raise BackendUnavailable("bench --url needs the package httpx: pip install -r requirements.txt") from None
    return httpx.AsyncClient(
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        trust_env=not is_here(url),  # no proxy leads to this machine
    )


def is_here(url: str) -> bool:
    """Whether the address is one of this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass
class RemoteServer:
    """Opens streams of the server at `url` (see `endpoint`); belongs to one event loop. Of a stream's settings it sends
    `sends`, under the names that they have there.

    body: the keys that every request has. key: of the server.
    """

    url: str
    body: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    sends: tuple[str, ...] = ()
    _client: httpx.AsyncClient | None = None

    def stream(self, text: str, **settings: Any) -> RemoteStream:
        """Asks for `text` once its chunks are asked for."""
        if self._client is None:
            self._client = client_of(self.url, self.key)
        wishes = {name: settings[name] for name in self.sends}
        return RemoteStream(self._client, self.url, {**self.body, **wishes, "input": text})

    def open(self, **settings: Any) -> Any:
        """Nothing of OpenAI's shape takes text while it is spoken."""
        raise MetricsError("a server of OpenAI's shape takes whole texts")


class RemoteStream:
    """The chunks of one answer, as they come off the connection. first_byte_s: of time.perf_counter, when the head of
    the answer was there.

    Raises BusyError where the server has no place, EngineError for any other status and for a body that breaks off.
    """

    engine = "server"

    def __init__(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        self._client, self._url, self._body = client, url, body
        self._task: asyncio.Task[Any] | None = None
        self.first_byte_s: float | None = None

    def cancel(self) -> None:
        """Hangs up."""
        if self._task is not None:
            self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        import httpx

        self._task, begun_s = asyncio.current_task(), time.perf_counter()
        samples, rest = 0, b""
        try:
            async with self._client.stream("POST", self._url, json=self._body) as answer:
                self.first_byte_s = time.perf_counter()
                await _check(answer)
                async for data in answer.aiter_raw():
                    whole = len(rest + data) // 2 * 2
                    data, rest = (rest + data)[:whole], (rest + data)[whole:]
                    pcm = from_pcm16(data)
                    frames = (samples + len(pcm)) // SAMPLES_PER_FRAME - samples // SAMPLES_PER_FRAME
                    ready_ms = 1e3 * (time.perf_counter() - begun_s)
                    yield Chunk(pcm, samples / SAMPLE_RATE_HZ, frames, Timings(ready_ms, 0.0, 0.0, 0.0, 0.0))
                    samples += len(pcm)
        except httpx.HTTPError as error:
            raise EngineError(f"the connection failed: {type(error).__name__}") from None
        finally:
            self._task = None
        if not samples:
            raise EngineError("the answer holds no sound")


async def _check(answer: httpx.Response) -> None:
    if answer.status_code in _REFUSALS:
        raise BusyError(f"the server answers {answer.status_code}")
    if answer.status_code != 200:
        said = (await answer.aread()).decode(errors="replace")[:_QUOTED_CHARS]
        raise EngineError(f"the server answers {answer.status_code}: {said}")
    kind = answer.headers.get("content-type", "")
    named = _RATE.search(kind)
    rate = answer.headers.get("x-sample-rate") or (named and named[1]) or str(SAMPLE_RATE_HZ)
    if rate != str(SAMPLE_RATE_HZ) or "json" in kind or "event-stream" in kind:
        raise EngineError(
            f"expected raw 16-bit PCM at {SAMPLE_RATE_HZ} Hz, got {kind or 'no content type'} at {rate} Hz"
        )
