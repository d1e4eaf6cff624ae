"""POST /tts/stream over real sockets: order, exactness, limits, clients that are slow or gone, many clients."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import re
import socket
import struct
import wave
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from served import TEXT, WAIT_S, Served, first_speaker, served, until

from mktts.audio import to_pcm16
from mktts.errors import ServerError
from mktts.model.sampling import Sampling
from mktts.server import Limits
from mktts.server.schemas import VoiceParams as Manner
from mktts.server.served_stream import ServedStream as Utterance
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.job import Job
from mktts.speech.options import StreamOptions

FRAME_BYTES = 2 * SAMPLES_PER_FRAME
LONG = {"text": TEXT, "seed": 1, "max_frames": 120}


def post(server: Served, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/tts/stream", json=body, timeout=60)


def state(server: Served, response: httpx.Response) -> dict:
    return httpx.get(f"{server.url}/tts/stream/{response.headers['X-Request-Id']}").json()


def raw_request(server: Served, body: dict, receive_buffer_bytes: int | None = None) -> socket.socket:
    """A connection whose answer is not read by anyone unless the test does."""
    where = urlsplit(server.url)
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.connect((where.hostname, where.port))
    content = json.dumps(body).encode()
    head = f"POST /tts/stream HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_pcm_is_that_of_the_synthesizer_and_the_record_says_how_it_ended(server, synthesizer, tiny):
    answer = post(server, text="Hello there.", seed=7, max_frames=9, speaker=first_speaker(tiny).upper())
    expected = synthesizer.say("Hello there.", seed=7, max_frames=9, speaker=first_speaker(tiny))
    assert answer.status_code == 200 and answer.content == to_pcm16(expected)
    assert answer.headers["Content-Type"].startswith("audio/pcm")
    assert int(answer.headers["X-Sample-Rate-Hz"]) == SAMPLE_RATE_HZ and answer.headers["X-Random-Weights"] == "true"
    found = state(server, answer)
    assert (found["state"], found["finish_reason"], found["frames"], found["seed"]) == ("ended", "max_frames", 9, 7)
    assert found["audio_s"] == pytest.approx(9 / FRAME_RATE_HZ) and found["error"] is None


def test_drawn_seed_is_told_and_repeats_the_draw(server):
    first = post(server, text="Hello there.", max_frames=4)
    again = post(server, text="Hello there.", max_frames=4, seed=int(first.headers["X-Seed"]))
    assert again.content == first.content


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"greedy": True}, lambda sampling: sampling.greedy()),
        (
            {"temperature": 0.3, "top_k": 5},
            lambda sampling: replace(sampling, talker=replace(sampling.talker, temperature=0.3, top_k=5)),
        ),
        (
            {"greedy": True, "predictor_greedy": False, "repetition_penalty": 2.5},
            lambda sampling: replace(sampling.greedy(), predictor=sampling.predictor, repetition_penalty=2.5),
        ),
        (
            {"predictor_temperature": 0.5, "predictor_top_k": 7, "predictor_top_p": 0.8},
            lambda sampling: replace(
                sampling, predictor=replace(sampling.predictor, temperature=0.5, top_k=7, top_p=0.8)
            ),
        ),
    ],
    ids=["greedy", "cooler talker", "greedy talker, penalty", "cooler predictor"],
)
def test_sampling_settings_reach_talker_and_predictor(server, synthesizer, tiny, body, settings):
    wanted = settings(synthesizer.sampling)
    expected = synthesizer.say("Hm.", seed=3, max_frames=8, speaker=first_speaker(tiny), sampling=wanted)
    assert post(server, text="Hm.", seed=3, max_frames=8, **body).content == to_pcm16(expected)


def test_requests_have_every_sampling_setting_by_its_flat_name():
    assert set(Sampling().flat()) < set(Manner.model_fields)


def test_bytes_come_before_the_generation_is_over(server):
    with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG, timeout=60) as answer:
        pieces = answer.iter_raw()  # kept: httpx closes the connection of an iterator that is dropped
        first = next(pieces)
        found = state(server, answer)
        assert first and found["state"] == "running" and found["frames"] < LONG["max_frames"]


def test_closing_the_connection_ends_the_generation_within_one_frame(server):
    with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG, timeout=60) as answer:
        next(answer.iter_raw())
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")
    assert state(server, answer)["finish_reason"] == "cancelled"
    assert server.watched.wasted_frames(server.watched.streams[0]) <= 1
    assert len(server.watched.streams[0].codes) < LONG["max_frames"]


def test_a_client_that_leaves_without_reading_a_byte_is_noticed_too(synthesizer):
    with served(synthesizer) as server:
        with raw_request(server, LONG):
            until(lambda: server.watched.streams, "the stream to be opened")
        until(lambda: server.studio.streams_open == 0, "the stream to be ended")
        page = httpx.get(f"{server.url}/metrics").text
    assert 'mktts_streams_total{reason="cancelled",route="tts_stream"} 1.0' in page


def test_slow_reader_stops_the_generation_and_then_gets_every_byte(synthesizer, tiny):
    """What is on its way is bounded by the two socket buffers, the server's write buffer and buffer_frames."""
    limits = Limits(buffer_frames=8, socket_bytes=16 * 1024)
    with served(synthesizer, limits) as server, raw_request(server, LONG, 16 * 1024) as connection:
        until(lambda: server.watched.streams, "the stream to be opened")
        stream = server.watched.streams[0]
        assert 0 < server.watched.frames_at_pause(stream) < LONG["max_frames"] - 2 * limits.buffer_frames
        reader = connection.makefile("rb")
        while reader.readline() != b"\r\n":
            pass
        content = b""
        while size := int(reader.readline(), 16):
            content += reader.read(size)
            reader.readline()
        options = StreamOptions(buffer_frames=8)
        settings = {"seed": 1, "max_frames": LONG["max_frames"], "options": options}
        assert content == to_pcm16(synthesizer.say(TEXT, speaker=first_speaker(tiny), **settings))


