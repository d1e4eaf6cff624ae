"""Settings of a server process: limits, the address to listen on, accepted host names and origins of web pages, and
API keys."""

import argparse
import ipaddress
import math
import os
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mktts.arguments import option
from mktts.errors import ServerError
from mktts.spec import FRAME_RATE_HZ

KEY_VARIABLE = "MKTTS_API_KEY"
# The Origin header of pages served from this machine. They are trusted, as the owner of the machine serves them.
LOOPBACK_ORIGIN = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
_NAME = r"[a-z0-9_](\.?[a-z0-9_-])*(?<!-)"
_ORIGIN = re.compile(rf"(?P<scheme>https?)://({_NAME}|\[(?P<v6>[0-9a-f:.]+)\])(:(?P<port>[1-9][0-9]{{0,4}}))?")
_LAST_PORT = 2**16 - 1
DAY_S = 24 * 3_600


@dataclass(frozen=True)
class Limits:
    """Limits of a server. Raises ServerError for a value that is not finite and above 0 (max_waiting, wait_s: or 0).

    max_streams: concurrent listeners. Streams that still wait for text, or that no client reads, do not count.
    max_waiting, wait_s: requests in the admission queue and their longest wait; beyond either, the answer is 429.
    max_body_bytes: of a request's body and of one WebSocket message.
    max_duration_s: also the default of a request that sets no limit.
    buffer_frames: frames generated ahead of a client that does not read, before its generation pauses.
    socket_bytes: the kernel's send buffer per connection. It is small so that little audio is in flight when a listener
        interrupts, and so that a slow client is noticed.
    body_s: time for a body, plus its announced size at 64 KiB/s. kept_states: ended streams that
        GET /tts/stream/{id} still knows.
    max_reference_bytes, max_reference_s, reference_decode_s: of a recording to clone: size, duration, decoding time.
    kept_voices: cached voices of such recordings. max_voices: uploaded voices per key."""

    # What one event loop writes in time on the host of an H200; the GPU could serve more (LOG.md, 2026-11-28).
    max_streams: int | None = option(1_250, "concurrent listeners, if the capacity allows", metavar="N")
    min_streams: int = option(1, "listeners that are admitted even if the capacity is smaller", metavar="N")
    max_waiting: int | None = option(None, "requests waiting for admission (default: as many as listen)", metavar="N")
    wait_s: float | None = option(None, "longest wait for admission, then 429 (default: 0.5, a full GPU 0.05)")
    max_body_bytes: int = 128 * 1024
    max_chars: int = option(5_000, "characters in one text", metavar="N")
    max_duration_s: float = option(600.0, "duration of one stream's audio")
    buffer_frames: int = 64
    socket_bytes: int = 128 * 1024
    stall_s: float = option(60.0, "until a client that reads nothing is dropped")
    idle_s: float = option(60.0, "until an utterance that receives no text is ended")
    head_s: float = option(10.0, "time for a request's head")
    body_s: float = option(20.0, "time for its body, and more for a long one")
    grace_s: float = option(5.0, "time for open streams after the signal to stop")
    kept_states: int = 1_024
    max_reference_bytes: int = 10 * 2**20
    max_reference_s: float = 60.0
    reference_decode_s: float = 10.0
    kept_voices: int = 32
    max_voices: int = 100
    voice_days: float = option(30.0, "until an uploaded voice is deleted", metavar="N")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None or (value == 0 and name in ("max_waiting", "wait_s")):
                continue
            if not 0 < value < math.inf:
                raise ServerError(f"{name} must be {'finite' if value > 0 else 'above 0'}, got {value!r}")
        if self.max_duration_s > DAY_S:
            raise ServerError(f"max_duration_s must be at most {DAY_S} (a day), got {self.max_duration_s:g}")

    @cached_property
    def max_frames(self) -> int:
        return max(1, int(self.max_duration_s * FRAME_RATE_HZ))


