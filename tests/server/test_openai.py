"""POST /v1/audio/speech and the routes beside it, with OpenAI's own client; sound is decoded by FFmpeg. In process."""

import base64
from dataclasses import asdict, replace

import httpx
import openai
import pytest
from absent import needs
from served import plain_voice
from sounds import decoded

from mktts.audio import to_pcm16
from mktts.audio.encoding import Encoder
from mktts.errors import ServerError
from mktts.server.openai_routes import KeptSounds
from mktts.server.schemas import DEFAULT
from mktts.server.voices import OPENAI_VOICES, voice_aliases
from mktts.spec import FRAME_RATE_HZ

FRAMES = 12
HOW = {"seed": 1, "max_frames": FRAMES}
SPOKEN = {"model": "tts-1", "voice": "default", "input": "Hello."}


def client(api) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(api.application, raise_app_exceptions=False))
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def sound(shared_api):
    return shared_api.said(1, FRAMES)


@needs("av")
@pytest.mark.parametrize(
    ("how", "media_type"),
    [
        ({}, "audio/mpeg"),
        ({"response_format": "opus", "sample_rate": 16_000}, "audio/ogg; codecs=opus"),
        ({"response_format": "aac"}, "audio/aac"),
        ({"response_format": "flac"}, "audio/flac"),
        ({"response_format": "wav", "speed": 0.25}, "audio/wav"),
        ({"response_format": "wav", "speed": 4.0}, "audio/wav"),
        ({"response_format": "pcm", "sample_rate": 16_000}, "audio/pcm;rate=16000;channels=1;format=s16le"),
        ({"response_format": "mulaw"}, "audio/PCMU;rate=8000"),
        ({"response_format": "alaw", "sample_rate": 8_000}, "audio/PCMA;rate=8000"),
    ],
    ids=str,
)
async def test_the_body_is_the_encoders_and_says_how_long_it_is_where_it_is_not_streamed(api, sound, how, media_type):
    """tests/audio/test_encoding.py hears what the encoder makes. An Ogg stream has a number that is drawn."""
    kind = how.get("response_format", "mp3")
    for whole in (False, True):
        encoder = Encoder(kind, speed=how.get("speed", 1.0), sample_rate_hz=how.get("sample_rate"), whole=whole)
        made = encoder.feed(sound) + encoder.finish()
        answer = await client(api).audio.speech.create(**SPOKEN, extra_body={**HOW, **how, "stream": not whole})
        head = answer.response.headers
        assert (head["Content-Type"], head["X-Sample-Rate"]) == (media_type, str(encoder.rate_hz))
        assert head.get("Content-Length") == (str(len(made)) if whole else None)
        assert answer.content == made or (kind == "opus" and len(answer.content) == len(made))


def address(**query) -> str:
    query = {"input": "Hello.", "response_format": "pcm", "max_frames": 2, **query}
    return f"/v1/audio/speech?{httpx.QueryParams(query)}"


@needs("av")
@pytest.mark.parametrize(
    "query",
    [
        {"voice": "alloy", "seed": 1, "max_frames": FRAMES, "pronunciations": '{"nginx": "engine X"}'},
        {"input": "5", "language": "English", "temperature": 0, "top_k": -1, "do_sample": "false"},
        {"response_format": "wav", "speed": 2, "sample_rate": 16_000, "stream": "true", "seed": 3},
        {"response_format": "mp3", "instructions": "true", "lang_code": "a", "x": "null", "seed": 3},
    ],
    ids=str,
)
def test_an_address_speaks_as_the_same_body_does(api, query):
    words = {"true": True, "false": False, "null": None, '{"nginx": "engine X"}': {"nginx": "engine X"}}
    body = {name: words.get(value, value) if name != "instructions" else value for name, value in query.items()}
    answer, posted = api.get(address(**query)), api.speech(**body)
    assert answer.status_code == 200 and answer.content == posted.content, answer.text
    assert "Content-Length" not in answer.headers and "Accept-Ranges" not in answer.headers
    for name in ("Content-Type", "X-Mktts-Ignored", "X-Sample-Rate"):
        assert answer.headers.get(name) == posted.headers.get(name)
    first, second = api.synth.streams
    assert all(first.settings[name] == second.settings[name] for name in ("text", "sampling", "pronunciations"))


