"""/tts/stream, its record, probes and metrics; what is refused, and in which shape; who may use it. In process."""

import gc
import subprocess
import sys
import weakref
from dataclasses import asdict

import httpx
import pytest
from fastapi import WebSocketDisconnect
from prometheus_client.parser import text_string_to_metric_families
from served import served

from mktts.audio import to_pcm16
from mktts.errors import BusyError, CapacityError, OptionsError, PromptError, ServerError
from mktts.server.service import KEPT_WORDS
from mktts.server.settings import Limits, checked_hosts, checked_origins, read_keys
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ


def test_pcm_is_that_of_the_stream_and_the_record_says_how_it_ended(api, tiny):
    words = {"Hello": "Hullo there"}
    asked = {"seed": 3, "max_frames": 9, "speaker": tiny.config.default_speaker.upper(), "pronunciations": words}
    answer = api.tts(**asked, trim_lead=True)
    assert answer.status_code == 200 and answer.content == to_pcm16(api.said(3, 9, pronunciations=words))
    assert answer.headers["Content-Type"].startswith("audio/pcm") and answer.headers["X-Seed"] == "3"
    assert int(answer.headers["X-Sample-Rate-Hz"]) == SAMPLE_RATE_HZ and answer.headers["X-Random-Weights"] == "true"
    settings = api.synth.streams[0].settings
    assert (settings["speaker"], settings["language"]) == (tiny.config.default_speaker, "auto")
    assert (settings["layout"], settings["instruct"], settings["voice"]) == (None, None, None)
    assert settings["options"].trim_lead and settings["sampling"] is None  # the checkpoint's
    found = api.get(f"/tts/stream/{answer.headers['X-Request-Id']}").json()
    assert (found["state"], found["finish_reason"], found["frames"], found["seed"]) == ("ended", "max_frames", 9, 3)
    assert found["audio_s"] == pytest.approx(9 / FRAME_RATE_HZ) and found["error"] is None
    assert found["first_audio_ms"] >= 0


