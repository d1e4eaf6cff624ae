"""/tts/stream, its record, probes and metrics; what is refused, and in which shape. In process."""

import gc
import subprocess
import sys
import weakref
from dataclasses import asdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import served

from mktts.audio import to_pcm16
from mktts.errors import BusyError, CapacityError, OptionsError, PromptError
from mktts.server.service import KEPT_WORDS
from mktts.server.settings import Limits
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
    assert answer.status_code == 500
    assert answer.json()["error"]["request_id"] == answer.headers["X-Request-Id"]
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
    limits = Limits(max_duration_s=1 / FRAME_RATE_HZ, max_chars=200)
    with served(synth, limits, api_key="a-key") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--header", "Authorization: Bearer a-key", "--exclude-checks", "positive_data_acceptance"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
        command += ["--generation-database", "none", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        page = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer a-key"}).text
        assert 'mktts_streams_total{reason="max_frames",route="tts_stream"}' in page, "nothing was spoken: " + page
        assert server.service.streams_open == 0 and server.service.health.status == "ok"
