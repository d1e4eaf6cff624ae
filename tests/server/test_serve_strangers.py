"""A server among strangers: names, keys of browsers, ids of requests, half-sent requests, and what the log says."""

from __future__ import annotations

import base64
import json
import logging
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from served import Served, first_speaker, served
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mktts.errors import ServerError
from mktts.server import Limits, checked_hosts, checked_origins, read_keys
from mktts.server.address import is_local_page, is_own_name
from mktts.server.gate import owner_of

KEY, OTHER = "a/key=of the+tests".replace(" ", "-"), "another-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
SECRET = "Secretword."


@pytest.fixture(scope="module")
def locked(synthesizer):
    with served(synthesizer, api_key=[KEY, OTHER]) as running:
        yield running


@pytest.fixture(scope="module")
def unlocked(synthesizer):
    with served(synthesizer, hosts=["tts.example"]) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(synthesizer):
    with served(synthesizer, Limits(head_s=0.3, body_s=0.3, max_body_bytes=4_096)) as running:
        yield running


def ask(server: Served, request: bytes) -> tuple[bytes, float]:
    """What comes back for bytes that are sent as they are, and after how many seconds the server hung up."""
    where = urlsplit(server.url)
    begun_s = time.monotonic()
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(request)
        content = b""
        while piece := connection.recv(65_536):
            content += piece
    return content, time.monotonic() - begun_s