def test_a_request_that_names_no_length_gets_the_limit(make_api):
    api = make_api(limits=Limits(max_duration_s=3 / FRAME_RATE_HZ))
    assert len(api.tts(max_frames=None).content) == 3 * 3_840
    assert len(api.speech(max_frames=None, max_new_tokens=10**9).content) == 3 * 3_840


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": None}, 422, "invalid_value"),
        ({"text": " \u200b\n"}, 422, "bad_text"),
        ({"text": "x" * 5_001}, 422, "text_too_long"),
        ({"instruct": "y" * 5_001}, 422, "instruct_too_long"),
        ({"max_frames": 10_000}, 422, "duration_too_long"),
        ({"speaker": "nobody"}, 422, "unknown_speaker"),
        ({"language": "klingon"}, 422, "bad_prompt"),
        ({"instruct": "softly"}, 422, "bad_prompt"),
        ({"sped": 2}, 422, "invalid_value"),
        ({"pronunciations": {str(n): "x" for n in range(1_001)}}, 422, "invalid_value"),
        ({"temperature": 0}, 422, "bad_sampling"),
        ({"text": "x" * 200_000}, 413, "body_too_large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_are_refused_in_one_shape_and_open_nothing(api, body, status, code):
    answer = api.tts(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert error["request_id"] == answer.headers["X-Request-Id"] and api.synth.streams == []


@pytest.mark.parametrize("path", ["/tts/stream", "/v1/audio/speech"])
def test_bodies_that_are_not_json_of_the_right_shape_or_not_said_to_be_json_are_the_callers_mistake(api, path):
    for content in (b"", b"{", b"\xff", b'{"text": NaN}', b'{"text": "\\ud800"}', b"[" * 60_000, b"9" * 6_000, b"null"):
        answer = api.post(path, content=content, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert answer.status_code in (400, 422) and error["type"] == "invalid_request_error", content[:20]
        assert content != b"{" or ("at character" in error["message"] and error["param"] is None)
    for kind in (None, "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        head = {} if kind is None else {"Content-Type": kind}
        answer = api.post(path, content=b'{"input": "Hello.", "text": "Hello."}', headers=head)
        assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]


def test_what_the_model_refuses_is_the_callers_mistake(api):
    for kind, code in ((CapacityError, "text_too_long"), (PromptError, "bad_prompt"), (OptionsError, "bad_option")):
        api.synth.error_at = (1, kind("of 9 pages"))
        for answer, status, text in ((api.tts(), 422, "text"), (api.speech(), 400, "input")):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code) and error["param"] in (text, None)


def test_a_stream_that_finds_no_place_is_told_to_come_back(api, caplog):
    caplog.set_level("INFO", "mktts.server")
    busy = BusyError("refused with 2 streams open")
    busy.capacity = 2
    api.synth.error_at = (1, busy)
    for answer in (api.tts(), api.speech()):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (429, "busy", "rate_limit_error")
        assert error["streams_max"] == 2 and int(answer.headers["Retry-After"]) >= 1
    with api.open_socket() as socket:
        socket.send_json({"type": "start", "text": "Hello."})
        refused = socket.receive_json()
        assert (refused["type"], refused["error"]["code"], refused["retry_after_s"]) == ("error", "busy", 1)
        for message in ({"type": "start"}, {"type": "text", "text": "Hello."}, {"type": "finish"}):
            socket.send_json(message)
        assert [socket.receive_json()["type"] for _ in range(2)] == ["started", "finished"]
    assert 'mktts_refused_total{code="busy"} 4.0' in api.get("/metrics").text
    assert sum("busy: refused with 2 streams open" in line for line in caplog.messages) == 4


def test_a_failure_is_a_500_before_the_first_byte_and_a_broken_body_after_it(make_api, caplog):
    synth = make_api().synth
    with served(synth, Limits()) as server, httpx.Client(base_url=server.url) as client:
        body = {"text": "Hello.", "max_frames": 60}
        synth.error_at = (1, RuntimeError("gone: Hello."))
        answer = client.post("/tts/stream", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert "Hello." not in answer.text
        synth.error_at = (3, RuntimeError("gone"))
        for _ in range(2):
            with client.stream("POST", "/tts/stream", json=body) as answer, pytest.raises(httpx.RemoteProtocolError):
                assert answer.status_code == 200 and answer.read()
        assert client.get("/health").json()["status"] == "failing" and client.get("/ready").status_code == 503
        synth.error_at = None
        assert client.post("/tts/stream", json=body).status_code == 200
        assert client.get("/health").json()["status"] == "ok"
    assert {record.name for record in caplog.records if record.levelname == "ERROR"} == {"mktts.server.service"}


def test_of_streams_that_are_over_the_records_of_the_last_ones_are_kept_and_the_words_of_fewer(make_api):
    api = make_api(limits=Limits(kept_states=KEPT_WORDS + 1))

    def words(id: str) -> list | None:
        return api.get(f"/tts/stream/{id}").json()["words"]

    ids = [api.tts(word_timestamps=n < 2).headers["X-Request-Id"] for n in range(KEPT_WORDS + 1)]
    assert words(ids[0]) is words(ids[2]) is None and words(ids[1]) == [*map(asdict, api.synth.streams[1].words)] != []
    ids += [api.tts().headers["X-Request-Id"] for _ in range(2)]
    assert [api.get(f"/tts/stream/{id}").status_code for id in ids[:3]] == [404, 404, 200] and words(ids[2]) is None
    over = [weakref.ref(stream) for stream in api.synth.streams]
    api.synth.streams.clear()
    gc.collect()
    assert not [one for one in over if one() is not None]


def test_probes_and_methods(api):
    for path in ("/", "/health", "/ready", "/ping", "/v1/health"):
        probe = api.head(path)
        assert (api.get(path).status_code, probe.status_code, probe.content) == (200, 200, b"")
    assert api.get("/ready").json() == {"ready": True}
    assert api.put("/v1/audio/voices").json()["error"]["code"] == "method_not_allowed"
    assert api.get("/none").json()["error"]["code"] == "not_found"


def test_every_answer_has_an_id_and_a_failure_is_found_in_the_log_by_it(api, monkeypatch, caplog):
    monkeypatch.setattr(type(api.service), "health", property(lambda self: 1 / 0))
    answer = api.get("/health")
    assert answer.status_code == 500 and answer.json()["error"]["request_id"] == answer.headers["X-Request-Id"]
    assert answer.headers["X-Request-Id"] in caplog.text


def test_prometheus_reads_the_metrics_and_they_count_what_happened(make_api):
    api = make_api()
    api.tts(max_frames=5)
    api.tts(speaker="nobody")
    page = api.get("/metrics").text
    assert "mktts_tick_seconds" in [family.name for family in text_string_to_metric_families(page)]
    for line in (
        'mktts_streams_total{reason="max_frames",route="tts_stream"} 1.0',
        'mktts_refused_total{code="unknown_speaker"} 1.0',
        f"mktts_audio_seconds_total {5 / FRAME_RATE_HZ}",
        'mktts_first_audio_seconds_count{route="tts_stream"} 1.0',
        'mktts_first_byte_seconds_count{route="tts_stream"} 1.0',
        "mktts_streams_open 0.0",
        "\nmktts_underruns_total ",
        'mktts_lanes{engine="single"} 1024.0',
        'mktts_lanes_used{engine="single"} ',
        "mktts_capacity 1024.0",
    ):
        assert line in page, line


def test_answers_to_generated_requests_are_the_documented_ones(synth, tmp_path):
    """All of schemathesis's checks but one: that every value of the schema is accepted. A schema cannot say that a
    text must hold something visible, so the document promises a refusal for one that does not."""
    with served(synth, Limits(max_duration_s=1 / FRAME_RATE_HZ, max_chars=200), api_key="a-key") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--header", "Authorization: Bearer a-key", "--exclude-checks", "positive_data_acceptance"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
        command += ["--generation-database", "none", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        page = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer a-key"}).text
        assert 'mktts_streams_total{reason="max_frames",route="tts_stream"}' in page, "nothing was spoken: " + page
        assert server.service.streams_open == 0 and server.service.health.status == "ok"


# ---- access: keys, owners, web pages, names of hosts

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