def test_what_is_whole_behind_an_address_is_kept_and_given_in_parts(api, sound):
    at, hello = address(stream="false", **HOW), to_pcm16(sound)
    whole = api.get(at)
    assert (whole.content, whole.headers["Accept-Ranges"]) == (hello, "bytes")
    assert int(whole.headers["Content-Length"]) == len(hello)
    for asked, start, end in (("0-", 0, None), ("100-199", 100, 200), ("-50", -50, None), ("99-9999999", 99, None)):
        part = api.get(at, headers={"Range": f"bytes={asked}"})
        assert (part.status_code, part.content) == (206, hello[start:end])
        first, last = range(len(hello))[start:end][0], range(len(hello))[start:end][-1]
        assert part.headers["Content-Range"] == f"bytes {first}-{last}/{len(hello)}"
        assert int(part.headers["Content-Length"]) == len(part.content)
        assert part.headers["X-Request-Id"] == whole.headers["X-Request-Id"]
    for odd in ("bytes=5-2", "bytes=0-1,4-5", "bytes=-", "frames=0-1", "bytes=" + "9" * 5_000 + "-", "bytes=\xb2-"):
        assert api.get(at, headers={"Range": odd.encode("latin-1")}).content == hello
    for behind in (f"bytes={len(hello)}-", "bytes=-0"):
        answer = api.get(at, headers={"Range": behind})
        assert (answer.status_code, answer.json()["error"]["param"]) == (416, "Range")
    assert len(api.synth.streams) == 1
    asked = {"Range": "bytes=0-9"}
    assert api.get(address(seed=2, stream="false"), headers=asked).status_code == 206
    assert api.get(address(seed=2), headers=asked).status_code == 200 and len(api.synth.streams) == 3
    assert api.speech(stream=False).headers.get("Accept-Ranges") is None


def test_sounds_are_kept_up_to_a_size_and_the_last_ones():
    sounds = KeptSounds(10, most=2)
    for key, data in (("a", b"12345"), ("b", b"1234"), ("c", b"123"), ("e", b"x" * 11), ("d", b"")):
        assert sounds.answer(key, None, {}, data).body == data
    assert [sounds.find(key, None) is None for key in "abcde"] == [True, True, False, False, True]


def test_a_bad_address_is_told_which_key(api):
    bad = {"input": "", "speed": "fast", "voice": "nobody", "pronunciations": "nginx", "sped": [2, 3]}
    for key, value in bad.items():
        answer = api.get(address(**{key: value}))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, key)


async def events(api, **body) -> list[dict]:
    """Server-sent events, read by OpenAI's client."""
    how = {"cast_to": object, "stream": True, "stream_cls": openai.AsyncStream[dict]}
    found = await client(api).post("/audio/speech", body={**SPOKEN, "stream_format": "sse", **body}, **how)
    return [event async for event in found]


@needs("av")
@pytest.mark.parametrize(("format", "speed"), [("mp3", 1.0), ("pcm", 1.0), ("pcm", 1.6)])
async def test_events_carry_the_sound_and_words_where_asked_each_once_and_end_with_the_usage(api, tiny, format, speed):
    how = {"input": "One two three.", "response_format": format, "speed": speed, **HOW}
    (*plain, done), (*timed, _) = [await events(api, word_timestamps=asked, **how) for asked in (False, True)]
    assert {event["type"] for event in plain} == {"speech.audio.delta"}
    sound = [event["audio"] for event in plain]
    assert sound == [event["audio"] for event in timed if "audio" in event]
    content = b"".join(map(base64.b64decode, sound))
    _, stream = api.synth.streams
    if format == "mp3":
        _, pcm, rate_hz = decoded(content)
        assert len(pcm) / rate_hz == pytest.approx(FRAMES / FRAME_RATE_HZ, abs=0.1)
    else:
        assert content == to_pcm16(api.synth.say(**stream.settings)) or speed != 1.0
    found = [word for event in timed for word in event.get("words", [])]
    played = [(word, round(word.start_s / speed, 3), round(word.end_s / speed, 3)) for word in stream.words]
    assert found == [asdict(replace(word, start_s=start_s, end_s=end_s)) for word, start_s, end_s in played]
    assert sum("words" in event for event in timed) == 2 and timed[-1]["type"] == "speech.audio.words"
    tokens = len(tiny.tokenizer().encode(how["input"]))
    usage = {"input_tokens": tokens, "output_tokens": FRAMES, "total_tokens": tokens + FRAMES}
    assert done == {"type": "speech.audio.done", "usage": usage}


