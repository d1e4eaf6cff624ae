"""Who is let in over a socket, who waits and who is told to come back, whichever route they take."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served import TEXT, WAIT_S, Served, served, until
from websockets.sync.client import connect

from mktts.batch import board
from mktts.server import Limits
from mktts.synth import Synthesizer

LONG = {"text": TEXT, "max_frames": 5_000}
SHORT = {"text": "Hello.", "max_frames": 1}
SPEECH = {"input": "Hello.", "response_format": "pcm", "max_frames": 1}


@pytest.fixture(scope="module", params=["single", "batch"])
def synth(request: pytest.FixtureRequest, tiny) -> Synthesizer:
    with Synthesizer.load(tiny, engine=request.param) as made:
        yield made


def listeners(server: Served) -> int:
    return sum(one.listeners for one in server.studio.standing.values())


def waiting(server: Served) -> int:
    return sum(one.waiting for one in server.studio.standing.values())


@contextlib.contextmanager
def held(server: Served) -> Iterator[None]:
    """Somebody listens, until this is left; that nothing is read of it meanwhile is forgiven (`patience`)."""
    with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG, timeout=WAIT_S) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        yield


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ABSENT_S", math.inf)


def over_socket(server: Served, path: str, first: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The first message that says what became of an utterance."""
    with connect(server.url.replace("http", "ws", 1) + path, **options) as line:
        for message in first:
            line.send(json.dumps(message))
        while True:
            message = line.recv(timeout=WAIT_S)
            if isinstance(message, str) and (said := json.loads(message))["type"] in ("error", "finished"):
                return said


def test_every_route_asks_the_same_admission(synth, patience, caplog):
    caplog.set_level("INFO", "mktts.server")
    with served(synth, Limits(max_streams=1, wait_s=0.05)) as server, held(server):
        for path, body in (("/tts/stream", SHORT), ("/v1/audio/speech", SPEECH)):
            refused = httpx.post(server.url + path, json=body, timeout=WAIT_S)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["streams_max"]) == (429, "busy", 1), path
            assert int(refused.headers["Retry-After"]) >= 1 and error["type"] == "rate_limit_error"
            assert "with 1 stream open, where about 1 can be carried at once" in error["message"]
        said = over_socket(server, "/tts/ws", [{"type": "start", **SHORT}])
        assert said["error"]["code"] == "busy" and said["retry_after_s"] >= 1
        page = httpx.get(f"{server.url}/metrics").text
        assert 'mktts_refused_total{code="busy"} 3.0' in page
        lines = [line for line in caplog.messages if line.startswith("stream ")]
        assert len(lines) == 3 and all("refused, busy: refused with 1 stream open" in line for line in lines), lines


def test_so_many_wait_for_a_place_and_the_next_is_told_at_once(synth, patience):
    with served(synth, Limits(max_streams=1, max_waiting=1, wait_s=WAIT_S)) as server, ThreadPoolExecutor(1) as pool:
        with held(server):
            waits = pool.submit(httpx.post, f"{server.url}/tts/stream", json=SHORT, timeout=WAIT_S)
            until(lambda: waiting(server) == 1, "the second one to stand in line")
            refused = httpx.post(f"{server.url}/tts/stream", json=SHORT, timeout=WAIT_S)
            assert refused.status_code == 429 and "too many streams wait" in refused.json()["error"]["message"]
            assert not waits.done()
        assert waits.result().status_code == 200  # the first one has gone


def test_who_gives_up_in_line_leaves_no_trace(synth, patience):
    with served(synth, Limits(max_streams=1, wait_s=WAIT_S)) as server, held(server):
        where = urlsplit(server.url)
        content = json.dumps(SHORT).encode()
        head = f"POST /tts/stream HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((where.hostname, where.port)) as line:
            line.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            until(lambda: waiting(server) == 1, "it to stand in line")
        until(lambda: waiting(server) == 0 and server.studio.streams_open == 1, "it to have left")


def test_text_that_has_not_come_holds_no_lane(synth):
    with (
        served(synth, Limits(max_streams=1, wait_s=0.05)) as server,
        connect(server.ws) as one,
        connect(server.ws) as two,
    ):
        for line in (one, two):
            line.send(json.dumps({"type": "start", "max_frames": 1}))
            assert json.loads(line.recv(timeout=WAIT_S))["type"] == "started"
        assert server.studio.streams_open == 2 and listeners(server) == 0
        assert httpx.post(f"{server.url}/tts/stream", json=SHORT, timeout=WAIT_S).status_code == 200


def test_a_reader_who_reads_nothing_holds_no_lane(synth, monkeypatch):
    monkeypatch.setattr(board, "ABSENT_S", 0.0)
    limits = Limits(max_streams=1, wait_s=WAIT_S, buffer_frames=8, socket_bytes=16 * 1024, stall_s=WAIT_S)
    with served(synth, limits) as server:
        where = urlsplit(server.url)
        content = json.dumps(LONG).encode()
        head = f"POST /tts/stream HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            line.connect((where.hostname, where.port))
            line.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            until(lambda: server.watched.streams and server.watched.streams[0].rests, "its buffers to be full")
            assert httpx.post(f"{server.url}/tts/stream", json=SHORT, timeout=WAIT_S).status_code == 200
            until(lambda: listeners(server) == 0, "the short one's end to be noticed")
            assert server.studio.streams_open == 1


def test_health_and_the_plain_page_say_how_many_are_carried(synth):
    with served(synth, Limits(max_streams=3, wait_s=WAIT_S)) as server:
        synth.calibrate()
        most = httpx.get(f"{server.url}/health").json()["streams_max"]
        assert 1 <= most <= 3 and f"About {most} streams at once" in httpx.get(server.url).text
