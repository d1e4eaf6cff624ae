"""`serve --replicas` without a cluster: what is asked for, where it fits, what is left behind, one replica alone."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from absent import mktts_without, needs
from commands import run
from running import running
from served import TEXT, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from mktts.cli import main, parse
from mktts.errors import ServerError
from mktts.server import Limits, listen
from mktts.server.replicas import scaling
from mktts.server.replicas.arguments import Scale, scale_of
from mktts.server.replicas.cluster import _placed, refuse_left_behind
from mktts.server.replicas.haproxy import configuration, program
from mktts.server.replicas.orphans import Orphan, orphans
from mktts.server.replicas.replica import Plan, Replica
from mktts.speech import serving


def test_one_server_without_ray_is_the_default():
    assert scale_of(parse(["serve"])) is None


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        (["--replicas", "2"], Scale(2)),
        (["--replicas", "auto"], Scale(None)),
        (["--replicas", "3", "--session-header"], Scale(3, None, "x-session-id")),
        (["--replicas", "3", "--ray-address", "auto", "--session-header", "X-User"], Scale(3, "auto", "X-User")),
    ],
)
def test_what_is_asked_for(words, scale):
    assert scale_of(parse(["serve", *words])) == scale


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas must be auto, or 1 or more, got 0"),
        (["--replicas", "-2"], "got -2"),
        (["--replicas", "many"], "got 'many'"),
        (["--replicas", "2", "--session-header", "two words"], "--session-header must be a header's name"),
        (["--ray-address", "auto"], "--ray-address belongs to --replicas"),
        (["--session-header"], "--session-header belongs to --replicas"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, capsys):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_ray_it_is_one_line_that_says_what_to_install():
    done = mktts_without(["ray"], "serve", "--replicas", "2", "--checkpoint", "small")
    assert done.returncode == 2 and done.stdout == ""
    assert 'pip install -e ".[ray]" in the checkout' in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("available", "wanted", "device", "count", "each"),
    [
        ({"GPU": 2.0, "CPU": 32.0}, None, "auto", 2, {"num_gpus": 1, "num_cpus": 1.0}),
        ({"GPU": 8.0, "CPU": 4.0}, 3, "cuda", 3, {"num_gpus": 1, "num_cpus": 0.5}),
        ({"CPU": 8.0}, None, "auto", 4, {"num_cpus": 2.0}),
        ({"GPU": 1.0, "CPU": 2.0}, 2, "cpu", 2, {"num_cpus": 1.0}),
        ({"CPU": 2.0}, 3, "auto", 3, {"num_cpus": 0.66}),
    ],
)
def test_a_replica_gets_a_gpu_or_its_share_of_the_processor(available, wanted, device, count, each):
    assert _placed(available, wanted, device) == (count, each)


@pytest.mark.parametrize(
    ("available", "wanted", "device", "message"),
    [
        ({"GPU": 2.0, "CPU": 8.0}, 3, "auto", "at most 2 --replicas, got 3"),
        ({"CPU": 8.0}, 1, "cuda", "at most 0 --replicas, got 1"),
        ({"GPU": 2.0, "CPU": 8.0}, 2, "cuda:1", "--device cuda:1: every replica has a GPU of its own"),
    ],
)
def test_more_replicas_than_gpus_are_refused(available, wanted, device, message):
    with pytest.raises(ServerError, match=message):
        _placed(available, wanted, device)


@pytest.mark.parametrize(("open_streams", "replicas"), [(0, 1), (1, 1), (70, 1), (71, 2), (140, 2), (141, 3)])
def test_replicas_follow_the_open_streams(open_streams, replicas):
    half = {"a": open_streams / 2, "b": open_streams / 2}
    context = SimpleNamespace(
        aggregated_metrics={scaling.OPEN: half, scaling.CAPACITY: {"a": 100.0, "b": 100.0}}, target_num_replicas=9
    )
    assert scaling.by_open_streams(context) == (replicas, {})


def test_before_any_report_the_number_of_replicas_stays():
    assert scaling.by_open_streams(SimpleNamespace(aggregated_metrics=None, target_num_replicas=2)) == (2, {})


def process(folder: Path, number: int, parent: int, *words: str) -> None:
    (folder / str(number)).mkdir(parents=True)
    (folder / str(number) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (folder / str(number) / "status").write_text(f"Name:\tx\nPPid:\t{parent}\n")


def test_proxies_left_behind_are_found_and_named(tmp_path, caplog):
    config = tmp_path / "mktts-serve-abc" / "node" / "haproxy.cfg"
    config.parent.mkdir(parents=True)
    config.write_text("frontend prometheus\n    bind :9101\nfrontend http\n    bind 127.0.0.1:8000\n")
    processes = tmp_path / "proc"
    process(processes, 1, 0, "/sbin/init")
    process(processes, 10, 1, "ray::HAProxyManager")
    process(processes, 11, 10, "haproxy", "-db", "-f", str(config))  # kept by Ray
    process(processes, 12, 1, "haproxy", "-db", "-f", str(config), "-sf", "11")
    process(processes, 13, 1, "haproxy", "-f", "haproxy.cfg")  # somebody else's
    process(processes, 14, 1, "grep", "haproxy", "-f", str(config))
    assert orphans(processes) == [Orphan(12, (9101, 8000))]

    with pytest.raises(ServerError, match=r"port 8000 is held by a proxy .*process 12\): end it with `kill 12`"):
        refuse_left_behind(orphans(processes), 8000)
    refuse_left_behind(orphans(processes), 8001)
    assert "kill 12" in caplog.text


def test_the_plain_configuration_is_one_that_haproxy_takes(tmp_path, capsys):
    if (haproxy := program()) is None:
        pytest.skip("needs HAProxy, which the package ray brings on Linux")
    assert run("serve haproxy", "--server", "127.0.0.1:8001", "--server", "[::1]:8002", "--port", "8100") == 0
    (tmp_path / "haproxy.cfg").write_text(text := capsys.readouterr().out)
    assert "bind 127.0.0.1:8100" in text and "server mktts2 [::1]:8002" in text
    checked = subprocess.run([haproxy, "-c", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True)
    assert checked.returncode == 0 and "WARNING" not in checked.stderr, checked.stderr


@pytest.mark.parametrize(
    ("servers", "port", "message"),
    [
        ([], 80, "got none"),
        (["a:1", "a:1"], 80, "named twice"),
        (["a"], 80, "HOST:PORT"),
        (["a:70000"], 80, "port must be 1 to 65535, got 70000"),
        (["a:1"], 0, "port must be 1 to 65535, got 0"),
        (["a:1\nglobal"], 80, "HOST:PORT"),
    ],
)
def test_no_configuration_is_made_of_what_is_no_address(servers, port, message):
    with pytest.raises(ServerError, match=message):
        configuration(servers, "127.0.0.1", port)


@pytest.fixture(scope="module")
def plan(checkpoint_cache) -> Plan:
    arguments = argparse.Namespace(**vars(parse(["serve", "--checkpoint", "random:tiny", "--device", "cpu"])))
    del arguments.run
    return Plan(arguments, Limits(grace_s=0.2, head_s=1.0), ("a-key",), (), ())


@pytest.fixture
def put_back(monkeypatch) -> Iterator[None]:
    """A replica has a process of its own, and sets uvicorn, the log, threads and garbage collection for all of it."""
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)
    monkeypatch.setattr(serving, "_PROCESS", serving._Process())  # a replica's part in it ends with its process
    ours = logging.getLogger("mktts")
    handlers, level = list(ours.handlers), ours.level
    switch_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    ours.handlers[:] = handlers
    ours.setLevel(level)
    sys.setswitchinterval(switch_s)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@needs("ray")
def test_serves_local_testing_mode_makes_a_replica_that_knows_its_streams(plan, put_back):
    import ray
    from ray import serve

    deployment = serve.deployment(serve.ingress()(Replica))
    handle = serve.run(deployment.bind(plan), _local_testing_mode=True)
    assert handle.check_health.remote().result(timeout_s=60) is None
    stats = handle.record_autoscaling_stats.remote().result(timeout_s=60)
    assert stats[scaling.OPEN] == 0 and stats[scaling.CAPACITY] >= 1
    handle.stop.remote().result(timeout_s=60)
    assert not ray.is_initialized()  # no cluster was started for it, and so there is nothing to shut down


class Started:
    """A replica and its socket as Ray Serve makes them: the replica first, then a uvicorn with its own settings."""

    def __init__(self, plan: Plan) -> None:
        self.replica = Replica.__new__(Replica)
        asyncio.run(Replica.__init__(self.replica, plan))
        app = self.replica.__serve_build_asgi_app__()
        settings = {"factory": True, "lifespan": "off", "log_config": None, "timeout_keep_alive": 90}
        self.server = uvicorn.Server(uvicorn.Config(lambda: app, **settings))


@pytest.fixture
def started(plan, put_back):
    made = Started(plan)
    yield made
    asyncio.run(made.replica.__del__())


def test_a_replica_speaks_as_the_server_alone_does(started):
    with listen("127.0.0.1", 0, Limits()) as bound:
        bound.listen()
        with running(started.server, bound) as url:
            assert httpx.get(f"{url}/health").json()["status"] == "ok"
            assert httpx.post(f"{url}/tts/stream", json={"text": "Hello."}).status_code == 401
            key = {"Authorization": "Bearer a-key"}
            answer = httpx.post(f"{url}/tts/stream", json={"text": "Hello.", "max_frames": 2}, headers=key)
            assert len(answer.content) == 2 * 1_920 * 2 and "server" not in answer.headers
            assert len(answer.headers.get_list("x-request-id")) == 1
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=30) as half:
                half.sendall(b"GET /health HTTP/1.1\r\nHost: x")
                assert half.recv(64).startswith(b"HTTP/1.1 408")  # after head_s, which uvicorn does not know


def test_a_replica_that_goes_lets_a_websocket_finish_its_sentence(started):
    """Ray Serve ends a replica's uvicorn while its streams still run; uvicorn would cut WebSockets at once."""
    studio = started.replica._studio
    with listen("127.0.0.1", 0, Limits()) as bound:
        bound.listen()
        with running(started.server, bound) as url:
            ws = url.replace("http", "ws", 1) + "/tts/ws?key=a-key"
            with connect(ws) as idle, connect(ws) as busy:
                busy.send(json.dumps({"type": "start", "text": TEXT, "max_frames": 40}))
                until(lambda: studio.streams_open == 1, "the utterance to begin")
                started.server.should_exit = True
                with pytest.raises(ConnectionClosed) as closed:
                    idle.recv(timeout=60)
                assert closed.value.rcvd.code == 1012  # service restart: connect again
                messages = []
                with pytest.raises(ConnectionClosed) as closed:
                    while True:
                        messages.append(busy.recv(timeout=60))
                assert closed.value.rcvd.code == 1012
    assert sum(len(message) for message in messages if isinstance(message, bytes)) == 40 * 1_920 * 2
    assert '"finish_reason":"max_frames"' in messages[-1] and studio.stopping