async def test_a_failure_after_the_first_event_is_raised_by_openais_client(api):
    api.synth.error_at = (2, RuntimeError("the device is gone"))
    with pytest.raises(openai.APIError, match="the generation failed"):
        await events(api, response_format="pcm", max_frames=100)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": "ogg"}, "response_format"),
        ({"speed": 4.5}, "speed"),
        ({"voice": "nobody"}, "voice"),
        ({"input": " "}, "input"),
        ({"stream_format": "websocket"}, "stream_format"),
        ({"instructions": "softly", "extra_body": {"strict": True}}, "instructions"),
        ({"extra_body": {"lang_code": "a", "strict": True}}, "lang_code"),
        ({"extra_body": {"task_type": "Base"}}, "task_type"),
        ({"extra_body": {"ref_audio": "UklGR" * 100}}, "ref_audio"),
        ({"extra_body": {"temprature": 0.5}}, "temprature"),
        ({"extra_body": {"sample_rate": 11_000}}, "sample_rate"),
        ({"response_format": "ulaw", "extra_body": {"sample_rate": 24_000}}, "response_format"),  # 8 kHz alone
        ({"extra_body": {"do_sample": 1}}, None),
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_a_bad_request_that_names_the_callers_key(api, change, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await client(api).audio.speech.create(**{**SPOKEN, "extra_body": {"max_frames": 1}, **change})
    assert refused.value.type == "invalid_request_error" and refused.value.param == param
    assert set(refused.value.body) == {"message", "type", "param", "code", "request_id"}
    message = refused.value.body["message"]
    said = "8000 Hz" if change.get("response_format") == "ulaw" else param
    assert "speaker" not in message and (said in (None, "input") or said in message)
    assert api.synth.streams == []


def test_what_changes_nothing_is_ignored_and_named_and_refused_by_a_strict_server(api, make_api, sound):
    habit = {"lang_code": "a", "normalization_options": {"normalize": True}, "user": "anna", "x" * 41: "y"}
    answer = api.speech(**habit, instructions="softly", word_timestamps=True, **HOW)
    assert answer.content == to_pcm16(sound)
    ignored = "instructions, lang_code, normalization_options, user, word_timestamps"
    assert answer.headers["X-Mktts-Ignored"] == ignored and "X-Mktts-Ignored" not in api.speech().headers
    settings = api.synth.streams[0].settings
    assert settings["instruct"] is None and not settings["options"].word_times
    strict = make_api(strict=True)
    for body in ({"instructions": "softly"}, {"lang_code": "a"}, {"word_timestamps": True}, {"x" * 41: 1}):
        for refused in (strict.speech(**body), api.speech(**body, strict=True)):
            assert refused.json()["error"]["param"] == next(iter(body))[:40]
    assert strict.synth.streams == []
    assert strict.speech(**habit, instruct="softly", strict=False).status_code == 200


def test_nulls_are_as_keys_left_out_and_neither_model_nor_voice_is_needed(api, sound):
    names = ("model", "voice", "instructions", "speed", "stream_format", "stream", "language", "task_type", "ref_audio")
    names += ("ref_text", "x_vector_only_mode", "temperature", "top_k", "max_new_tokens", "sample_rate", "do_sample")
    assert api.speech(**dict.fromkeys(names), **HOW).content == to_pcm16(sound)
    api.speech()
    with_nulls, without = [{**stream.settings, "options": None} for stream in api.synth.streams]
    assert {**with_nulls, "seed": None, "max_frames": 2} == without


# Ours, and what each project's pages tell its users to send, and what of it is no default.
@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"language": "English"}, {"language": "english"}),
        ({"language": "en-US"}, {"language": "english"}),
        ({"max_new_tokens": 5, "max_frames": None}, {"max_frames": 5}),
        ({"non_streaming_mode": False}, {"layout": "streaming"}),
        ({"non_streaming_mode": True}, {"layout": "whole"}),
        ({"temperature": 0}, {"greedy": True, "predictor_greedy": True}),
        ({"do_sample": False}, {"greedy": True, "predictor_greedy": True}),
        ({"do_sample": True, "subtalker_dosample": None}, {"greedy": False, "predictor_greedy": False}),
        ({"subtalker_temperature": 0.3, "subtalker_top_k": 7}, {"predictor_temperature": 0.3, "predictor_top_k": 7}),
        ({"greedy": True, "temperature": None}, {"greedy": True, "predictor_greedy": True}),
        ({"greedy": True, "predictor_greedy": False}, {"greedy": True, "predictor_greedy": False}),
        ({"task_type": "CustomVoice", "top_k": -1, "instructions": ""}, {"top_k": 0}),
        ({"temperature": 0.9, "top_p": 0.5, "repetition_penalty": 1.1}, {"top_p": 0.5, "repetition_penalty": 1.1}),
        ({"temperature": 0.3, "predictor_top_p": 0.8}, {"temperature": 0.3, "predictor_top_p": 0.8}),
        ({"model": "kokoro", "speed": 1.0, "lang_code": None, "volume_multiplier": 1.0, "stream": True}, {}),
        ({"voice": "alloy", "model": "gpt-4o-mini-tts", "initial_codec_chunk_frames": 2}, {}),
    ],
    ids=str,
)
def test_sampling_reaches_talker_and_predictor_and_keys_of_other_servers_mean_the_same_here(api, body, settings):
    assert api.speech(**body).status_code == 200
    found = api.synth.streams[0].settings
    flat = {name: value for name, value in settings.items() if name not in found}
    assert found["sampling"] == (api.synth.sampling.with_flat(flat) if flat else None)  # None: the checkpoint's
    assert {name: value for name, value in settings.items() if name in found}.items() <= found.items()


