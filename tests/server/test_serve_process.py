"""`python -m mktts serve` as a process, and who may use it: addresses, keys, web pages, signals."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from served import TEXT, served, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.cli import main
from mktts.common import python_path
from mktts.errors import ServerError
from mktts.server import Limits, listen, url_of
from mktts.server.graceful import SpeechServer as Server
from mktts.spec import SAMPLES_PER_FRAME
from mktts.speech import serving
from mktts.speech.serving import SWITCH_S, YOUNG_OBJECTS
from mktts.synth import Synthesizer

KEY = "a-key-of-the-tests"
BEARER = {"Authorization": f"Bearer {KEY}"}
SHORT = {"text": "Hello there.", "max_frames": 1}
LONG = {"text": TEXT, "max_frames": 400}


@pytest.fixture(scope="module")
def synthesizer(tiny):
    with Synthesizer.load(tiny) as made:
        yield made


@pytest.fixture(scope="module")
def locked(synthesizer):
    with served(synthesizer, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def unlocked(synthesizer):
    with served(synthesizer, origins=["https://app.example"]) as running:
        yield running


class Process:
    """The command in a process of its own; `log` is what it has written to standard error."""

    def __init__(self, *words: str) -> None:
        code = "import sys; from mktts.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "serve", "--checkpoint", "random:tiny", "--port", "0", *words]
        environment = {**os.environ, **python_path()}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        until(lambda: re.search(r"http://\S+", self.log) or self.process.poll() is not None, "the address in the log")
        return re.search(r"http://\S+", self.log).group()

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        self._reader.join()
        return status

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log += line


@pytest.fixture
def start(checkpoint_cache) -> Iterator[type[Process]]:
    started: list[Process] = []

    def go(*words: str) -> Process:
        started.append(Process(*words))
        return started[-1]

    yield go
    for one in started:
        one.process.kill()
        one.process.wait()
        one.process.stderr.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_an_address_that_others_reach_is_refused_without_a_key(host, monkeypatch, capsys):
    monkeypatch.delenv("MKTTS_API_KEY", raising=False)
    assert main(["serve", "--host", host, "--checkpoint", "absent"]) == 2
    assert "there is no key" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_key(host, monkeypatch, capsys):
    monkeypatch.delenv("MKTTS_API_KEY", raising=False)
    assert main(["serve", "--host", host, "--port", "0", "--checkpoint", "absent-folder"]) == 2
    assert "absent-folder" in capsys.readouterr().err  # as far as the model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key-file", "absent.txt"], "absent.txt"),
        (["--api-key-file", "absent.txt"], "expected a file that holds the key"),
        (["--api-key-file", "bytes.txt"], "bytes.txt: expected a file that holds the key"),
        (["--api-key-file", "blank.txt"], "expected a key of printable ASCII"),
        (["--max-streams", "0"], "max_streams must be above 0"),
        (["--port", "TAKEN"], "name another --port"),
        (["--port", "99999"], "port must be 0 to 65535, got 99999"),
        (["--port", "-1"], "port must be 0 to 65535, got -1"),
        (["--max-duration", "inf"], "max_duration_s must be finite, got inf"),
        (["--max-duration", "nan"], "max_duration_s must be above 0, got nan"),
        (["--max-duration", "1e9"], "max_duration_s must be at most 86400"),
        (["--grace", "-1"], "grace_s must be above 0, got -1"),
        (["--stall", "inf"], "stall_s must be finite"),
        (["--api-key-file", "."], "expected a file that holds the key"),
        (["--api-key-file", "two words.txt"], "expected a key of printable ASCII"),
        (["--allow-origin", "*"], "--allow-origin must be like https://app.example"),
        (["--allow-origin", "http://localhost:3000/"], "must end after the host and port, as http://localhost:3000,"),
        (["--allow-origin", "app.example"], "--allow-origin must be like"),
        (["--allow-host", "https://tts.example"], "--allow-host must be a name"),
        (["--voice", "anna"], "--voice must be NAME=FILE"),
        (["--voice", "anna=absent.safetensors"], "absent.safetensors"),
        (["--voice-alias", "alloy"], "--voice-alias must be ALIAS=NAME"),
        (["--voice-alias", "alloy=nobody", "--checkpoint", "random:tiny"], "got 'nobody'"),
        (["--voice-folder", "blank.txt"], "--voice-folder blank.txt: expected a folder to read and write"),
        (["--voice-folder", "blank.txt/in"], "expected a folder to read and write"),
        (["--voice-days", "inf"], "voice_s must be finite"),
        (["--voice-days", "-1"], "voice_s must be above 0"),
        (["--reference-folder", "absent"], "--reference-folder absent: expected a folder"),
        (["--reference-host", "http://files.example"], "--reference-host must be a host's name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_are_one_line_and_status_2(tmp_path, monkeypatch, capsys, checkpoint_cache, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "two words.txt").write_text("a-key\ntwo words\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in words]
        assert main(["serve", "--port", "0", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("mktts: ") and error.count("\n") == 1


def test_help_names_the_limits_and_the_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "--api-key-file" in text and "MKTTS_API_KEY" in text and max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize(("engine", "many"), [("auto", True), ("batch", True), ("single", False)])
def test_the_process_is_set_for_many_streams_while_a_batch_engine_serves_and_as_before_afterwards(
    tiny, checkpoint_cache, monkeypatch, engine, many
):
    monkeypatch.setattr(serving, "_PROCESS", serving._Process())  # no other test's engine has a part in it
    gc.unfreeze()  # a server begins without what conftest.py froze
    before = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    inside = []

    def run(server: Server, sockets: list[socket.socket]) -> None:
        inside.append((sys.getswitchinterval(), gc.get_threshold()[0], gc.get_freeze_count()))
        raise ServerError("it fell over")  # however it ends

    monkeypatch.setattr(Server, "run", run)
    words = ["--device", "cpu", "--checkpoint", "random:tiny", "--engine", engine, "--port", "0"]
    assert main(["serve", *words]) == 2
    ((switch_s, objects, frozen),) = inside
    assert (switch_s == SWITCH_S, objects == YOUNG_OBJECTS, frozen > before[2] + 10_000) == (many, many, many)
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_bound_address_is_told_for_both_families():
    with listen("127.0.0.1", 0, Limits()) as four:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url_of(four))
    with pytest.raises(ServerError, match="cannot listen on no.such.host.invalid"):
        listen("no.such.host.invalid", 0, Limits())


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": KEY}, {"Authorization": "Bearer another"}, {"Authorization": f"Bearer {KEY}x"}],
    ids=["none", "no scheme", "another", "longer"],
)
def test_without_the_key_nothing_but_health_is_answered(locked, headers):
    for method, path in (("POST", "/tts/stream"), ("POST", "/v1/audio/speech"), ("GET", "/metrics"), ("GET", "/none")):
        answer = httpx.request(method, locked.url + path, headers=headers, json=SHORT if method == "POST" else None)
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    with pytest.raises(InvalidStatus) as refused:
        connect(locked.ws, additional_headers=headers)
    assert refused.value.response.status_code == 401
    assert httpx.get(f"{locked.url}/health", headers=headers).status_code == 200
    assert locked.watched.streams == []


def test_with_the_key_everything_is_answered(locked):
    assert httpx.post(f"{locked.url}/tts/stream", headers=BEARER, json=SHORT).status_code == 200
    assert httpx.get(f"{locked.url}/metrics", headers=BEARER).status_code == 200
    with connect(locked.ws, additional_headers=BEARER) as connection:
        connection.send('{"type": "start"}')
        assert '"started"' in connection.recv(timeout=60)
    locked.watched.streams.clear()


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:8888", True),
        ("http://127.0.0.1:8888", True),
        ("https://app.example", True),
        ("https://elsewhere.example", False),
        ("http://localhost.elsewhere.example", False),
        ("null", False),
    ],
)
def test_pages_from_elsewhere_cannot_use_a_server_without_a_key(unlocked, origin, allowed):
    answer = httpx.post(f"{unlocked.url}/tts/stream", json=SHORT, headers={"Origin": origin})
    assert answer.status_code == (200 if allowed else 403)
    if allowed:
        with connect(unlocked.ws, origin=origin) as connection:
            connection.ping().wait(60)
    else:
        with pytest.raises(InvalidStatus) as refused:
            connect(unlocked.ws, origin=origin)
        assert refused.value.response.status_code == 403


def test_cors_answers_are_for_listed_pages_only(unlocked, locked):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    listed = httpx.options(f"{unlocked.url}/tts/stream", headers={"Origin": "https://app.example", **ask})
    assert listed.headers["Access-Control-Allow-Origin"] == "https://app.example"
    local = httpx.options(f"{locked.url}/v1/audio/speech", headers={"Origin": "http://localhost:3000", **ask})
    assert local.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"  # any page on this machine
    assert "content-type" in local.headers["Access-Control-Allow-Headers"]
    answer = httpx.get(f"{unlocked.url}/health", headers={"Origin": "http://127.0.0.1:3000"})
    assert answer.headers["Access-Control-Allow-Origin"] == "http://127.0.0.1:3000"
    for server, origin in ((unlocked, "https://elsewhere.example"), (locked, "https://app.example")):
        answer = httpx.options(f"{server.url}/tts/stream", headers={"Origin": origin, **ask})
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_command_serves_says_what_and_ends_with_0_on_sigterm_after_open_streams(start):
    server = start("--max-streams", "2", "--grace", "20")
    health = httpx.get(f"{server.url}/health").json()
    assert health["status"] == "ok" and health["model"]["checkpoint"] == "random:tiny"
    assert health["model"]["random_weights"] is True and health["backend"] == "torch"
    assert health["streams_max"] in (1, 2)  # as many as this machine carries, and no more than asked for
    assert RANDOM_WEIGHTS in server.log
    frames = 60
    with httpx.stream("POST", f"{server.url}/tts/stream", json={**LONG, "max_frames": frames}, timeout=60) as answer:
        pieces = answer.iter_raw()
        content = next(pieces)
        server.process.send_signal(signal.SIGTERM)
        content += b"".join(pieces)
    assert len(content) == frames * 2 * SAMPLES_PER_FRAME
    assert server.process.wait(timeout=60) == 0
    assert TEXT[:20] not in server.log


def test_ctrl_c_cancels_what_is_open_after_the_grace_and_says_so(start):
    server = start("--grace", "0.1")
    with httpx.stream("POST", f"{server.url}/tts/stream", json={**LONG, "max_frames": 4_000}, timeout=60) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):
            b"".join(pieces)
    assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert server.log.endswith("interrupted\n")


def test_a_websocket_is_told_that_the_server_stops_and_new_streams_are_refused_meanwhile(synthesizer):
    with contextlib.ExitStack() as running:
        server = running.enter_context(served(synthesizer, Limits(grace_s=3.0)))
        with connect(server.ws) as connection:
            connection.send('{"type": "start"}')
            assert '"started"' in connection.recv(timeout=60)
            stop = threading.Thread(target=running.close)
            stop.start()
            until(lambda: server.studio.stopping, "the server to begin to stop")
            refused = httpx.post(f"{server.url}/tts/stream", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert httpx.get(f"{server.url}/health").status_code == 503
            finished = json.loads(connection.recv(timeout=60))
            assert (finished["type"], finished["error"]["code"]) == ("finished", "stopping")
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=60)
        stop.join()


def test_an_engine_in_a_process_of_its_own_ends_with_the_server(start):
    server = start("--engine-process", "own")
    assert len(httpx.post(f"{server.url}/tts/stream", json=SHORT).content) == 2 * SAMPLES_PER_FRAME
    (engine,) = _children(server.process.pid)
    assert server.stop(signal.SIGTERM) == 0
    until(lambda: not os.path.exists(f"/proc/{engine}"), "the engine to be gone")


def test_a_server_whose_engine_dies_ends_and_says_so(start):
    server = start("--engine-process", "own")
    assert server.url
    (engine,) = _children(server.process.pid)
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(timeout=60) == 1
    until(lambda: "process that speaks has ended" in server.log, "the reason in the log")


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
