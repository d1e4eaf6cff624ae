"""`/tts/ws` in process: text as it is written, several utterances, limits, messages that make no sense; its writes."""

import asyncio
import json
import re
import subprocess
import sys
import wave
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from fastapi import WebSocket, WebSocketDisconnect
from fastapi.websockets import WebSocketState
from served import fed, served

from mktts.audio import to_pcm16
from mktts.engine.options import Chunk, Timings
from mktts.errors import EngineError
from mktts.server import service
from mktts.server.access import NO_OWNER, ApiError
from mktts.server.service import KEPT_LEAD_S, MAX_HELD_FRAMES, ServedStream
from mktts.server.settings import Limits
from mktts.server.websocket import SpeechSocket
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
PIECES = ["Hel", "lo the", "re, who", "ever you are.", " Good", " morning."]


def send(socket: Any, type: str, **fields: Any) -> None:
    socket.send_json({"type": type, **fields})


def read_to_end(socket: Any) -> tuple[list[dict], bytes, dict]:
    """(chunk notes, PCM, the last message) of the utterance that has started; each note is followed by its PCM."""
    notes, pcm = [], b""
    while (message := socket.receive_json())["type"] == "chunk":
        notes.append(message)
        pcm += socket.receive_bytes()
    return notes, pcm, message


def say(socket: Any, pieces: list[str] = PIECES, **start: Any) -> tuple[list[dict], bytes, dict]:
    send(socket, "start", **{"max_frames": 2, **start})
    for piece in pieces:
        send(socket, "text", text=piece)
    send(socket, "finish")
    assert socket.receive_json()["type"] == "started"
    return read_to_end(socket)


def test_fed_text_gives_the_sessions_samples_with_timings_words_and_a_finish_reason(api, tiny):
    with api.open_socket() as socket:
        asked = {"speaker": tiny.config.default_speaker.upper(), "temperature": 0.5, "word_timestamps": True}
        send(socket, "start", seed=5, max_frames=40, **asked)
        started = socket.receive_json()
        assert (started["type"], started["seed"], started["sample_rate_hz"]) == ("started", 5, SAMPLE_RATE_HZ)
        for piece in PIECES:
            send(socket, "text", text=piece)
        send(socket, "finish")
        notes, pcm, finished = read_to_end(socket)
    (stream,) = api.synth.streams
    settings = stream.settings
    assert settings["speaker"] == tiny.config.default_speaker
    assert settings["sampling"] == api.synth.sampling.with_flat({"temperature": 0.5})
    assert pcm == fed(api.synth, *PIECES, **settings)
    assert (finished["type"], finished["finish_reason"], finished["frames"]) == ("finished", "max_frames", 40)
    assert finished["audio_s"] == pytest.approx(40 / FRAME_RATE_HZ) and finished["id"] == started["id"]
    assert sum(note["frames"] for note in notes) == 40
    ends = [note["start_s"] + note["duration_s"] for note in notes]
    assert [note["start_s"] for note in notes] == pytest.approx([0.0, *ends[:-1]])
    assert all(note["timings"]["ready_ms"] > 0 and note["id"] == started["id"] for note in notes)
    assert finished["words"] == [asdict(word) for word in stream.words]
    assert [word for note in notes for word in note["words"]] == finished["words"][:-1]  # one waits for the end
    assert api.get(f"/tts/stream/{started['id']}").json()["frames"] == 40


def test_several_utterances_share_a_connection_and_a_refused_start_drops_what_was_sent_for_it(api):
    with api.open_socket() as socket:
        first, second = say(socket, seed=1), say(socket, seed=1)
        assert first[1] == second[1] and first[2]["id"] != second[2]["id"]
        assert first[2]["words"] is None and not any("words" in note for note in first[0])
        send(socket, "start", speaker="nobody")
        send(socket, "text", text="Hello.")
        send(socket, "finish")
        send(socket, "cancel")
        assert socket.receive_json()["error"]["code"] == "unknown_speaker"
        assert say(socket)[2]["finish_reason"] == "max_frames"


