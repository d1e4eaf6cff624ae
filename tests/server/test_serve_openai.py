"""POST /v1/audio/speech with OpenAI's own client; what it gets is decoded by FFmpeg and by the standard library."""

from __future__ import annotations

import base64
import io
import json
import wave

import httpx
import numpy as np
import openai
import pytest
import torch
from absent import needs
from served import TEXT, first_speaker, served, until
from sounds import decoded

from mktts.audio import to_pcm16
from mktts.model.voice import Voice
from mktts.server.voices import OPENAI_VOICES
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

KEY = "a-key-of-the-tests"
FRAMES = 12
SPOKEN = {"model": "tts-1", "voice": "default", "input": "Hello."}
HOW = {"seed": 1, "max_frames": FRAMES}


@pytest.fixture(scope="module")
def server(synthesizer):
    with served(synthesizer, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def post(server, **body) -> httpx.Response:
    head = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, headers=head, timeout=60)


@pytest.fixture(scope="module")
def hello(synthesizer, tiny) -> bytes:
    return to_pcm16(synthesizer.say("Hello.", speaker=first_speaker(tiny), **HOW))


def test_pcm_streams_and_is_that_of_the_synthesizer(client, synthesizer, tiny):
    speaker = first_speaker(tiny)
    request = {"model": "tts-1", "voice": speaker, "input": TEXT, "response_format": "pcm"}
    extra = {"seed": 4, "max_frames": 40}
    with client.audio.speech.with_streaming_response.create(**request, extra_body=extra) as answer:
        pieces = answer.iter_bytes()
        content = next(pieces)
        assert answer.headers["X-Seed"] == "4" and answer.headers["x-sample-rate"] == str(SAMPLE_RATE_HZ)
        content += b"".join(pieces)
    assert content == to_pcm16(synthesizer.say(TEXT, speaker=speaker, **extra))


@needs("av")
@pytest.mark.parametrize(
    ("format", "media_type", "codec", "padding_s"),
    [
        (None, "audio/mpeg", "mp3", 0.1),  # the default
        ("mp3", "audio/mpeg", "mp3", 0.1),
        ("opus", "audio/ogg; codecs=opus", "opus", 0.001),
        ("aac", "audio/aac", "aac", 0.1),
        ("flac", "audio/flac", "flac", 0.0),
        ("wav", "audio/wav", "pcm_s16le", 0.0),
    ],
)
def test_every_format_is_heard_by_another_decoder_and_lasts_as_long_as_the_speech(
    client, hello, format, media_type, codec, padding_s
):
    request = {**SPOKEN, "extra_body": HOW} | ({} if format is None else {"response_format": format})
    answer = client.audio.speech.create(**request)
    assert answer.response.headers["Content-Type"] == media_type and "Content-Length" not in answer.response.headers
    name, pcm, rate_hz = decoded(answer.content)
    assert name.startswith(codec)
    duration_s = FRAMES / FRAME_RATE_HZ
    assert duration_s <= len(pcm) / rate_hz + 1e-3 and len(pcm) / rate_hz <= duration_s + padding_s + 1e-3
    if codec in ("flac", "pcm_s16le"):
        assert to_pcm16(pcm * np.float32(2**15 / (2**15 - 1))) == hello


@needs("av")
@pytest.mark.parametrize("format", ["mp3", "opus", "wav", "pcm"])
def test_sound_is_sent_before_the_speech_is_made(client, server, format):
    request = {**SPOKEN, "input": TEXT, "response_format": format, "extra_body": {"max_frames": 400}}
    with client.audio.speech.with_streaming_response.create(**request) as answer:
        pieces = answer.iter_bytes()  # kept: httpx closes the connection of an iterator that is dropped
        assert next(pieces)
        assert server.studio.streams_open == 1
        assert server.studio.find(answer.headers["X-Request-Id"]).frames < 400
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")
    assert server.studio.find(answer.headers["X-Request-Id"]).finish_reason == "cancelled"


