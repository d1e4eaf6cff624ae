"""Where a server listens, and who may use it: arguments, key, socket."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from mktts.errors import ServerError
from mktts.server.access.hosts import is_loopback
from mktts.server.limits import Limits

KEY_VARIABLE = "MKTTS_API_KEY"
_LAST_PORT = 2**16 - 1


def add_address_arguments(parser: argparse.ArgumentParser) -> None:
    """--host, --port, --api-key-file, --allow-origin, --allow-host."""
    where = parser.add_argument_group("address")
    where.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine alone")
    where.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    where.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"a key a line (default: ${KEY_VARIABLE})")
    where.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="of web pages that may use the server"
    )
    where.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="that a server without a key may be called by, beside localhost and numbers",
    )


def refuse_open_address(host: str, keys: str | Sequence[str] | None) -> None:
    """Raises ServerError for an address that other machines reach, without a key."""
    if not keys and not is_loopback(host):
        raise ServerError(
            f"{host} can be reached by other machines and there is no key: give --api-key-file or set "
            f"{KEY_VARIABLE}, or listen on 127.0.0.1"
        )


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


def refuse_bad_port(port: int, least: int = 0) -> None:
    """Raises ServerError for what is no port."""
    if not least <= port <= _LAST_PORT:
        raise ServerError(f"port must be {least} to {_LAST_PORT}, got {port}")


def listen(host: str, port: int, limits: Limits) -> socket.socket:
    """A bound socket (port 0: a free one) that refuses connections until it is served. Raises ServerError."""
    refuse_bad_port(port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, ValueError) as error:
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