def test_a_client_that_reads_nothing_for_too_long_is_dropped(synthesizer):
    limits = Limits(buffer_frames=8, socket_bytes=16 * 1024, stall_s=0.5)
    with served(synthesizer, limits) as server, raw_request(server, LONG, 16 * 1024):
        until(lambda: server.watched.streams and server.studio.streams_open == 0, "the stream to be dropped")
        assert len(server.watched.streams[0].codes) < LONG["max_frames"]


def test_one_stream_too_many_is_told_to_come_back(synthesizer):
    with served(synthesizer, Limits(max_streams=1)) as server:
        with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG, timeout=60) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            refused = post(server, text="Hello.", max_frames=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
            assert int(refused.headers["Retry-After"]) >= 1
            assert httpx.get(f"{server.url}/health").json()["streams_open"] == 1
        until(lambda: server.studio.streams_open == 0, "the place to be free")
        assert post(server, text="Hello.", max_frames=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "invalid_value"),
        ({"text": " \u200b\n"}, 422, "bad_text"),
        ({"text": "x" * 5_001}, 422, "text_too_long"),
        ({"text": "x", "instruct": "y" * 5_001}, 422, "instruct_too_long"),
        ({"text": "x", "max_frames": 10_000}, 422, "duration_too_long"),
        ({"text": "x", "max_frames": "1"}, 422, "invalid_value"),
        ({"text": "x", "speaker": "nobody"}, 422, "unknown_speaker"),
        ({"text": "x", "language": "klingon"}, 422, "bad_prompt"),
        ({"text": "x", "instruct": "softly"}, 422, "bad_prompt"),
        ({"text": "x", "sped": 2}, 422, "invalid_value"),
        ({"text": "x", "temperature": 0}, 422, "bad_sampling"),
        ({"text": "x" * 200_000}, 413, "body_too_large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_are_refused_in_one_shape_and_open_nothing(server, body, status, code):
    answer = post(server, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert server.watched.streams == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b'{"text": NaN}', b'{"text": "\\ud800"}', b"[" * 60_000, b"9" * 6_000, b"null"],
    ids=lambda content: repr(content[:20]),
)
def test_bodies_that_are_not_json_of_the_right_shape_are_the_callers_mistake(server, content):
    head = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/tts/stream", content=content, headers=head)
    assert answer.status_code in (400, 422) and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_chunked_body_cannot_pass_the_size_limit(server):
    pieces = (b"x" * 4_096 for _ in range(100))
    answer = httpx.post(f"{server.url}/tts/stream", content=pieces, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_duration_limit_ends_a_request_that_names_none(synthesizer):
    with served(synthesizer, Limits(max_duration_s=3 / FRAME_RATE_HZ)) as server:
        answer = post(server, text="Hello there.")
        assert len(answer.content) == 3 * FRAME_BYTES and state(server, answer)["finish_reason"] == "max_frames"


def test_a_failing_generation_is_a_500_before_the_first_byte_and_a_broken_body_after_it(synthesizer, monkeypatch):
    with served(synthesizer) as server:
        decode, calls = synthesizer._models.any().codec.decode, []

        def breaks_at(call: int) -> None:
            def broken(*arguments):
                calls.append(1)
                if len(calls) == call:
                    raise RuntimeError("the device is gone: " + TEXT)
                return decode(*arguments)

            calls.clear()
            monkeypatch.setattr(synthesizer._models.any().codec, "decode", broken)

        breaks_at(1)
        answer = post(server, text="Hello there.", max_frames=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error") and TEXT not in answer.text
        breaks_at(3)
        with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG, timeout=60) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        found = state(server, answer)
        assert (found["finish_reason"], found["error"]["code"]) == ("error", "engine_error") and found["frames"] > 0
        for _ in range(3):
            breaks_at(1)
            post(server, text="Hello there.", max_frames=4)
        assert httpx.get(f"{server.url}/health").status_code == 503
        monkeypatch.undo()
        post(server, text="Hello there.", max_frames=4)
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_text_is_not_logged(server, caplog):
    caplog.set_level("DEBUG")
    post(server, text="Secretword.", max_frames=2)
    post(server, text="Secretword.", speaker="nobody")
    assert "Secretword" not in caplog.text and "max_frames" in caplog.text


def test_metrics_count_what_happened(synthesizer):
    with served(synthesizer) as server:
        post(server, text="Hello there.", max_frames=5)
        post(server, text="Hello there.", speaker="nobody")
        page = httpx.get(f"{server.url}/metrics").text
    assert 'mktts_streams_total{reason="max_frames",route="tts_stream"} 1.0' in page
    assert 'mktts_refused_total{code="unknown_speaker"} 1.0' in page
    assert f"mktts_audio_seconds_total {5 / FRAME_RATE_HZ}" in page
    assert 'mktts_first_audio_seconds_count{route="tts_stream"} 1.0' in page and "mktts_streams_open 0.0" in page


def test_wav_of_unknown_length_is_read_to_its_end(server, synthesizer, tiny):
    body = {"input": "Hello there.", "response_format": "wav", "seed": 7, "max_frames": 3}
    content = httpx.post(f"{server.url}/v1/audio/speech", json=body).content
    assert content[:4] == b"RIFF" and struct.unpack("<I", content[4:8]) == struct.unpack("<I", content[40:44])
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (1, SAMPLE_RATE_HZ, 2)
        samples = np.frombuffer(file.readframes(4 * SAMPLES_PER_FRAME), dtype="<i2")
    expected = synthesizer.say("Hello there.", seed=7, max_frames=3, speaker=first_speaker(tiny))
    assert samples.tobytes() == to_pcm16(expected)


def resident_bytes(server: Served) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    return float(re.search(r"^process_resident_memory_bytes (\S+)$", page, re.MULTILINE).group(1))


async def many(server: Served, requests: int) -> None:
    """Short requests at concurrency 16, each checked; the server keeps nothing of them."""
    kept_before = len(kept())
    async with httpx.AsyncClient(timeout=60) as client:

        async def ask(seeds: Iterator[int]) -> None:
            for seed in seeds:
                body = {"text": "Hi.", "seed": seed, "max_frames": 1}
                answer = await client.post(f"{server.url}/tts/stream", json=body)
                assert answer.status_code == 200 and len(answer.content) == FRAME_BYTES
                server.watched.streams.clear()

        await asyncio.gather(*(ask(iter(range(requests // 64))) for _ in range(16)))  # a quarter, to fill every cache
        before_bytes = resident_bytes(server)
        seeds = iter(range(requests * 3 // 4))
        await asyncio.gather(*(ask(seeds) for _ in range(16)))
    until(lambda: server.studio.streams_open == 0, "the last stream to end")
    until(lambda: len(kept()) <= kept_before, "what is over to be let go")
    assert resident_bytes(server) - before_bytes < 16 * 2**20


def kept() -> list[object]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (Utterance, Job)]


async def test_many_short_requests_at_concurrency_16_leave_nothing_behind(synthesizer):
    with served(synthesizer, Limits(kept_states=16, wait_s=WAIT_S)) as server:
        await many(server, 96)


@pytest.mark.slow
async def test_a_thousand_short_requests_at_concurrency_16_leave_nothing_behind(synthesizer):
    with served(synthesizer, Limits(kept_states=16, wait_s=WAIT_S)) as server:
        await many(server, 1_000)


def test_records_are_kept_for_the_last_streams_only(synthesizer):
    with served(synthesizer, Limits(kept_states=2)) as server:
        answers = [post(server, text="Hi.", max_frames=1) for _ in range(3)]
        statuses = [
            httpx.get(f"{server.url}/tts/stream/{answer.headers['X-Request-Id']}").status_code for answer in answers
        ]
        assert statuses == [404, 200, 200]


def test_limits_must_be_above_nothing():
    with pytest.raises(ServerError, match="max_streams must be above 0, got 0"):
        Limits(max_streams=0)