def test_cancel_ends_the_stream_and_a_new_start_need_not_wait(api):
    with api.open_socket() as socket:
        send(socket, "start", seed=1, max_frames=4_000)  # a minute's work
        send(socket, "text", text="Hello there. " * 200)
        first = socket.receive_json()
        socket.receive_json(), socket.receive_bytes()
        send(socket, "cancel")
        send(socket, "start", seed=2, max_frames=3, text="Hello there.")
        finished = read_to_end(socket)[2]
        assert (finished["id"], finished["finish_reason"]) == (first["id"], "cancelled")
        assert api.synth.streams[0].finish_reason == "cancelled"
        started = socket.receive_json()
        notes, pcm, finished = read_to_end(socket)
    assert pcm == to_pcm16(api.synth.say(**api.synth.streams[1].settings))
    assert {note["id"] for note in notes} == {started["id"]} != {first["id"]}
    assert finished["finish_reason"] == "max_frames"


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([("text", {"text": "x" * 5_001})], "text_too_long"),
        ([("text", {"text": "x" * 3_000}), ("text", {"text": "x" * 3_000})], "text_too_long"),
        ([("text", {"text": " \n"}), ("finish", {})], "bad_text"),
        ([("finish", {})], "bad_text"),
        ([], "idle"),
        ([("text", {"text": "Hello."}), ("finish", {})], "engine_error"),
    ],
    ids=["one long text", "two that are too long together", "only blanks", "none", "none for too long", "a failure"],
)
def test_what_fails_ends_the_utterance_and_not_the_connection(api, make_api, caplog, messages, code):
    caplog.set_level("INFO", "mktts.server")
    api = make_api(limits=Limits(idle_s=0.02)) if code == "idle" else api
    api.synth.error_at = (2, RuntimeError("gone")) if code == "engine_error" else None
    with api.open_socket() as socket:
        send(socket, "start", max_frames=4_000)
        for type, fields in messages:
            send(socket, type, **fields)
        assert socket.receive_json()["type"] == "started"
        finished = read_to_end(socket)[2]
        assert (finished["finish_reason"], finished["error"]["code"]) == ("error", code)
        heard = "first audio after " if finished["frames"] else "error, no audio"
        assert heard in caplog.messages[-1] and "None" not in caplog.messages[-1]
        assert finished["error"]["request_id"] == finished["id"] and "gone" not in json.dumps(finished)
        assert api.service.streams_open == 0
        api.synth.error_at = None
        assert say(socket)[2]["finish_reason"] == "max_frames"


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_json", None),
        ('{"type": "sing"}', "invalid_value", None),
        ('{"type": "start", "sped": 2}', "invalid_value", "sped"),
        ('{"type": "start", "speaker": 2}', "invalid_value", "speaker"),
        ('{"type": "text", "text": 1}', "invalid_value", "text"),
        ('{"type": "text", "text": "early"}', "not_started", None),
        (b"\x00\x01", "not_text", None),
        ("[" * 50_000, "invalid_json", None),
        ('{"type": "start"}', "not_finished", None),  # before the end of the first
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_message_that_makes_no_sense_is_told_and_closes_the_connection(api, message, code, param):
    with api.open_socket() as socket:
        if code == "not_finished":
            send(socket, "start")
            assert socket.receive_json()["type"] == "started"
        (socket.send_bytes if isinstance(message, bytes) else socket.send_text)(message)
        answer = socket.receive_json()
        error = answer["error"]
        assert (answer["type"], error["code"], error["param"]) == ("error", code, param)
        assert error["request_id"] == dict(socket.extra_headers)[b"x-request-id"].decode()
        with pytest.raises(WebSocketDisconnect) as closed:
            while True:
                socket.receive_json()
        assert closed.value.code == 1008
    assert all(stream.finish_reason == "cancelled" for stream in api.synth.streams)


async def test_a_client_that_is_found_gone_while_it_is_written_to_ends_the_connection_quietly(api):
    gone = asyncio.Event()
    said = [{"type": "start", "text": "Hello there. " * 200}, {"type": "text", "text": "More."}]

    async def receive() -> dict[str, Any]:
        if not said:
            return {"type": "websocket.disconnect", "code": 1006}
        if len(said) == 1:
            await gone.wait()
        return {"type": "websocket.receive", "text": json.dumps(said.pop(0))}

    async def refuse(message: dict[str, Any]) -> None:
        if message["type"] == "websocket.send":
            gone.set()
            raise OSError

    socket = WebSocket({"type": "websocket", "headers": [], "state": {"owner": NO_OWNER}}, receive, refuse)
    socket.client_state = WebSocketState.CONNECTED
    async with asyncio.timeout(5):
        await SpeechSocket(socket, api.service).run()
    assert api.synth.streams[0].finish_reason == "cancelled"


def test_the_documented_client_speaks(synth, tiny, tmp_path):
    (code,) = re.findall(r"```py\n(import asyncio.*?)```", DOCUMENT, re.DOTALL)
    with served(synth, Limits(max_duration_s=16 / FRAME_RATE_HZ)) as server:
        code = code.replace("ws://127.0.0.1:8000", server.url.replace("http", "ws"))
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    said = fed(synth, "Good morning, everyone.", speaker=tiny.config.default_speaker, seed=7, max_frames=16)
    with wave.open(str(tmp_path / "speech.wav")) as spoken:
        assert (spoken.getframerate(), spoken.readframes(100_000)) == (SAMPLE_RATE_HZ, said)


# ---- one served stream: what is late at a socket, and what is written together

FRAME_S = 1 / FRAME_RATE_HZ


def chunk(frames: int = 1, start: int = 0) -> Chunk:
    pcm = np.full(frames * SAMPLES_PER_FRAME, start, np.float32)
    return Chunk(pcm, start * FRAME_S, frames, Timings(10.0 * start, 1.0, 1.0, 1.0, 1.0))


