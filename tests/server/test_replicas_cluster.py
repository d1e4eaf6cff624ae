"""`serve --replicas 2` for real: Ray Serve, its HAProxy and two replicas of the voice in the box on this CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from absent import needs
from served import TEXT, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mktts.common import python_path
from mktts.spec import SAMPLES_PER_FRAME

pytestmark = [pytest.mark.slow, needs("ray")]

FRAMES = 150
LISTENERS = 6
UP_S, ENDED_S = 120.0, 2.0


class Cluster:
    """The command in a process of its own."""

    def __init__(self, *words: str) -> None:
        command = [
            sys.executable,
            "-m",
            "mktts",
            "serve",
            "--replicas",
            "2",
            "--checkpoint",
            "small",
            "--device",
            "cpu",
        ]
        environment = {**os.environ, **python_path(), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--port", "0", *words], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        end_s = time.monotonic() + UP_S
        while not (found := re.search(r"http://\S+:\d+", self.log)):
            assert self.process.poll() is None and time.monotonic() < end_s, self.log
            time.sleep(0.1)
        self.url = found.group()

    def processes(self) -> dict[int, str]:
        """What the command has started, and what that has: process and command line."""
        parents, words = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status = (folder / "status").read_text()
                words[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            if "\nState:\tZ" not in status:
                parents[int(folder.name)] = int(re.search(r"\nPPid:\s*(\d+)", status)[1])
        found, above = set(), {self.process.pid}
        while above:
            above = {one for one, parent in parents.items() if parent in above}
            found |= above
        return {one: words[one] for one in found}

    def replicas(self) -> list[int]:
        return sorted(one for one, words in self.processes().items() if words.startswith("ray::ServeReplica"))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log += line


@pytest.fixture
def start() -> Iterator[type[Cluster]]:
    started: list[Cluster] = []

    def go(*words: str) -> Cluster:
        started.append(Cluster(*words))
        return started[-1]

    yield go
    for one in started:
        ours = one.processes()
        one.process.kill()
        one.process.wait()
        for process in ours:
            if is_alive(process):
                os.kill(process, signal.SIGKILL)


def is_alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


class Listener(threading.Thread):
    """A stream by HTTP or by WebSocket. pcm: what came. error: how it broke off. ended_s: when it was over."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.url, self.seed = url, seed
        self.pcm, self.error, self.ended_s = b"", None, 0.0
        self.start()

    def run(self) -> None:
        body = {"text": TEXT, "max_frames": FRAMES, "seed": self.seed}
        try:
            self._by_socket(body) if self.seed % 2 else self._by_http(body)
        except (httpx.HTTPError, ConnectionClosed, OSError) as error:
            self.error = error
        self.ended_s = time.monotonic()

    def _by_http(self, body: dict) -> None:
        with httpx.stream("POST", f"{self.url}/tts/stream", json=body, timeout=60) as answer:
            answer.raise_for_status()
            for data in answer.iter_raw():
                self.pcm += data

    def _by_socket(self, body: dict) -> None:
        with connect(self.url.replace("http", "ws", 1) + "/tts/ws") as socket:
            socket.send(json.dumps({"type": "start", **body}))
            while True:
                message = socket.recv(timeout=60)
                if isinstance(message, bytes):
                    self.pcm += message
                elif json.loads(message)["type"] in ("finished", "refused"):
                    return


def listen_to(cluster: Cluster) -> list[Listener]:
    """Listeners who all hear something by now."""
    listeners = []
    for seed in range(LISTENERS):
        listeners.append(Listener(cluster.url, seed))
        until(lambda: listeners[-1].pcm or listeners[-1].error, "the first sound")
    return listeners


def over(listeners: list[Listener]) -> None:
    for one in listeners:
        one.join(90)
        assert not one.is_alive()


def test_a_killed_replica_takes_its_own_streams_along_and_nothing_else(start):
    cluster = start()
    undisturbed = listen_to(cluster)
    over(undisturbed)
    whole = FRAMES * SAMPLES_PER_FRAME * 2
    assert [(one.error, len(one.pcm)) for one in undisturbed] == [(None, whole)] * LISTENERS

    victim, survivor = cluster.replicas()
    listeners = listen_to(cluster)
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    over(listeners)
    broken = [one for one in listeners if one.error is not None]
    assert 0 < len(broken) < LISTENERS
    for one in broken:  # an error of the connection, and no shorter answer that looks whole
        assert isinstance(one.error, (httpx.RemoteProtocolError, httpx.ReadError, ConnectionClosed)), one.error
        assert one.ended_s - killed_s < ENDED_S and len(one.pcm) < whole
    for one in set(listeners) - set(broken):
        assert one.pcm == undisturbed[one.seed].pcm  # to the sample

    until(lambda: survivor in (now := cluster.replicas()) and len(now) == 2, "another replica's process")
    until(lambda: cluster.log.rstrip().endswith("replicas: 2 running"), "the other replica to run")
    again = listen_to(cluster)
    over(again)
    assert [one.pcm for one in again] == [one.pcm for one in undisturbed]

    ours = cluster.processes()
    assert any("haproxy" in words for words in ours.values())
    os.kill(cluster.process.pid, signal.SIGKILL)  # what nobody can put in order
    proxies = [one for one, words in ours.items() if "haproxy" in words.split()[0]]
    until(lambda: not any(map(is_alive, [*proxies, survivor])), "proxy and replicas to end with the command")


def test_a_signal_lets_streams_finish_and_leaves_nothing(start):
    cluster = start("--grace", "60", "--session-header")
    sticky = {"x-session-id": "anna"}
    ids = [  # of streams that only the replica which spoke them knows
        httpx.post(f"{cluster.url}/tts/stream", json={"text": "Hm.", "max_frames": 1}, headers=sticky) for _ in range(4)
    ]
    states = [httpx.get(f"{cluster.url}/tts/stream/{answer.headers['x-request-id']}", headers=sticky) for answer in ids]
    assert [state.status_code for state in states] == [200] * 4

    listeners = listen_to(cluster)
    ours = cluster.processes()
    cluster.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{cluster.url}/ready").status_code == 503, "the replicas to refuse")
    refused = httpx.post(f"{cluster.url}/tts/stream", json={"text": "Hm."})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping") and refused.headers[
        "retry-after"
    ]
    over(listeners)
    assert [(one.error, len(one.pcm)) for one in listeners] == [(None, FRAMES * SAMPLES_PER_FRAME * 2)] * LISTENERS
    assert cluster.process.wait(timeout=60) == 0
    until(lambda: not any(map(is_alive, ours)), "all that the command had started to end")
    assert "Traceback" not in cluster.log
