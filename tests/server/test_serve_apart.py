"""A server whose engine is in a process of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from served import TEXT, Served, served, until
from websockets.sync.client import connect

from mktts.audio import from_pcm16, to_pcm16
from mktts.checkpoint import Checkpoint
from mktts.server.command import runs_apart
from mktts.speech.guard import Guard
from mktts.synth import Synthesizer
from mktts.synth.apart import ApartSynthesizer

SHORT = {"text": "Hello there.", "max_frames": 9, "seed": 4}
LONG = {"text": TEXT, "max_frames": 4_000}  # more than the buffers of a connection hold


@pytest.fixture(scope="module")
def synthesizer(tiny: Checkpoint) -> Iterator[ApartSynthesizer]:
    with ApartSynthesizer(tiny, str(tiny.folder), None, {"device": "cpu", "engine": "batch"}) as made:
        yield made


@pytest.fixture(scope="module")
def running(synthesizer: ApartSynthesizer) -> Iterator[Served]:
    with served(synthesizer, guard=Guard.off()) as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny: Checkpoint) -> bytes:
    with Synthesizer.load(tiny, device="cpu", engine="batch") as near:
        return to_pcm16(near.say(SHORT["text"], seed=SHORT["seed"], max_frames=SHORT["max_frames"]))


def test_the_sound_is_that_of_an_engine_in_this_process(server: Served, expected):
    assert httpx.post(f"{server.url}/tts/stream", json=SHORT).content == expected
    body = {"input": SHORT["text"], "max_frames": SHORT["max_frames"], "seed": SHORT["seed"], "speed": 2.0}
    faster = httpx.post(f"{server.url}/v1/audio/speech", json={**body, "response_format": "pcm"}).content
    assert len(faster) == pytest.approx(len(expected) / 2, rel=0.05)
    assert abs(from_pcm16(faster)).max() == pytest.approx(abs(from_pcm16(expected)).max(), rel=0.5)


def test_a_socket_speaks_what_is_fed_and_says_why_it_ended(server: Served):
    with connect(server.ws) as socket:
        socket.send(json.dumps({"type": "start", "max_frames": 6}))
        for message in ({"type": "text", "text": "Hello "}, {"type": "text", "text": "you."}, {"type": "finish"}):
            socket.send(json.dumps(message))
        sound, last = 0, {}
        while last.get("type") != "finished":
            message = socket.recv(timeout=60)
            sound, last = (sound + len(message), last) if isinstance(message, bytes) else (sound, json.loads(message))
    assert sound == 6 * 1920 * 2 and last["finish_reason"] == "max_frames"


def test_who_hangs_up_frees_the_lane_and_the_meters_know_the_engine(server: Served):
    def lanes() -> str:
        return next(
            line
            for line in httpx.get(f"{server.url}/metrics").text.splitlines()
            if line.startswith('mktts_lanes_used{engine="batch"}')
        )

    with httpx.stream("POST", f"{server.url}/tts/stream", json=LONG) as answer:
        body = answer.iter_bytes()  # kept: without it httpx hangs up
        next(body)
        until(lambda: lanes().endswith(" 1.0"), "its lane")
    until(lambda: lanes().endswith(" 0.0"), "its lane to be free")
    assert httpx.get(f"{server.url}/health").json()["streams_max"] == server.studio.carries >= 1


def test_a_killed_engine_breaks_streams_off_and_the_server_is_no_longer_well(tiny: Checkpoint):
    with (
        ApartSynthesizer(tiny, str(tiny.folder), None, {"device": "cpu", "engine": "batch"}) as far,
        served(far, guard=Guard.off()) as server,
        httpx.stream("POST", f"{server.url}/tts/stream", json=LONG) as answer,
    ):
        body = answer.iter_bytes()
        next(body)
        os.kill(far._process.pid, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in body:
                pass
        assert httpx.post(f"{server.url}/tts/stream", json=SHORT).status_code == 500
        assert httpx.get(f"{server.url}/ready").status_code == 503


@pytest.mark.parametrize(
    ("process", "engine", "device", "apart"),
    [
        ("auto", "batch", "cuda", True),
        ("auto", "batch", "auto", True),
        ("auto", "batch", "cpu", False),
        ("auto", "auto", "cuda", False),
        ("same", "batch", "cuda", False),
        ("own", "auto", "cpu", True),
    ],
)
def test_a_gpu_that_serves_many_is_apart_unless_said_otherwise(monkeypatch, process, engine, device, apart):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert runs_apart(process, engine, device) is apart
