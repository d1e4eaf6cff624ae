"""POST /v1/audio/speech with OpenAI's own client."""

from __future__ import annotations

import openai
import pytest
import torch
from served import TEXT, first_speaker, served, until

from mktts.audio import to_pcm16
from mktts.model.voice import Voice
from mktts.synth import Synthesizer

KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def synthesizer(tiny):
    with Synthesizer.load(tiny, engine="single") as made:
        yield made


@pytest.fixture(scope="module")
def server(synthesizer):
    with served(synthesizer, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def test_pcm_streams_and_is_that_of_the_synthesizer(client, server, synthesizer, tiny):
    speaker = first_speaker(tiny)
    request = {"model": "tts-1", "voice": speaker, "input": TEXT, "response_format": "pcm"}
    extra = {"seed": 4, "max_frames": 40}
    with client.audio.speech.with_streaming_response.create(**request, extra_body=extra) as answer:
        pieces = answer.iter_bytes()
        content = next(pieces)
        assert answer.headers["X-Seed"] == "4"
        content += b"".join(pieces)
    assert content == to_pcm16(synthesizer.say(TEXT, speaker=speaker, **extra))


def test_a_client_that_stops_reading_and_leaves_ends_the_generation(client, server):
    request = {"model": "tts-1", "voice": "default", "input": TEXT, "extra_body": {"max_frames": 400}}
    with client.audio.speech.with_streaming_response.create(**request) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces).startswith(b"RIFF")
        assert server.studio.streams_open == 1
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")
    assert server.studio.find(answer.headers["X-Request-Id"]).finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": "mp3"}, "response_format"),
        ({"speed": 1.5}, "speed"),
        ({"voice": "alloy"}, "voice"),
        ({"input": " "}, "input"),
        ({"input": "x" * 5_001}, "input"),
        ({"stream_format": "sse"}, "stream_format"),
        ({"instructions": "softly"}, None),
    ],
    ids=str,
)
def test_what_is_not_supported_is_a_bad_request_in_openais_shape(client, change, param):
    request = {"model": "tts-1", "voice": "default", "input": "Hello.", "extra_body": {"max_frames": 1}, **change}
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(**request)
    assert refused.value.type == "invalid_request_error" and refused.value.param == param
    assert set(refused.value.body) == {"message", "type", "param", "code"}


def test_speed_1_and_a_voice_object_are_accepted(client, tiny):
    request = {"model": "tts-1", "input": "Hello.", "speed": 1, "extra_body": {"max_frames": 1, "seed": 1}}
    as_name = client.audio.speech.create(voice=first_speaker(tiny), **request).content
    assert client.audio.speech.create(voice={"id": first_speaker(tiny)}, **request).content == as_name


def test_a_wrong_key_is_an_authentication_error(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.audio.speech.create(model="tts-1", voice="default", input="Hello.")


def test_saved_voices_of_a_base_checkpoint_are_called_by_name(tiny_base):
    size = tiny_base.config.talker.hidden_size
    anna, ben = (
        Voice(embedding=torch.full((size,), value), codes=None, transcript=None, model_size=tiny_base.config.model_size)
        for value in (0.5, -0.5)
    )
    how = {"max_frames": 6, "seed": 1}
    with (
        Synthesizer.load(tiny_base, engine="single") as synthesizer,
        served(synthesizer, voices={"Anna": anna, "ben": ben}) as server,
    ):
        assert server.studio.health.speakers == ["anna", "ben"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for name, voice in (("default", anna), ("anna", anna), ("BEN", ben)):
                request = {"model": "x", "voice": name, "input": "Hello.", "response_format": "pcm", "extra_body": how}
                content = client.audio.speech.create(**request).content
                assert content == to_pcm16(synthesizer.say("Hello.", voice=voice, **how))


def test_a_voice_design_checkpoint_takes_instructions_and_the_default_voice(tiny_design):
    how = {"max_frames": 6, "seed": 1}
    with Synthesizer.load(tiny_design, engine="single") as synthesizer, served(synthesizer) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": "x", "voice": "default", "input": "Hello.", "response_format": "pcm"}
            content = client.audio.speech.create(**request, instructions="An old sailor.", extra_body=how).content
        assert content == to_pcm16(synthesizer.say("Hello.", instruct="An old sailor.", **how))
