"""What Ray Serve and the HAProxy before its replicas are told, by environment variables: they have no other way in.

They must be set before Ray starts, because every process of the cluster reads them when it imports Ray Serve.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
import stat
from pathlib import Path

from mktts.server.replicas.haproxy import program

DRAIN_S = 2.0  # for the proxy to learn that a replica goes; it is told within tenths of a second
_IDLE_CLIENT_S = 120  # of a connection on which nobody sends; every WebSocket of ours is pinged within 20 s
_MOST_CONNECTIONS = 20_000
_FILES_EACH = 3  # that a proxy counts for a connection: two sockets, and half a pipe for what it splices
_OTHER_FILES = 500
_MOST_THREADS = 4


def environment(folder: Path, session_header: str | None, longest_s: float) -> dict[str, str]:
    """Variables for a cluster of its own. `folder`: for the proxy's files. longest_s: that a stream may go on after its
    replica, or the proxy's configuration, was replaced."""
    ports = _free_ports(4)
    balance = "leastconn" if session_header is None else f"hdr({session_header})"
    return {
        "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # In a thread of its own the application would hand its sound to a queue without bounds, and never learn that a
        # listener does not read.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{DRAIN_S:g}",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": balance,
        # A proxy whose configuration was replaced still carries the streams that it has, this long.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": f"{longest_s:.0f}",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_IDLE_CLIENT_S),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(_MOST_THREADS, os.cpu_count() or 1)),
        # Its log would hold addresses with `?key=`; nobody listens at this socket.
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "l.sock"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # Fixed ports would let one cluster a machine alone.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[3]),
    } | _tied_proxy(folder)  # fmt: skip


def _tied_proxy(folder: Path) -> dict[str, str]:
    """A proxy that ends with the process that started it, where the system has `setpriv` and there is an HAProxy.

    Ray Serve starts its proxy as a plain child, which goes on alone when Ray is killed.
    """
    haproxy = program()
    setpriv = shutil.which("setpriv")
    if haproxy is None or setpriv is None:
        return {}
    script = folder / "start-haproxy"
    script.write_text(
        f'#!/bin/sh\nexec {shlex.quote(setpriv)} --pdeathsig KILL {shlex.quote(haproxy)} "$@"\n', encoding="utf-8"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script)}


def _connections() -> int:
    """That a proxy may hold: it refuses to start where the limit of open files is below its count."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = hard if hard != resource.RLIM_INFINITY else _FILES_EACH * _MOST_CONNECTIONS + _OTHER_FILES
    return max(100, min(_MOST_CONNECTIONS, (files - _OTHER_FILES) // _FILES_EACH))


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, on any address."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
