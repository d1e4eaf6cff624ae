"""Who may use a server: keys, owners, web pages, names of hosts; in process."""

import pytest
from fastapi import WebSocketDisconnect

from mktts.errors import ServerError
from mktts.server.settings import checked_hosts, checked_origins, read_keys

KEY, OTHER = "a/key=of-the+tests", "another-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
FOREIGN = "https://elsewhere.example"
READ = ("/v1/models", "/metrics", f"/metrics?key={OTHER}", "/none")


@pytest.fixture(scope="module")
def locked(make_api, tmp_path_factory):
    file = tmp_path_factory.mktemp("access") / "keys"
    file.write_text(f"{KEY}\n\n {OTHER} \n{KEY}\n")
    return make_api(api_key=read_keys(file))


@pytest.fixture(scope="module")
def unlocked(make_api):
    return make_api(origins=["https://app.example"], hosts=["tts.example"])


def refused_socket(api, path: str = "/tts/ws", **settings) -> int:
    """The status that a WebSocket's handshake is refused with; its body is that of every error."""
    with pytest.raises(WebSocketDisconnect) as refused, api.open_socket(path, **settings):
        pass
    error = refused.value.json()["error"]
    assert error["request_id"] == refused.value.headers["X-Request-Id"]
    return refused.value.status_code


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": KEY}, {"Authorization": "Bearer another"}, {"Authorization": f"Bearer {KEY}x"}],
    ids=["none", "no scheme", "another", "longer"],
)
def test_without_the_key_nothing_but_health_is_answered(locked, headers):
    asked = ("/tts/stream", "/v1/audio/speech", "/v1/audio/voices")
    for method, path in (*(("POST", path) for path in asked), *(("GET", path) for path in (*asked, *READ))):
        answer = locked.request(method, path, headers=headers)
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
        assert answer.json()["error"]["request_id"] == answer.headers["X-Request-Id"]
    for address in ("/tts/ws", "/tts/ws?key=wrong"):
        assert refused_socket(locked, address, headers=headers) == 401
    for path in ("/", "/health", "/ready", "/docs", "/openapi.json", "/page/page.js"):
        assert locked.get(path, headers=headers).status_code == 200, path
    assert locked.synth.streams == []


def test_with_a_key_everything_is_answered_and_a_browser_may_send_it_in_the_address_of_a_websocket(locked):
    for query, headers in (("?key=a%2Fkey%3Dof-the%2Btests", {}), ("?x=1&key=another-key", {}), ("", BEARER)):
        with locked.open_socket(f"/tts/ws{query}", headers=headers):
            pass
    assert locked.post("/tts/stream", headers=BEARER, json={"text": "Hello.", "max_frames": 1}).status_code == 200
    assert locked.get("/metrics", headers={"Authorization": f"bearer  {OTHER}"}).status_code == 200
    assert locked.get("/health", headers={"Host": "bot.example"}).status_code == 200  # a key guards it
    assert "HTTPBearer" in locked.get("/openapi.json").json()["components"]["securitySchemes"]


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        *[(f"http://{host}", True) for host in ("localhost:8888", "app.localhost", "127.0.0.1:8888", "[::1]:8000")],
        *[(origin, True) for origin in ("https://127.0.0.1", "https://app.example")],
        *[(f"http://{host}.elsewhere.example", False) for host in ("localhost", "127.0.0.1")],
        *[(origin, False) for origin in (FOREIGN, "null", "file://")],
    ],
)
def test_pages_from_elsewhere_cannot_use_a_server_without_a_key(unlocked, origin, allowed):
    head = {"Origin": origin}
    answer = unlocked.post("/tts/stream", json={"text": "Hello.", "max_frames": 1}, headers=head)
    assert answer.status_code == (200 if allowed else 403)
    if allowed:
        with unlocked.open_socket(headers=head):
            pass
    else:
        assert answer.json()["error"]["code"] == "foreign_origin" and refused_socket(unlocked, headers=head) == 403


