"""The server on a real socket, over the tiny checkpoint: slow clients, cancelling, half requests, its log."""

import contextlib
import json
import logging
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served import TEXT, WAIT_S, Served, served, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from mktts.audio import to_pcm16
from mktts.engine import scheduler
from mktts.engine.options import StreamOptions
from mktts.server.settings import Limits

LONG = {"text": TEXT, "seed": 1, "max_frames": 120}
SHORT = {"text": "Hello.", "max_frames": 1}
ENDLESS = {"text": TEXT, "max_frames": 5_000}
SMALL_BUFFERS = {"buffer_frames": 8, "socket_bytes": 16 * 1024}
KEY = "a-key-of-the-tests"
SECRET = "Secretword."


@pytest.fixture(scope="module")
def hasty(synth):
    with served(synth, Limits(head_s=0.2, body_s=0.2, max_body_bytes=4_096)) as running:
        yield running


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /tts/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def raw(server: Served, data: bytes, receive_buffer_bytes: int | None = None) -> socket.socket:
    """A connection on which `data` was sent and whose answer is read by nothing but the test."""
    where = urlsplit(server.url)
    connection = socket.socket()
    connection.settimeout(30)
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.connect((where.hostname, where.port))
    connection.sendall(data)
    return connection


def send(line: ClientConnection, type: str, **fields: Any) -> None:
    line.send(json.dumps({"type": type, **fields}))


def read(line: ClientConnection) -> dict | bytes:
    message = line.recv(timeout=WAIT_S)
    return message if isinstance(message, bytes) else json.loads(message)


def deaf(server: Served) -> ClientConnection:
    """A client that reads as little as it can, for as long as it likes: it would not see the answer to a ping of its
    own behind what it has not read, and hang up."""
    return connect(server.ws, sock=raw(server, b"", 16 * 1024), max_queue=1, ping_interval=None, close_timeout=0.1)


# ---- speech


def test_closing_the_connection_ends_the_generation_within_one_frame(server):
    with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG, timeout=60) as answer:
        pieces = answer.iter_raw()  # kept: httpx closes the connection of an iterator that is dropped
        assert next(pieces)  # before the generation is over
    until(lambda: server.service.streams_open == 0, "the stream to be ended")
    assert server.service.find(answer.headers["X-Request-Id"]).finish_reason == "cancelled"
    with raw(server, request(LONG)):
        until(lambda: len(server.watched.streams) == 2, "the stream of a client that reads nothing")
    with connect(server.ws) as line:
        send(line, "start", max_frames=400)
        send(line, "text", text=TEXT)
        read(line), read(line), read(line)
    until(lambda: server.service.streams_open == 0, "the streams to be ended")
    for stream in server.watched.streams:
        assert server.watched.wasted_frames(stream) <= 1 and len(stream.codes) < LONG["max_frames"]


def test_slow_reader_stops_the_generation_and_then_gets_every_byte(synth, tiny):
    """What is on its way is bounded by the two socket buffers, the server's write buffer and buffer_frames."""
    limits = Limits(**SMALL_BUFFERS)
    with served(synth, limits) as server, raw(server, request(LONG), 16 * 1024) as connection:
        until(lambda: server.watched.streams, "the stream to be opened")
        stream = server.watched.streams[0]
        assert 0 < server.watched.frames_at_pause(stream) < LONG["max_frames"] - 2 * limits.buffer_frames
        answer = HTTPResponse(connection)
        answer.begin()
        settings = {"seed": 1, "max_frames": LONG["max_frames"], "options": StreamOptions(buffer_frames=8)}
        assert answer.read() == to_pcm16(synth.say(TEXT, speaker=tiny.config.default_speaker, **settings))


def test_a_client_that_reads_nothing_for_too_long_is_dropped(synth):
    limits = Limits(**SMALL_BUFFERS, stall_s=0.3)
    with served(synth, limits) as server, raw(server, request(LONG), 16 * 1024), deaf(server) as line:
        send(line, "start", **LONG)
        until(lambda: len(server.watched.streams) == 2 and server.service.streams_open == 0, "both to be dropped")
        assert len(server.watched.streams[0].codes) < LONG["max_frames"]


def test_cancel_is_heard_while_the_client_does_not_read_and_starting_again_has_an_end(synth):
    with served(synth, Limits(**SMALL_BUFFERS)) as server, deaf(server) as line:
        send(line, "start", max_frames=400, text=TEXT)
        until(lambda: server.watched.streams, "the stream to be opened")
        server.watched.frames_at_pause(server.watched.streams[0])
        send(line, "cancel")
        until(lambda: server.service.streams_open == 0, "the stream to be ended")
        for _ in range(20):
            send(line, "start", max_frames=400)
            send(line, "cancel")
        until(lambda: len(server.watched.streams) > 5 and server.service.streams_open == 0, "the connection's end")
        assert len(server.watched.streams) < 20


