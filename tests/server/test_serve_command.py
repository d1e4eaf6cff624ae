"""`python -m mktts serve`: its settings, its signals, an engine in a process of its own, and missing packages."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from absent import needs, python_without
from fastapi.testclient import TestClient
from served import TEXT, until

import mktts.server
from mktts.cli import main, parse
from mktts.errors import ServerError
from mktts.server.command import open_service, runs_apart
from mktts.server.limits import Limits
from mktts.server.replicas import Replica, _resources

PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "websockets", "prometheus_client")
SHORT = {"text": "Hello there.", "max_frames": 9, "seed": 4}
LONG = {"text": TEXT, "max_frames": 4_000}  # more than the buffers of a connection hold


def test_an_address_that_others_reach_is_refused_without_a_key(monkeypatch, capsys):
    monkeypatch.delenv("MKTTS_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        assert main(["serve", "--host", host, "--checkpoint", "absent"]) == 2
        assert "there is no key" in capsys.readouterr().err
    for host in ("127.0.0.1", "localhost", "127.8.8.8"):
        assert main(["serve", "--host", host, "--port", "0", "--checkpoint", "absent-folder"]) == 2
        assert "absent-folder" in capsys.readouterr().err  # as far as the model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--api-key-file absent.txt", "absent.txt: expected a file that holds the key"),
        ("--api-key-file bytes.txt", "bytes.txt: expected a file that holds the key"),
        ("--api-key-file blank.txt", "expected a key of printable ASCII"),
        ("--api-key-file two.txt", "expected a key of printable ASCII"),
        ("--max-streams 0", "max_streams must be above 0"),
        ("--port TAKEN", "name another --port"),
        ("--port 99999", "port must be 0 to 65535, got 99999"),
        ("--host no.such.host.invalid --api-key-file key.txt", "cannot listen on no.such.host.invalid"),
        ("--max-duration inf", "max_duration_s must be finite, got inf"),
        ("--max-duration nan", "max_duration_s must be above 0, got nan"),
        ("--max-duration 1e9", "max_duration_s must be at most 86400"),
        ("--grace -1", "grace_s must be above 0, got -1"),
        ("--allow-origin *", "--allow-origin must be like https://app.example"),
        ("--allow-host https://tts.example", "--allow-host must be a name"),
        ("--voice anna", "--voice must be NAME=FILE"),
        ("--voice anna=absent.safetensors", "absent.safetensors"),
        ("--voice-alias alloy", "--voice-alias must be ALIAS=NAME"),
        ("--voice-alias alloy=nobody --checkpoint random:tiny", "got 'nobody'"),
        ("--instruct-clones --checkpoint random:tiny", "expected a Base checkpoint, found custom_voice"),
        ("--instruct-clones --checkpoint random:tiny:base --backend upstream", "name another --backend"),
        ("--voice-folder blank.txt", "--voice-folder blank.txt: expected a folder to read and write"),
        ("--voice-folder blank.txt/in", "expected a folder to read and write"),
        ("--voice-days inf", "voice_days must be finite"),
        ("--ray-address auto", "--ray-address belongs to --replicas"),
    ],
)
def test_bad_settings_are_one_line_and_status_2(tmp_path, monkeypatch, capsys, checkpoint_cache, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "two.txt").write_text("a-key\ntwo words\n")
    (tmp_path / "key.txt").write_text("a-key\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = words.replace("TAKEN", str(taken.getsockname()[1]))
        assert main(["serve", "--port", "0", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("mktts: ") and error.count("\n") == 1


# ---- while it serves, in this process


def serve(caplog: Any, client: Callable[[str], None], *words: str) -> tuple[int, list[BaseException]]:
    """The command's exit status, and what `client` raised, which is called with the address in another thread."""
    caplog.set_level("INFO", "mktts")
    errors: list[BaseException] = []

    def go() -> None:
        try:
            until(lambda: re.search(r"http://\S+", caplog.text), "the address in the log")
            client(re.search(r"http://\S+", caplog.text).group())
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    status = main(["serve", "--checkpoint", "random:tiny", "--device", "cpu", "--port", "0", *words])
    thread.join(60)
    return status, errors


def test_sigterm_lets_open_streams_finish_and_the_log_says_what_was_served(checkpoint_cache, caplog):
    def client(url: str) -> None:
        health = httpx.get(f"{url}/health").json()
        assert health["model"]["checkpoint"] == "random:tiny" and health["streams_max"] in (1, 2)
        body = {"text": TEXT, "max_frames": 60}
        with httpx.stream("POST", f"{url}/tts/stream", json=body, timeout=60) as answer:
            pieces = answer.iter_raw()
            content = next(pieces)
            os.kill(os.getpid(), signal.SIGTERM)
            content += b"".join(pieces)
        assert len(content) == 60 * 3_840

    assert serve(caplog, client, "--max-streams", "2", "--grace", "20", "--engine", "single") == (0, [])
    assert "random weights" in caplog.text and TEXT[:20] not in caplog.text