@needs("av")
@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_speed_changes_how_long_it_takes(client, speed):
    answer = client.audio.speech.create(**SPOKEN, response_format="flac", speed=speed, extra_body=HOW)
    _, pcm, rate_hz = decoded(answer.content)
    assert len(pcm) / rate_hz == pytest.approx(FRAMES / FRAME_RATE_HZ / speed, abs=1e-3)


@needs("av")
def test_another_sample_rate(client):
    answer = client.audio.speech.create(**SPOKEN, response_format="wav", extra_body={**HOW, "sample_rate": 16_000})
    _, pcm, rate_hz = decoded(answer.content)
    assert (rate_hz, answer.response.headers["X-Sample-Rate"]) == (16_000, "16000")
    assert len(pcm) / rate_hz == pytest.approx(FRAMES / FRAME_RATE_HZ, abs=0.01)


@pytest.mark.parametrize("format", ["wav", "mp3", "pcm"])
def test_what_is_not_streamed_says_how_long_it_is(server, hello, format):
    answer = post(server, input="Hello.", response_format=format, stream=False, **HOW)
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    if format == "wav":
        with wave.open(io.BytesIO(answer.content)) as file:
            assert file.getnframes() == len(hello) // 2 and file.readframes(file.getnframes()) == hello
    if format == "pcm":
        assert answer.content == hello


@needs("av")
@pytest.mark.parametrize("format", ["mp3", "pcm"])
def test_events_carry_the_sound_and_end_with_the_usage(server, tiny, hello, format):
    answer = post(server, input="Hello.", response_format=format, stream_format="sse", **HOW)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and len(deltas) > 1
    content = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    if format == "pcm":
        assert content == hello
    else:
        _, pcm, rate_hz = decoded(content)
        assert len(pcm) / rate_hz == pytest.approx(FRAMES / FRAME_RATE_HZ, abs=0.1)
    tokens = len(tiny.tokenizer().encode("Hello."))
    usage = {"input_tokens": tokens, "output_tokens": FRAMES, "total_tokens": tokens + FRAMES}
    assert done == {"type": "speech.audio.done", "usage": usage}