@dataclass
class Address:
    """Options of every server, for `access_of` and `listen`."""

    host: str = option("127.0.0.1", "default: %(default)s, this machine only")
    port: int = option(8000, "0: any free port")
    api_key_file: Path | None = option(None, f"one key per line (default: ${KEY_VARIABLE})", metavar="FILE")
    allow_origin: tuple[str, ...] = option((), "origin of web pages that may use the server", metavar="ORIGIN")
    allow_host: tuple[str, ...] = option((), "further host name of a server without a key", metavar="NAME")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The parsed IP address; None for a host name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address can be reached from this machine only."""
    address = _address(host)
    return f".{host.lower()}".endswith(".localhost") if address is None else address.is_loopback


@lru_cache(maxsize=64)  # called for every request, with few different headers
def is_own_name(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header names this server: one of `names` (lower case), localhost or an IP address. This stops DNS
    rebinding, where a page resolves its own host name to this machine: its requests still send that name in Host."""
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return host in names or is_loopback(host) or _address(host) is not None


def access_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keys, origins and hosts of the arguments, as `AccessMiddleware` takes them. Raises ServerError if one of them
    is invalid, or if other machines can reach the address and there is no key."""
    keys = read_keys(arguments.api_key_file)
    if not keys and not is_loopback(arguments.host):
        what = f"give --api-key-file or set {KEY_VARIABLE}, or listen on 127.0.0.1"
        raise ServerError(f"{arguments.host} can be reached by other machines, but there is no key: {what}")
    origins, hosts = checked_origins(arguments.allow_origin), checked_hosts(arguments.allow_host)
    return {"api_key": keys, "origins": origins, "hosts": hosts}


def checked_origins(words: Iterable[str]) -> tuple[str, ...]:
    """Normalises origins to the form browsers send, in lower case. Raises ServerError for an invalid origin."""
    origins = []
    for word in words:
        found = _ORIGIN.fullmatch(word.strip().lower())
        is_v6 = found is not None and isinstance(_address(found["v6"] or ""), ipaddress.IPv6Address)
        if not found or (found["v6"] and not is_v6) or int(found["port"] or 0) > _LAST_PORT:
            shape = "https://app.example or http://localhost:3000, without a path"
            raise ServerError(f"--allow-origin must be like {shape}, got {word!r}")
        origins.append(found[0].removesuffix(":80" if found["scheme"] == "http" else ":443"))
    return tuple(origins)


def checked_hosts(words: Iterable[str]) -> frozenset[str]:
    """Normalises host names to lower case. Raises ServerError for an invalid name."""
    names = {word: word.strip().lower().rstrip(".") for word in words}
    for word, name in names.items():
        if not re.fullmatch(_NAME, name) and not _address(name):
            raise ServerError(f"--allow-host must be a name without scheme and port, like tts.example, got {word!r}")
    return frozenset(names.values())


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Reads keys from a file, one per line, or else from the environment; () if neither is set. Raises ServerError."""
    if file is not None:
        try:
            lines, where = file.read_text(encoding="utf-8").splitlines(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ServerError(f"{file}: expected a file that holds the key, could not read it: {reason}") from None
    elif KEY_VARIABLE in os.environ:
        lines, where = [os.environ[KEY_VARIABLE]], f"${KEY_VARIABLE}"
    else:
        return ()
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not keys or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ServerError(f"{where}: expected keys of printable ASCII characters without spaces, one per line")
    return keys


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """Binds a socket, which refuses connections until it listens. port: 0 takes a free one. Raises ServerError."""
    if not 0 <= port <= _LAST_PORT:
        raise ServerError(f"port must be 0 to {_LAST_PORT}, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise ServerError(f"cannot listen on {host}: {error}") from None
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_bytes)  # connections inherit both options
    if sys.platform == "linux":  # drops a connection whose client is gone or stops reading, even after we closed it
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_s * 1_000))
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ServerError(f"cannot listen on {host} port {port}: {error.strerror}; name another --port") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address of a bound socket as http://HOST:PORT."""
    host, port = bound.getsockname()[:2]
    return "http://{}:{}".format(f"[{host}]" if ":" in host else host, port)
