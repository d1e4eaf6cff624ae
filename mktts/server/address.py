"""Where a server listens, and who may use it: arguments, key, socket."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from pathlib import Path

from mktts.errors import ServerError
from mktts.server.limits import Limits

KEY_VARIABLE = "MKTTS_API_KEY"


def add_address_arguments(parser: argparse.ArgumentParser) -> None:
    """--host, --port, --api-key-file, --allow-origin."""
    where = parser.add_argument_group("address")
    where.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine alone")
    where.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    where.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"holds the key (default: ${KEY_VARIABLE})")
    where.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="of web pages that may use the server"
    )


def refuse_open_address(host: str, key: str | None) -> None:
    """Raises ServerError for an address that other machines reach, without a key."""
    if key is None and not is_loopback(host):
        raise ServerError(
            f"{host} can be reached by other machines and there is no key: give --api-key-file or set "
            f"{KEY_VARIABLE}, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_key(file: Path | None) -> str | None:
    """The key, from the file or else the environment; None where there is neither. Raises ServerError."""
    if file is not None:
        try:
            key, where = file.read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ServerError(f"{file}: expected a file that holds the key, could not read it: {error}") from None
    elif KEY_VARIABLE in os.environ:
        key, where = os.environ[KEY_VARIABLE].strip(), f"${KEY_VARIABLE}"
    else:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ServerError(f"{where}: expected a key of printable ASCII characters without spaces")
    return key


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A bound socket (port 0: a free one) that refuses connections until it is served. Raises ServerError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ServerError(f"cannot listen on {host}: {error}") from None
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
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