def test_a_websocket_is_told_that_the_server_stops_and_new_streams_are_refused_meanwhile(synth):
    with contextlib.ExitStack() as running:
        server = running.enter_context(served(synth, Limits(grace_s=1.0)))
        with connect(server.ws) as line:
            send(line, "start")
            assert read(line)["type"] == "started"
            stop = threading.Thread(target=running.close)
            stop.start()
            until(lambda: server.service.stopping, "the server to begin to stop")
            refused = httpx.post(f"{server.url}/tts/stream", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["Retry-After"] and httpx.get(f"{server.url}/ready").status_code == 503
            finished = read(line)
            assert (finished["type"], finished["error"]["code"]) == ("finished", "stopping")
            with pytest.raises(ConnectionClosed):
                read(line)
        stop.join()


# ---- admission


def stat(server: Served, field: str) -> int:
    return sum(getattr(one, field) for one in server.service.synthesizer.stats.values())


def test_one_stream_too_many_waits_or_is_told_to_come_back(synth, monkeypatch, caplog):
    monkeypatch.setattr(scheduler, "ABSENT_S", math.inf)  # that nothing is read of the first stream is forgiven
    caplog.set_level("INFO", "mktts.server")
    with served(synth, Limits(max_streams=1, max_waiting=1, wait_s=WAIT_S)) as server, ThreadPoolExecutor(1) as pool:
        post = partial(httpx.post, f"{server.url}/tts/stream", json=SHORT, timeout=WAIT_S)
        with httpx.stream("POST", f"{server.url}/tts/stream", json=ENDLESS, timeout=WAIT_S) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            with raw(server, request(SHORT)):
                until(lambda: stat(server, "waiting") == 1, "a client that gives up in line")
            until(lambda: stat(server, "waiting") == 0 and server.service.streams_open == 1, "it to have left")
            waits = pool.submit(post)
            until(lambda: stat(server, "waiting") == 1, "the second one to stand in line")
            refused = post()
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["streams_max"]) == (429, "busy", 1)
            assert "too many streams wait" in error["message"] and int(refused.headers["Retry-After"]) >= 1
            assert not waits.done()
        assert waits.result().status_code == 200  # the first one has gone


# ---- half requests, broken ones, and the log


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"", b"", b""),
        (b"GET /hea", b"408", b"head_timeout"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"408", b"head_timeout"),
        (b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\nGET /rea", b"200", b""),
        (request(LONG)[:-5], b"408", b"body_timeout"),
        (b"NONSENSE\r\n\r\n", b"400", b"invalid_http"),
    ],
    ids=["nothing", "half a line", "half a head", "half a second head", "half a body", "no HTTP"],
)
def test_half_a_request_is_let_go_and_told_so_in_the_shape_of_every_error(hasty, sent, status, code):
    begun_s, content = time.monotonic(), b""
    with raw(hasty, sent) as connection:
        while piece := connection.recv(65_536):
            content += piece
    seconds, (head, _, body) = time.monotonic() - begun_s, content.partition(b"\r\n\r\n")
    assert head[9:12] == status and (seconds > 0.1 or status == b"400") and seconds < 9
    if code:
        error = json.loads(body)["error"]
        assert error["code"] == code.decode() and error["request_id"].encode() in head


def test_a_connection_that_waits_between_requests_and_a_websocket_are_not_half_a_head(hasty):
    with httpx.Client(base_url=hasty.url) as client, connect(hasty.ws) as line:
        client.get("/ready")
        time.sleep(0.4)
        assert client.get("/ready").status_code == 200
        send(line, "start", **SHORT)
        assert read(line)["type"] == "started"


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
def test_a_gigabyte_is_refused_at_once_and_read_no_further(server, announced):
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {2**30}\r\n\r\n" if announced else "Transfer-Encoding: chunked\r\n\r\n"
    sent_bytes = 0
    with raw(server, head.encode()) as connection:

        def send_all() -> None:
            nonlocal sent_bytes
            piece = bytes(2**16) if announced else b"10000\r\n" + bytes(2**16) + b"\r\n"
            with contextlib.suppress(OSError):
                while sent_bytes < 2**30:
                    connection.sendall(piece)
                    sent_bytes += len(piece)

        sending = threading.Thread(target=send_all, daemon=True)
        sending.start()
        assert b" 413 " in connection.recv(4_096).partition(b"\r\n")[0]
        sending.join(30)
    assert sent_bytes < 2**25


def test_a_message_that_is_too_long_and_a_text_that_is_no_utf8_close_the_websocket(server, caplog):
    for message, code in (("x" * 200_000, 1009), (b"\xff\xfe", 1007)):
        with connect(server.ws) as line:
            line.send(message, text=True)
            with pytest.raises(ConnectionClosed) as closed:
                read(line)
            assert closed.value.rcvd.code == code
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_neither_texts_nor_keys_are_logged_at_any_level(synth, caplog):
    for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    with served(synth, api_key=KEY) as server:
        for body in ({}, {"speaker": "nobody"}, {"instruct": SECRET}, {"text": [SECRET]}):
            body = {**SHORT, "text": SECRET, **body}
            httpx.post(f"{server.url}/tts/stream", json=body, headers={"Authorization": f"Bearer {KEY}"})
        httpx.get(f"{server.url}/metrics?key={KEY}&text={SECRET}")
        with pytest.raises(InvalidStatus):
            connect(f"{server.ws}?key=wrong-key")
        with connect(f"{server.ws}?key={KEY}") as line:
            send(line, "start", **{**SHORT, "text": SECRET})
            while isinstance(message := read(line), bytes) or message["type"] != "finished":
                pass
    others = ("httpcore", "httpx", "websockets.client")
    ours = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith(others))
    assert "max_frames" in ours and not [word for word in (SECRET, KEY, "wrong-key") if word in ours]