@pytest.mark.parametrize(
    ("host", "site", "allowed"),
    [
        *[("localhost:8000", site, True) for site in (None, "none", "same-origin", "same-site")],
        *[("localhost:8000", site, False) for site in ("cross-site", "", "odd")],
        ("tts.example", "same-origin", True),
        ("tts.example", "same-site", False),
    ],
)
def test_elements_of_pages_from_elsewhere_bring_no_origin_and_cannot_make_it_speak(unlocked, host, site, allowed):
    at = "/v1/audio/speech?input=Hello.&response_format=pcm&max_frames=1"
    head = {"Host": host} | ({} if site is None else {"Sec-Fetch-Site": site})
    assert unlocked.get(at, headers=head).status_code == (200 if allowed else 403)
    for origin, status in (("https://app.example", 200), (FOREIGN, 403)):
        assert unlocked.get(at, headers={**head, "Origin": origin}).status_code == status


def test_an_address_is_spoken_with_a_key_in_the_header_and_kept_for_its_owner_alone(locked):
    at = "/v1/audio/speech?input=Hello.&response_format=pcm&max_frames=1&stream=false"
    for query in ("", f"&key={KEY}", f"&api_key={KEY}"):
        assert locked.get(at + query).status_code == 401
    ids = [locked.get(at, headers={"Authorization": f"Bearer {key}"}).headers["X-Request-Id"] for key in (KEY, OTHER)]
    assert len(set(ids)) == 2 and locked.get(at, headers=BEARER).headers["X-Request-Id"] == ids[0]


def test_cors_answers_are_for_listed_pages_and_those_of_this_machine(unlocked, locked):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for api, origin, allowed in (
        (unlocked, "https://app.example", True),
        (locked, "http://localhost:3000", True),
        (unlocked, FOREIGN, False),
        (locked, "https://app.example", False),
    ):
        answer = api.options("/v1/audio/speech", headers={"Origin": origin, **ask})
        assert answer.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
    answer = unlocked.get("/health", headers={"Origin": "http://127.0.0.1:3000"})
    assert answer.headers["Access-Control-Allow-Origin"] == "http://127.0.0.1:3000"
    assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]


def test_a_foreign_host_is_refused_where_there_is_no_key(unlocked):
    for host in ("LOCALHOST:8000", "app.localhost", "127.0.0.1:8000", "[::1]:8000", "192.0.2.7", "TTS.example:443"):
        assert unlocked.get("/ready", headers={"Host": host}).status_code == 200, host
    for host in ("localhost.bot.example", "127.0.0.1.bot.example", "[::1", ""):
        assert unlocked.get("/ready", headers={"Host": host}).status_code == 403, host
    for path in ("/health", "/metrics", "/openapi.json", "/", "/tts/stream/some"):
        answer = unlocked.get(path, headers={"Host": "bot.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host"), path
        assert unlocked.get(path, headers={"Host": "tts.example"}).status_code != 403
    assert refused_socket(unlocked, headers={"Host": "bot.example"}) == 403
    for path in ("/none", "/v1/audio/speech/stream", "/"):
        assert refused_socket(unlocked, path) == 404


def test_origins_and_hosts_are_taken_as_browsers_write_them():
    for word, origin in (
        ("https://app.example", "https://app.example"),
        ("HTTP://LocalHost:3000", "http://localhost:3000"),
        ("https://app.example:443", "https://app.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://my-box_2.a--b.example:80", "http://my-box_2.a--b.example"),
    ):
        assert checked_origins([word]) == (origin,)
    with pytest.raises(ServerError, match="must be like https://app.example or http://localhost:3000, without a path"):
        checked_origins(["http://localhost:3000/"])
    names = "* null app.example https://*.example ftp://app.example http://a:b //a http://u@a http://a..b http://a-"
    numbers = "http://[::::] http://[1] http://[:] http://[127.0.0.1] http://x:080 http://x:65536"
    for word in ("", *names.split(), *numbers.split()):
        with pytest.raises(ServerError, match="--allow-origin"):
            checked_origins([word])
    assert checked_hosts(["TTS.example", "my_box", "::1"]) == {"tts.example", "my_box", "::1"}
    for word in ("", "tts.example:80", "a b", "*", "a..b"):
        with pytest.raises(ServerError, match="--allow-host"):
            checked_hosts([word])