class Source:
    """A stream whose chunks come at given times, seconds from the beginning of the clock."""

    seed, rests, finish_reason = 1, False, "eos"

    def __init__(self, clock: SimpleNamespace, *arrivals: tuple[float, Chunk | None | Exception]) -> None:
        self._clock, self._arrivals = clock, [(100.0 + at_s, what) for at_s, what in arrivals]
        self.cancel = self.feed = MagicMock()

    async def take(self, within_s: float | None = None) -> Chunk | None:
        at_s, what = self._arrivals[0]
        if within_s is not None and at_s > self._clock.now_s + within_s:
            self._clock.now_s += within_s
            raise TimeoutError
        self._clock.now_s = max(self._clock.now_s, at_s)
        del self._arrivals[0]
        if isinstance(what, Exception):
            raise what
        return what


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its `now_s` passes where something is waited for."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(service, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def served_stream_of(source: Source) -> tuple[ServedStream, list[float]]:
    late: list[float] = []
    around = MagicMock(limits=Limits())
    around.meters.late_s.inc = late.append
    return ServedStream(around, "tts_stream", source, 0), late


async def written(source: Source, clock: Any) -> tuple[list[tuple[float, Chunk]], list[float], ServedStream]:
    """(seconds, what) of every write, and by how much which were late."""
    made, late = served_stream_of(source)
    writes = []
    try:
        async for one in made.chunks():
            async with made.sending(one.duration_s):
                writes.append((round(clock.now_s - 100.0, 6), one))
    except ApiError:
        pass
    return writes, late, made


async def test_a_write_later_than_the_listeners_place_is_an_underrun(clock):
    source = Source(clock, (0.0, chunk()), (0.05, chunk()), (0.2, chunk()), (0.25, chunk()), (0.3, None))
    writes, late, _ = await written(source, clock)
    assert [(at_s, one.frames) for at_s, one in writes] == [(0.0, 1), (0.05, 1), (0.2, 1), (0.25, 1)]
    assert late == pytest.approx([0.2 - 2 * FRAME_S])


async def test_what_the_text_or_the_client_held_up_is_no_underrun(clock):
    source = Source(clock, (0.0, chunk()), (1.0, chunk()), (5.0, chunk()), (5.0, None))
    made, late = served_stream_of(source)
    chunks = made.chunks()
    async with made.sending((await anext(chunks)).duration_s):
        pass
    clock.now_s, source.idle = 100.97, True
    made.feed("And more. ")
    source.idle = False
    async with made.sending((await anext(chunks)).duration_s):
        clock.now_s = 105.0  # the client took nothing for four seconds
    async with made.sending((await anext(chunks)).duration_s):
        assert not late
    assert await anext(chunks, None) is None


async def test_a_stream_that_is_ahead_gathers_and_one_that_is_not_writes_at_once(clock):
    fast = [(0.01 * n, chunk(4, 4 * n)) for n in range(12)]
    writes, late, _ = await written(Source(clock, *fast, (0.2, None)), clock)
    frames = [one.frames for _, one in writes]
    assert sum(frames) == 48 and not late
    lead_s = [sum(frames[:n]) * FRAME_S - at_s for n, (at_s, _) in enumerate(writes)]
    assert all(size == 4 for size, lead in zip(frames, lead_s, strict=True) if lead <= KEPT_LEAD_S)
    assert 2 * 4 <= max(frames) <= MAX_HELD_FRAMES + 3 and len(frames) < 12
    for n, (_, one) in enumerate(writes):  # the same speech
        first = sum(frames[:n])
        assert one.start_s == first * FRAME_S and one.timings.codec_ms == one.frames / 4
        assert one.timings.ready_ms == 10.0 * (first + one.frames - 4)
        assert np.array_equal(one.pcm[::SAMPLES_PER_FRAME], np.repeat(range(first, first + one.frames, 4), 4))

    slow = [(4 * FRAME_S * n, chunk(4, n)) for n in range(6)]
    writes, late, _ = await written(Source(clock, *slow, (2.0, None)), clock)
    assert [one.frames for _, one in writes] == [4] * 6


async def test_what_is_held_back_goes_out_before_the_listener_needs_it_and_before_an_error(clock):
    ahead = [(0.0, chunk(12)), (0.1, chunk(4))]
    writes, late, _ = await written(Source(clock, *ahead, (9.0, None)), clock)
    assert [(at_s, one.frames) for at_s, one in writes] == [
        (0.0, 12),
        (round(12 * FRAME_S - KEPT_LEAD_S, 6), 4),
    ] and not late
    clock.now_s = 100.0
    writes, _, made = await written(Source(clock, *ahead, (0.2, EngineError("broken"))), clock)
    assert [one.frames for _, one in writes] == [12, 4] and made.error.code == "engine_error"
