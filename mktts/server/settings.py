"""What a server process is started with: its limits, where it listens, by which names it may be called, which web pages
may use it, and its keys."""

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
# What a browser writes into Origin for a page on this machine. A page that lies there was put there by its owner.
LOOPBACK_ORIGIN = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
_NAME = r"[a-z0-9_](\.?[a-z0-9_-])*(?<!-)"
_ORIGIN = re.compile(rf"(?P<scheme>https?)://({_NAME}|\[(?P<v6>[0-9a-f:.]+)\])(:(?P<port>[1-9][0-9]{{0,4}}))?")
_LAST_PORT = 2**16 - 1
DAY_S = 24 * 3_600


@dataclass(frozen=True)
class Limits:
    """Raises ServerError on a value that is not above 0 (max_waiting, wait_s: below 0), or not finite.

    max_streams: without those whose text has not come, or that no client reads.
    max_waiting: for a place, for wait_s; then, and beyond, it is 429.
    max_body_bytes: of a request's body and of one WebSocket message.
    max_duration_s: also what a request that names no limit gets.
    buffer_frames: made ahead of a client that does not read; then its generation waits.
    socket_bytes: the kernel may hold unsent per connection. Small, so that little audio is on the way when a listener
        interrupts, and that a slow client is noticed.
    body_s: longer for a long body, at 64 KiB a second.
    kept_states: ended streams that GET /tts/stream/{id} still knows.
    max_reference_bytes, max_reference_s, reference_decode_s: of a recording to be cloned, and to decode it.
    kept_voices: made of such recordings, for the next request with the same one. max_voices: that a key may upload."""

    # What one event loop writes in time, on the host of an H200 whose ticks have time for more (LOG.md, 2026-11-28).
    max_streams: int | None = option(1_250, "listened to at once, where the capacity allows it", metavar="N")
    min_streams: int = option(1, "that are admitted even where the capacity is smaller", metavar="N")
    max_waiting: int | None = option(None, "that wait for a place (default: as many as are served)", metavar="N")
    wait_s: float | None = option(None, "then it is 429 (default: 0.5, a full GPU 0.05)")
    max_body_bytes: int = 128 * 1024
    max_chars: int = option(5_000, "of one text", metavar="N")
    max_duration_s: float = option(600.0, "of one stream's audio")
    buffer_frames: int = 64
    socket_bytes: int = 128 * 1024
    stall_s: float = option(60.0, "until a client that reads nothing is dropped")
    idle_s: float = option(60.0, "until an utterance without text is ended")
    head_s: float = option(10.0, "for a request's head")
    body_s: float = option(20.0, "for its body, and more for a long one")
    grace_s: float = option(5.0, "for open streams after the signal to stop")
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
            if not value > 0:
                raise ServerError(f"{name} must be above 0, got {value!r}")
            if not math.isfinite(value):
                raise ServerError(f"{name} must be finite, got {value!r}")
        if self.max_duration_s > DAY_S:
            raise ServerError(f"max_duration_s must be at most {DAY_S} (a day), got {self.max_duration_s:g}")

    @cached_property
    def max_frames(self) -> int:
        return max(1, int(self.max_duration_s * FRAME_RATE_HZ))


@dataclass
class Address:
    """Options of every server; `access_of` and `listen` take them."""

    host: str = option("127.0.0.1", "default: %(default)s, this machine alone")
    port: int = option(8000, "0: a free one")
    api_key_file: Path | None = option(None, f"a key a line (default: ${KEY_VARIABLE})", metavar="FILE")
    allow_origin: tuple[str, ...] = option((), "of web pages that may use the server", metavar="ORIGIN")
    allow_host: tuple[str, ...] = option((), "by which a server without a key may be called, too", metavar="NAME")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    address = _address(host)
    return f".{host.lower()}".endswith(".localhost") if address is None else address.is_loopback


@lru_cache(maxsize=64)  # a server is called by few names, at every request
def is_own_name(header: str, names: frozenset[str]) -> bool:
    """Whether a header Host can be meant for a server that is called `names` (lower case), besides numbers and
    localhost, which cannot be pointed anywhere: DNS rebinding points a page's name, which it still sends, at this
    machine."""
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return host in names or is_loopback(host) or _address(host) is not None


def access_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keys, origins and hosts of the arguments, as `AccessMiddleware` takes them. Raises ServerError for an address
    that other machines reach, without a key, and for what is none of the three."""
    keys = read_keys(arguments.api_key_file)
    if not keys and not is_loopback(arguments.host):
        what = f"give --api-key-file or set {KEY_VARIABLE}, or listen on 127.0.0.1"
        raise ServerError(f"{arguments.host} can be reached by other machines and there is no key: {what}")
    origins, hosts = checked_origins(arguments.allow_origin), checked_hosts(arguments.allow_host)
    return {"api_key": keys, "origins": origins, "hosts": hosts}


def checked_origins(words: Iterable[str]) -> tuple[str, ...]:
    """Origins as browsers write them, in lower case. Raises ServerError for a word that no Origin can equal."""
    origins = []
    for word in words:
        found = _ORIGIN.fullmatch(word.strip().lower())
        is_v6 = found is not None and isinstance(_address(found["v6"] or ""), ipaddress.IPv6Address)
        if not found or (found["v6"] and not is_v6) or int(found["port"] or 0) > _LAST_PORT:
            shape = "https://app.example or http://localhost:3000, and end there"
            raise ServerError(f"--allow-origin must be like {shape}, got {word!r}")
        origins.append(found[0].removesuffix(":80" if found["scheme"] == "http" else ":443"))
    return tuple(origins)


def checked_hosts(words: Iterable[str]) -> frozenset[str]:
    """Host names in lower case. Raises ServerError for a word that is none."""
    names = {word: word.strip().lower().rstrip(".") for word in words}
    for word, name in names.items():
        if not re.fullmatch(_NAME, name) and not _address(name):
            raise ServerError(f"--allow-host must be a name without scheme and port, as tts.example, got {word!r}")
    return frozenset(names.values())


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys, one a line of the file, or else the environment's; () where there is neither. Raises ServerError."""
    if file is not None:
        try:
            lines, where = file.read_text(encoding="utf-8").splitlines(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise ServerError(f"{file}: expected a file that holds the key, could not read it: {reason}") from None
    elif KEY_VARIABLE in os.environ:
        lines, where = [os.environ[KEY_VARIABLE]], f"${KEY_VARIABLE}"
    else:
        return ()
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not keys or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ServerError(f"{where}: expected a key of printable ASCII characters without spaces, or one a line")
    return keys


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A bound socket (port 0: a free one) that refuses connections until it is served. Raises ServerError."""
    if not 0 <= port <= _LAST_PORT:
        raise ServerError(f"port must be 0 to {_LAST_PORT}, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise ServerError(f"cannot listen on {host}: {error}") from None
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_bytes)  # connections inherit both
    if sys.platform == "linux":  # ends a connection whose client is gone or reads no more, closed by us or not
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.stall_s * 1_000))
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ServerError(f"cannot listen on {host} port {port}: {error.strerror}; name another --port") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = bound.getsockname()[:2]
    return "http://{}:{}".format(f"[{host}]" if ":" in host else host, port)