@needs("av")
def test_openais_client_reads_the_events(client):
    stream = client.post(
        "/audio/speech",
        body={**SPOKEN, "stream_format": "sse", "response_format": "pcm", **HOW},
        cast_to=object,
        stream=True,
        stream_cls=openai.Stream[dict],
    )
    assert [event["type"] for event in stream][-1] == "speech.audio.done"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": "ogg"}, "response_format"),
        ({"speed": 4.5}, "speed"),
        ({"voice": "nobody"}, "voice"),
        ({"input": " "}, "input"),
        ({"input": "x" * 5_001}, "input"),
        ({"stream_format": "websocket"}, "stream_format"),
        ({"instructions": "softly"}, "instructions"),
        ({"extra_body": {"language": "klingon"}}, "language"),
        ({"extra_body": {"task_type": "Base"}}, "task_type"),
        ({"extra_body": {"ref_audio": "UklGR" * 100}}, "ref_audio"),
        ({"extra_body": {"temprature": 0.5}}, "temprature"),
        ({"extra_body": {"sample_rate": 11_000}}, None),
        ({"extra_body": {"temperature": 100}}, "temperature"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_a_bad_request_that_names_the_callers_key(client, change, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(**{**SPOKEN, "extra_body": {"max_frames": 1}, **change})
    assert refused.value.type == "invalid_request_error" and refused.value.param == param
    assert set(refused.value.body) == {"message", "type", "param", "code", "request_id"}
    message = refused.value.body["message"]
    assert (param or "sample_rate") in message or param == "input"  # whose messages speak of the text
    assert "speaker" not in message


def test_keys_that_change_nothing_are_ignored_and_named_once(server, hello, caplog):
    caplog.set_level("INFO")
    harmless = {"user": "anna", "pitch": 0, "word_timestamps": False, "initial_codec_chunk_frames": 1, "x" * 41: "y"}
    for _ in range(2):
        answer = post(server, input="Hello.", response_format="pcm", stream=True, **harmless, **HOW)
        assert answer.content == hello
        assert answer.headers["X-Ignored-Keys"] == "initial_codec_chunk_frames,pitch,user,word_timestamps"
    assert caplog.text.count("the key user") == 1 and "anna" not in caplog.text and "x" * 41 not in caplog.text


def test_nulls_are_as_keys_left_out_and_neither_model_nor_voice_is_needed(server, hello):
    names = ("model", "voice", "instructions", "speed", "stream_format", "stream", "language", "task_type", "ref_audio")
    names += ("ref_text", "x_vector_only_mode", "temperature", "top_k", "max_new_tokens", "sample_rate", "references")
    nulls = dict.fromkeys(names)
    assert post(server, input="Hello.", response_format="pcm", **nulls, **HOW).content == hello
    assert post(server, input="Hello.", response_format=None, **nulls, **HOW).headers["Content-Type"] == "audio/mpeg"


@pytest.mark.parametrize("language", ["english", "English", "en", "en-US", "en_gb"])
def test_a_language_goes_by_its_name_and_its_code(server, synthesizer, tiny, language):
    expected = synthesizer.say("Hello.", speaker=first_speaker(tiny), language="english", **HOW)
    answer = post(server, input="Hello.", response_format="pcm", language=language, **HOW)
    assert answer.content == to_pcm16(expected)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"max_new_tokens": 5}, {"max_frames": 5}),
        ({"max_new_tokens": 10**9, "max_frames": 5}, {"max_frames": 5}),
        ({"max_frames": 5, "non_streaming_mode": False}, {"max_frames": 5, "layout": "streaming"}),
        ({"max_frames": 5, "non_streaming_mode": True}, {"max_frames": 5, "layout": "whole"}),
        ({"max_frames": 5, "temperature": 0}, {"max_frames": 5, "sampling": "greedy"}),
        ({"max_frames": 5, "do_sample": False}, {"max_frames": 5, "sampling": "greedy"}),
        ({"max_frames": 5, "do_sample": True, "subtalker_dosample": None}, {"max_frames": 5}),
        ({"max_frames": 5, "subtalker_temperature": 0.3}, {"max_frames": 5, "sampling": "subtalker"}),
        ({"max_frames": 5, "task_type": "CustomVoice", "top_k": -1}, {"max_frames": 5, "sampling": "top_k"}),
    ],
    ids=str,
)
def test_keys_of_other_servers_mean_the_same_here(server, synthesizer, tiny, keys, settings):
    sampling = synthesizer.sampling
    made = {"greedy": sampling.greedy(), "top_k": sampling.with_flat({"top_k": 0})}
    made["subtalker"] = sampling.with_flat({"predictor_temperature": 0.3})
    settings = settings | ({"sampling": made[settings["sampling"]]} if "sampling" in settings else {})
    answer = post(server, input="Hello.", response_format="pcm", seed=3, **keys)
    assert answer.content == to_pcm16(synthesizer.say("Hello.", speaker=first_speaker(tiny), seed=3, **settings))


def test_openais_voices_are_speakers_and_so_is_a_voice_object(server, client, synthesizer, tiny):
    request = {**SPOKEN, "response_format": "pcm", "extra_body": HOW}
    spoken = {}
    for alias in OPENAI_VOICES:
        speaker = server.studio.aliases[alias]
        if speaker not in spoken:
            spoken[speaker] = to_pcm16(synthesizer.say("Hello.", speaker=speaker, **HOW))
        assert client.audio.speech.create(**{**request, "voice": alias}).content == spoken[speaker], alias
    speaker = first_speaker(tiny)
    assert client.audio.speech.create(**{**request, "voice": {"id": speaker}}).content == spoken[speaker]
    assert post(server, input="Hello.", speaker=speaker, response_format="pcm", **HOW).content == spoken[speaker]