def test_openais_voices_are_speakers_and_so_is_a_voice_object(api, tiny):
    for alias in OPENAI_VOICES:
        api.speech(voice=alias)
        assert api.synth.streams[-1].settings["speaker"] == api.service.aliases[alias], alias
    speaker = tiny.config.default_speaker
    for body in ({"voice": {"id": speaker}}, {"speaker": speaker}, {"voice": speaker.upper()}, {"voice": "default"}):
        assert api.speech(**body).status_code == 200
        assert api.synth.streams[-1].settings["speaker"] == speaker, body


async def test_models_and_voices_are_listed(api):
    (model,) = (await client(api).models.list()).data
    assert model.id == api.service.model.checkpoint == api.get("/v1/audio/models").json()["models"][0]["id"]
    assert (await client(api).models.retrieve("tts-1")).id == "tts-1"  # as speech takes any name
    found = api.get("/v1/audio/voices").json()
    assert found["voices"] == api.service.health.speakers and set(OPENAI_VOICES) <= set(found["aliases"])
    assert (found["uploaded_voices"], found["uploads"]) == ([], False)


def test_saved_voices_of_a_base_checkpoint_are_called_by_name(make_api, tiny_base):
    voice = plain_voice(tiny_base)
    api = make_api(checkpoint=tiny_base, voices={"Anna": voice}, aliases={"narrator": "anna"})
    names = [{"voice": name} for name in ("anna", "ANNA", "narrator", "alloy", None)]
    for body in (*names, {"ref_audio": "Anna"}):
        assert api.speech(**body).status_code == 200
        settings = api.synth.streams[-1].settings
        assert settings["voice"] is voice and settings["speaker"] is None
        assert settings["voices"] == {"anna": voice}  # that a text may name in brackets
    assert api.speech(instructions="softly").headers["X-Mktts-Ignored"] == "instructions"
    asked = make_api(checkpoint=tiny_base.with_instructions(), voices={"Anna": voice})
    assert "X-Mktts-Ignored" not in asked.speech(instructions="softly").headers
    assert asked.synth.streams[-1].settings["instruct"] == "softly"
    assert asked.get("/health").json()["takes_instructions"]
    assert api.get("/v1/audio/voices").json()["voices"] == ["anna"]
    error = make_api(checkpoint=tiny_base).speech().json()["error"]
    assert (error["code"], error["param"]) == ("no_voice", "voice") and "send ref_audio" in error["message"]


def test_a_voice_design_checkpoint_takes_instructions_and_any_of_openais_voices(make_api, tiny_design):
    api = make_api(checkpoint=tiny_design)
    assert api.speech(voice="nova", instructions="a calm voice").status_code == 200
    settings = api.synth.streams[0].settings
    assert (settings["instruct"], settings["speaker"]) == ("a calm voice", None)


def test_openais_voices_are_dealt_out_by_sex_and_not_to_dialects_and_given_aliases_come_first():
    aliases = voice_aliases(["vivian", "dylan", "ryan", "eric"], ["dylan", "eric"])
    assert aliases["nova"] == aliases["shimmer"] == "vivian" and aliases["onyx"] == aliases["echo"] == "ryan"
    assert set(voice_aliases(["anna", "ben"]).values()) == {"anna", "ben"}
    assert set(voice_aliases([]).values()) == {DEFAULT} and "alloy" not in voice_aliases(["Alloy", "anna"])
    given = voice_aliases(["rms", "slt"], given={"Alloy": "SLT", "narrator": "rms", "any": "default"})
    assert (given["alloy"], given["narrator"], given["any"]) == ("slt", "rms", DEFAULT)
    for wrong, message in (({"a": "nobody"}, "got 'nobody'"), ({"rms": "slt"}, "there is a voice 'rms'")):
        with pytest.raises(ServerError, match=message):
            voice_aliases(["rms", "slt"], given=wrong)