def test_ctrl_c_cancels_what_is_open_after_the_grace_and_the_process_is_as_before(checkpoint_cache, caplog):
    before_s = sys.getswitchinterval()

    def client(url: str) -> None:
        with httpx.stream("POST", f"{url}/tts/stream", json=LONG, timeout=60) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                b"".join(pieces)

    assert serve(caplog, client, "--grace", "0.1", "--engine", "batch") == (128 + signal.SIGINT, [])
    assert sys.getswitchinterval() == before_s


def test_a_server_whose_engine_dies_breaks_streams_off_and_ends_and_says_so(checkpoint_cache, caplog):
    def children() -> set[int]:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))

    before = children()

    def client(url: str) -> None:
        with httpx.stream("POST", f"{url}/tts/stream", json=LONG) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            (engine,) = children() - before
            os.kill(engine, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                b"".join(pieces)

    assert serve(caplog, client, "--engine-process", "own") == (1, [])
    assert "engine's process has ended" in caplog.text


def test_a_gpu_that_serves_many_is_apart_unless_said_otherwise(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for where in (("auto", "batch", "cuda"), ("auto", "batch", "auto"), ("own", "auto", "cpu")):
        assert runs_apart(*where)
    for where in (("auto", "batch", "cpu"), ("auto", "auto", "cuda"), ("same", "batch", "cuda")):
        assert not runs_apart(*where)


# ---- packages that are missing, and Ray


def test_without_the_servers_packages_help_is_there_and_serving_names_what_is_missing():
    code = "from mktts.cli import main, parse\nfrom mktts.server.address import listen, read_keys\n"
    code += "from mktts.server.limits import Limits\nlisten('localhost', 0, Limits()).close()\n"
    code += "parse(['serve'])\nsys.exit(main(['serve', '--port', '0']))"
    done = python_without(PACKAGES, code)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search("the package (fastapi|uvicorn|pydantic)", done.stderr)
    assert "pip install -r requirements.txt" in done.stderr


def test_without_ray_it_is_one_line_that_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(["serve", "--replicas", "2", "--port", "0", "--checkpoint", "small"]) == 2
    error = capsys.readouterr().err
    assert 'pip install -e ".[ray]" in the checkout' in error and error.count("\n") == 1


def test_a_replica_gets_a_gpu_or_its_share_of_the_processor():
    assert _resources({"GPU": 2.0, "CPU": 32.0}, 2, "auto") == {"num_gpus": 1, "num_cpus": 1.0}
    assert _resources({"GPU": 8.0, "CPU": 4.0}, 3, "cuda") == {"num_gpus": 1, "num_cpus": 0.5}
    assert _resources({"CPU": 8.0}, 4, "auto") == {"num_cpus": 1.0}
    assert _resources({"CPU": 2.0}, 3, "auto") == {"num_cpus": 0.66}
    for available, replicas, device, message in (
        ({"GPU": 2.0, "CPU": 8.0}, 3, "auto", "at most 2 --replicas, got 3"),
        ({"CPU": 8.0}, 1, "cuda", "at most 0 --replicas, got 1"),
        ({"GPU": 2.0, "CPU": 8.0}, 2, "cuda:1", "--device cuda:1: every replica has a GPU of its own"),
        ({"CPU": 8.0}, 0, "cpu", "--replicas must be 1 or more, got 0"),
    ):
        with pytest.raises(ServerError, match=message):
            _resources(available, replicas, device)


def test_a_replica_is_a_server_and_stops_in_order(checkpoint_cache):
    arguments = parse(["serve", "--checkpoint", "random:tiny", "--device", "cpu", "--engine", "single"])
    replica = Replica.__new__(Replica)
    opening = partial(open_service, arguments, Limits(grace_s=0.05))
    asyncio.run(replica.__init__(opening, {"api_key": ["a-key"]}, own_cluster=False))
    api = TestClient(replica.__serve_build_asgi_app__(), headers={"Authorization": "Bearer a-key"})
    assert len(api.post("/tts/stream", json=SHORT).content) == 9 * 3_840
    asyncio.run(replica.check_health())
    asyncio.run(replica.stop())
    assert api.post("/tts/stream", json=SHORT).json()["error"]["code"] == "stopping"
    replica._service._failures = 3
    replica._service.stopping = False
    with pytest.raises(ServerError, match="several streams in a row"):
        asyncio.run(replica.check_health())
    asyncio.run(replica.__del__())
    logging.getLogger("mktts").setLevel(logging.NOTSET)


@pytest.mark.slow
@needs("ray")
def test_two_replicas_by_ray_serve_finish_their_streams_on_sigterm(tmp_path):
    command = [sys.executable, "-m", "mktts", "serve", "--replicas", "2", "--checkpoint", "small", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mktts.__file__).parents[1])}
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen([*command, "--port", "0", "--grace", "60"], stderr=errors, env=environment)
    try:
        until(lambda: "replicas of" in log.read_text() or process.poll() is not None, "the replicas", 300)
        url = re.search(r"http://\S+", log.read_text()).group()
        heard: list[bytes] = []
        body = {"text": TEXT, "max_frames": 60}

        def listen_to() -> None:
            heard.append(httpx.post(f"{url}/tts/stream", json=body, timeout=120).content)

        threads = [threading.Thread(target=listen_to) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: json.loads(httpx.get(f"{url}/health").content)["streams_open"], "a stream")
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(120)
        assert [len(pcm) for pcm in heard] == [60 * 3_840] * 4
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