def test_models_and_voices_are_listed(server, client):
    (model,) = client.models.list().data
    assert model.id == server.studio.model.checkpoint and client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    found = httpx.get(f"{server.url}/v1/audio/voices", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert found["voices"] == server.studio.health.speakers and set(OPENAI_VOICES) <= set(found["aliases"])
    assert httpx.get(f"{server.url}/v1/audio/voices").status_code == 401


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["/v1/audio/speech", "/tts/stream"])
def test_a_body_that_is_not_said_to_be_json_is_told_the_header(server, kind, path):
    head = {"Authorization": f"Bearer {KEY}"} | ({} if kind is None else {"Content-Type": kind})
    answer = httpx.post(f"{server.url}{path}", content=b'{"input": "Hello.", "text": "Hello."}', headers=head)
    assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]


def test_broken_json_is_told_its_place_and_no_key(server):
    head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/audio/speech", content=b'{"input"', headers=head)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
    assert "at character 8" in error["message"]


def test_probes(server):
    for path in ("/", "/health", "/ready"):
        assert httpx.get(f"{server.url}{path}").status_code == 200
        probe = httpx.head(f"{server.url}{path}")
        assert (probe.status_code, probe.content) == (200, b"")
    assert httpx.get(f"{server.url}/ready").json() == {"ready": True}


def test_a_wrong_key_is_an_authentication_error(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.audio.speech.create(**SPOKEN)


def test_a_failure_after_the_first_event_is_raised_by_openais_client(synthesizer, monkeypatch):
    with served(synthesizer) as server:
        decode, calls = synthesizer._models.any().codec.decode, []

        def broken(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("the device is gone")
            return decode(*arguments)

        monkeypatch.setattr(synthesizer._models.any().codec, "decode", broken)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            body = {**SPOKEN, "input": TEXT, "stream_format": "sse", "response_format": "pcm", "max_frames": 100}
            stream = client.post(
                "/audio/speech", body=body, cast_to=object, stream=True, stream_cls=openai.Stream[dict]
            )
            with pytest.raises(openai.APIError, match="the generation failed"):
                list(stream)


def test_saved_voices_of_a_base_checkpoint_are_called_by_name(tiny_base):
    size = tiny_base.config.talker.hidden_size
    anna, ben = (
        Voice(embedding=torch.full((size,), value), codes=None, transcript=None, model_size=tiny_base.config.model_size)
        for value in (0.5, -0.5)
    )
    how = {"max_frames": 6, "seed": 1}
    with (
        Synthesizer.load(tiny_base, engine="single") as synthesizer,
        served(synthesizer, voices={"Anna": anna, "ben": ben}, aliases={"Alloy": "BEN"}) as server,
    ):
        assert server.studio.health.speakers == ["anna", "ben"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for name, voice in (("default", anna), ("anna", anna), ("BEN", ben), ("alloy", ben)):
                request = {"model": "x", "voice": name, "input": "Hello.", "response_format": "pcm", "extra_body": how}
                content = client.audio.speech.create(**request).content
                assert content == to_pcm16(synthesizer.say("Hello.", voice=voice, **how))


def test_a_voice_design_checkpoint_takes_instructions_and_any_of_openais_voices(tiny_design):
    how = {"max_frames": 6, "seed": 1}
    with Synthesizer.load(tiny_design, engine="single") as synthesizer, served(synthesizer) as server:
        expected = to_pcm16(synthesizer.say("Hello.", instruct="An old sailor.", **how))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for voice in ("default", "alloy"):
                request = {"model": "x", "voice": voice, "input": "Hello.", "response_format": "pcm"}
                answer = client.audio.speech.create(**request, instructions="An old sailor.", extra_body=how)
                assert answer.content == expected