# ---- names


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("app.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.0.2.7", True),
        ("TTS.example:443", True),
        ("tts.example.", True),
        ("bot.example", False),
        ("localhost.bot.example", False),
        ("127.0.0.1.bot.example", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_a_server_is_called_by_numbers_localhost_and_its_names(host, own):
    assert is_own_name(host, {"tts.example"}) is own


def test_a_foreign_host_is_refused_where_there_is_no_key(unlocked, locked):
    for path in ("/health", "/metrics", "/openapi.json", "/", "/tts/stream/some"):
        answer = httpx.get(unlocked.url + path, headers={"Host": "bot.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host"), path
        assert httpx.get(unlocked.url + path, headers={"Host": "tts.example"}).status_code != 403
    head = b"GET /tts/ws HTTP/1.1\r\nHost: bot.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    assert ask(unlocked, head)[0].startswith(b"HTTP/1.1 403")
    assert httpx.get(f"{locked.url}/health", headers={"Host": "bot.example"}).status_code == 200  # a key guards it


@pytest.mark.parametrize(
    ("word", "origin"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTP://LocalHost:3000", "http://localhost:3000"),
        ("https://app.example:443", "https://app.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
    ],
)
def test_origins_are_taken_as_browsers_write_them(word, origin):
    assert checked_origins([word]) == (origin,)


@pytest.mark.parametrize(
    "word", ["", "*", "null", "https://*.example", "ftp://app.example", "http://a:b", "//a", "http://u@a"]
)
def test_what_no_origin_can_equal_is_refused(word):
    with pytest.raises(ServerError, match="--allow-origin"):
        checked_origins([word])


def test_host_names_are_checked():
    assert checked_hosts(["TTS.example", "my_box"]) == {"tts.example", "my_box"}
    for word in ("", "tts.example:80", "a b", "*"):
        with pytest.raises(ServerError, match="--allow-host"):
            checked_hosts([word])


def test_pages_of_this_machine_are_those_a_browser_loaded_from_it():
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:8000", "http://app.localhost"):
        assert is_local_page(origin)
    for origin in (
        "null",
        "http://localhost.bot.example",
        "file://",
        "http://127.0.0.1.bot.example",
        "http://bot.example",
    ):
        assert not is_local_page(origin)


# ---- keys


def test_a_file_holds_a_key_a_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n {OTHER} \n{KEY}\n")
    assert read_keys(file) == (KEY, OTHER)
    assert owner_of(KEY) != owner_of(OTHER) and KEY not in owner_of(KEY)


def encoded(key: str) -> str:
    return "mktts.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("query", "offered", "chosen"),
    [
        ("?key=a%2Fkey%3Dof-the%2Btests", None, None),
        ("?x=1&key=another-key", None, None),
        ("", ["mktts", encoded(KEY)], "mktts"),
        ("", [encoded(OTHER), "mktts"], "mktts"),
        ("", [encoded(OTHER)], encoded(OTHER)),
        ("", ["realtime", f"openai-insecure-api-key.{OTHER}"], "realtime"),
    ],
    ids=["query", "second key", "protocol", "other order", "alone", "OpenAI's"],
)
def test_a_browser_may_send_its_key_with_a_websocket_in_two_ways(locked, query, offered, chosen):
    with connect(locked.ws + query, subprotocols=offered) as connection:
        assert connection.subprotocol == chosen
        connection.send(json.dumps({"type": "start", "text": "Hi.", "max_frames": 1}))
        assert json.loads(connection.recv(timeout=60))["type"] == "started"


@pytest.mark.parametrize(
    ("query", "offered"),
    [("?key=wrong", None), ("", ["mktts", encoded("wrong")]), ("", ["mktts", "mktts.key.!"]), ("", ["mktts"])],
)
def test_a_wrong_key_opens_no_websocket(locked, query, offered):
    with pytest.raises(InvalidStatus) as refused:
        connect(locked.ws + query, subprotocols=offered)
    assert refused.value.response.status_code == 401


def test_a_key_in_the_address_of_a_plain_request_is_none(locked):
    assert httpx.get(f"{locked.url}/metrics?key={OTHER}").status_code == 401


# ---- ids and the log


def test_every_answer_has_an_id_and_every_error_repeats_it(locked):
    seen = set()
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/none", None),
        ("PUT", "/health", None),
        ("GET", "/v1/models/none", None),
        ("POST", "/v1/audio/speech", {"input": "x", "voice": "nobody"}),
        ("POST", "/tts/stream", {"text": ""}),
        ("POST", "/tts/stream", {"text": "x" * 300_000}),
    ):
        answer = httpx.request(method, locked.url + path, json=body, headers=BEARER)
        seen.add(answer.headers["X-Request-Id"])
        if answer.status_code >= 400:
            assert answer.json()["error"]["request_id"] == answer.headers["X-Request-Id"], path
    refused = httpx.get(f"{locked.url}/metrics")
    assert refused.json()["error"]["request_id"] == refused.headers["X-Request-Id"]
    assert len(seen) == 7
    content, _ = ask(locked, b"NONSENSE\r\n\r\n")
    head, _, body = content.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["request_id"].encode() in head


def test_the_id_of_a_request_is_that_of_its_stream(locked):
    body = {"text": "Hi.", "max_frames": 1}
    answer = httpx.post(f"{locked.url}/tts/stream", json=body, headers=BEARER)
    id = answer.headers["X-Request-Id"]
    assert httpx.get(f"{locked.url}/tts/stream/{id}", headers=BEARER).json()["frames"] == 1


def test_a_failure_is_found_in_the_log_by_its_id(synthesizer, monkeypatch, caplog):
    with served(synthesizer) as server:
        monkeypatch.setattr(type(server.studio), "health", property(lambda self: 1 / 0))
        answer = httpx.get(f"{server.url}/health")
    assert answer.status_code == 500
    assert answer.json()["error"]["request_id"] == answer.headers["X-Request-Id"]
    assert answer.headers["X-Request-Id"] in caplog.text


def test_a_websockets_errors_have_ids_too(locked):
    with connect(f"{locked.ws}?key={OTHER}") as connection:
        opened = connection.response.headers["X-Request-Id"]
        connection.send(json.dumps({"type": "start", "speaker": "nobody"}))
        assert json.loads(connection.recv(timeout=60))["error"]["request_id"] == opened


def test_neither_texts_nor_keys_are_logged_at_any_level(locked, tiny, caplog):
    caplog.set_level(logging.DEBUG)
    for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    voice = first_speaker(tiny)
    speech = f"{locked.url}/v1/audio/speech"
    for body in (
        {"input": SECRET, "voice": voice, "max_frames": 1},
        {"input": SECRET, "voice": "nobody"},
        {"input": [SECRET]},
    ):
        httpx.post(speech, json={**body, "response_format": "pcm"}, headers=BEARER)
    httpx.get(f"{locked.url}/metrics?key={OTHER}&text={SECRET}")
    for query in (f"?key={OTHER}", "?key=wrong-key"):
        try:
            with connect(
                locked.ws + query, subprotocols=["mktts", encoded(KEY)] if "wrong" not in query else None
            ) as one:
                one.send(json.dumps({"type": "start", "max_frames": 1, "instruct": SECRET}))
                one.recv(timeout=60)
                one.send(json.dumps({"type": "start", "max_frames": 1, "text": SECRET}))
                while json.loads(one.recv(timeout=60))["type"] != "chunk":
                    pass
        except InvalidStatus:
            pass
    ours = "\n".join(
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith(("httpcore", "httpx", "websockets.client"))
    )
    for secret in ("Secretword", KEY, OTHER, encoded(KEY), "wrong-key"):
        assert secret not in ours
    assert "max_frames" in ours


@pytest.mark.parametrize("path", ["/none", "/v1/audio/none", "/"])
def test_an_unknown_websocket_is_404_and_no_error_of_the_server(unlocked, caplog, path):
    with pytest.raises(InvalidStatus) as refused:
        connect(unlocked.url.replace("http", "ws", 1) + path)
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["error"]["code"] == "not_found"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_text_that_is_no_utf8_closes_the_websocket_and_is_no_error_of_the_server(unlocked, caplog):
    with connect(unlocked.ws) as connection:
        connection.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=60)
        assert closed.value.rcvd.code == 1007
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_other_names_of_health(locked):
    for path in ("/ping", "/v1/health"):
        assert httpx.get(locked.url + path).json()["status"] == "ok"
        assert httpx.head(locked.url + path).status_code == 200


# ---- half-sent requests


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_half_a_head_is_let_go(hasty, sent):
    content, seconds = ask(hasty, sent)
    assert content.startswith(b"HTTP/1.1 408") == (b"head_timeout" in content) == bool(sent)
    assert 0.2 < seconds < 9


def test_half_a_second_head_on_a_connection_is_let_go_too(hasty):
    content, seconds = ask(hasty, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\nGET /rea")
    assert content.startswith(b"HTTP/1.1 200") and 0.2 < seconds < 9


def test_half_a_body_is_let_go_with_a_reason(hasty):
    head = b"POST /tts/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    content, seconds = ask(hasty, head + b"Content-Length: 100\r\n\r\n{")
    assert content.startswith(b"HTTP/1.1 408") and b"body_timeout" in content and 0.2 < seconds < 9


def test_a_connection_that_waits_between_requests_and_a_websocket_are_not_half_a_head(hasty):
    with httpx.Client(base_url=hasty.url) as client:
        client.get("/ready")
        time.sleep(0.6)
        assert client.get("/ready").status_code == 200
    with connect(hasty.ws) as connection:
        time.sleep(0.6)
        connection.send(json.dumps({"type": "start", "text": "Hi.", "max_frames": 1}))
        assert json.loads(connection.recv(timeout=60))["type"] == "started"
