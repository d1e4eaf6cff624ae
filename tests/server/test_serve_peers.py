"""WebSockets as vLLM-Omni and Nari document them: their sessions, replayed; what goes wrong; what is left behind."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import pytest
from absent import needs
from served import TEXT, Served, first_speaker, served, until
from sounds import decoded, tone
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mktts.audio import encoded, from_pcm16, to_pcm16
from mktts.server import Limits
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

HOW = {"seed": 1, "max_frames": 6}
WAIT_S = 60


def omni(server: Served, **settings: Any) -> ClientConnection:
    return connect(server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream", **settings)


def nari(server: Served, **settings: Any) -> ClientConnection:
    address = server.url.replace("http", "ws", 1) + "/v1/audio/speech/ws"
    return connect(address, **{"subprotocols": ["nari.speech.v1"], **settings})


def send(socket: ClientConnection, type: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": type, **fields}))


def read(socket: ClientConnection) -> dict[str, Any] | bytes:
    message = socket.recv(timeout=WAIT_S)
    return message if isinstance(message, bytes) else json.loads(message)


def read_to(socket: ClientConnection, *types: str) -> tuple[list[dict[str, Any]], bytes]:
    """The messages up to one of these types, and the bytes between them."""
    messages, data = [], b""
    while True:
        message = read(socket)
        if isinstance(message, bytes):
            data += message
        else:
            messages.append(message)
            if message["type"] in types:
                return messages, data


# ---- vLLM-Omni


def test_the_documented_session_is_spoken_in_pieces_of_pcm(server, synthesizer, tiny):
    voice = first_speaker(tiny)
    with omni(server) as socket:
        config = {"voice": voice, "task_type": "CustomVoice", "language": "Auto", "response_format": "pcm"}
        send(socket, "session.config", **config, stream_audio=True, **HOW)
        for piece in ("Hello, how ", "are you?"):
            send(socket, "input.text", text=piece)
        send(socket, "input.done")
        (start, done, session), pcm = read_to(socket, "session.done")
        assert start == {
            "type": "audio.start", "utterance_index": 0, "sentence_index": 0,
            "sentence_text": "Hello, how are you?", "format": "pcm", "sample_rate": SAMPLE_RATE_HZ,
        }  # fmt: skip
        place = {"utterance_index": 0, "sentence_index": 0}
        assert done == {"type": "audio.done", **place, "total_bytes": len(pcm), "error": False}
        assert session == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}
        assert pcm == to_pcm16(synthesizer.say("Hello, how are you?", speaker=voice, **HOW))
        send(socket, "input.text", text="Hello again.")  # the configuration holds
        send(socket, "input.done")
        (start, _, session), pcm = read_to(socket, "session.done")
        assert start["utterance_index"] == session["utterance_index"] == 1
        assert pcm == to_pcm16(synthesizer.say("Hello again.", speaker=voice, **HOW))
        send(socket, "session.close")
        with pytest.raises(ConnectionClosed) as closed:
            read(socket)
        assert closed.value.rcvd.code == 1000


@needs("av")
@pytest.mark.parametrize("format", [None, "wav", "mp3", "flac", "opus"])
def test_without_streaming_an_utterance_is_one_message_of_a_whole_file(server, format):
    with omni(server) as socket:
        send(socket, "session.config", response_format=format, **HOW)
        send(socket, "input.text", text="Hello.")
        send(socket, "input.done")
        start, data = read(socket), read(socket)
        assert (start["type"], start["format"]) == ("audio.start", format or "wav")
        _, pcm, rate_hz = decoded(data)
        assert len(pcm) / rate_hz == pytest.approx(HOW["max_frames"] / FRAME_RATE_HZ, abs=0.1)
        if format in (None, "wav"):
            with wave.open(io.BytesIO(data)) as file:
                assert file.getnframes() == len(pcm)
        assert read(socket)["total_bytes"] == len(data)
        assert read(socket)["type"] == "session.done"


def test_flushes_are_spoken_in_order_and_an_empty_one_is_none(server):
    with omni(server) as socket:
        send(socket, "session.config", stream_audio=True, **HOW)
        for text in ("One.", "", "Three."):
            if text:
                send(socket, "input.text", text=text)
            send(socket, "input.done")
        send(socket, "session.close")  # what was flushed is spoken first
        seen = []
        with pytest.raises(ConnectionClosed):
            while True:
                message = read(socket)
                if isinstance(message, dict):
                    seen.append((message["type"], message["utterance_index"]))
    spoken = ["audio.start", "audio.done", "session.done"]
    assert seen == [*((type, 0) for type in spoken), ("session.done", 1), *((type, 2) for type in spoken)]


@pytest.mark.parametrize(
    ("config", "param"),
    [
        ({"voice": "nobody"}, None),
        ({"speed": 9}, "speed"),
        ({"stream_audio": "yes"}, "stream_audio"),
        ({"task_type": "Base"}, "task_type"),
        ({"pitch": 2}, "pitch"),
        ({"response_format": "ogg"}, "response_format"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_told_and_the_connection_goes_on(server, config, param):
    with omni(server) as socket:
        send(socket, "session.config", **config)
        if param is None:  # only the speech itself shows it
            send(socket, "input.text", text="Hello.")
            send(socket, "input.done")
        error = read(socket)
        assert error["type"] == "error" and error["request_id"]
        assert error["param"] == (param or "voice")
        if param is None:
            assert read(socket)["type"] == "session.done"
        send(socket, "session.config", stream_audio=True, **HOW)
        send(socket, "input.text", text="Hello.")
        send(socket, "input.done")
        assert read_to(socket, "session.done")[1]


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (["{"], "invalid_json"),
        (["[]"], "invalid_value"),
        ([b"\x00"], "not_text"),
        (['{"type": "sing"}'], "invalid_value"),
        (['{"type": "input.text", "text": "early"}'], "not_configured"),
    ],
    ids=str,
)
def test_what_makes_no_sense_closes_the_connection_with_a_reason(server, messages, code):
    with omni(server) as socket:
        for message in messages:
            socket.send(message)
        assert read(socket)["code"] == code
        with pytest.raises(ConnectionClosed) as closed:
            read(socket)
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, code)


@pytest.mark.parametrize("text", [1, None, "x" * 5_001])
def test_text_that_cannot_be_taken_is_told_and_dropped(server, text):
    with omni(server) as socket:
        send(socket, "session.config", stream_audio=True, **HOW)
        send(socket, "input.text", text=text)
        assert read(socket)["param"] == "text"
        send(socket, "input.text", text="Hello.")
        send(socket, "session.config", stream_audio=True)
        assert read(socket)["code"] == "text_waits"
        send(socket, "input.done")
        assert read_to(socket, "session.done")[0][0]["sentence_text"] == "Hello."


def test_closing_the_connection_ends_the_speech(server):
    with omni(server) as socket:
        send(socket, "session.config", stream_audio=True, max_frames=400)
        send(socket, "input.text", text=TEXT)
        send(socket, "input.done")
        assert read(socket)["type"] == "audio.start" and read(socket)
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")
    assert len(server.watched.streams[0].codes) < 400


def test_flushing_without_reading_has_an_end(synthesizer):
    limits = Limits(buffer_frames=8, socket_bytes=16 * 1024)
    deaf = {"max_queue": 1, "ping_interval": None, "close_timeout": 0.1}  # no ping whose answer it would not see
    with served(synthesizer, limits) as server, omni(server, **deaf) as socket:
        send(socket, "session.config", stream_audio=True, max_frames=2_000)
        for _ in range(30):
            send(socket, "input.text", text=TEXT)
            send(socket, "input.done")
        until(lambda: server.studio.streams_open == 1, "the first to be spoken")
        assert len(server.watched.streams) == 1
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")


def test_an_idle_connection_is_closed(synthesizer):
    with served(synthesizer, Limits(idle_s=0.2)) as server, omni(server) as socket:
        send(socket, "session.config", stream_audio=True, **HOW)
        assert read(socket)["code"] == "idle"
        with pytest.raises(ConnectionClosed):
            read(socket)


def test_a_failure_of_the_model_is_told_where_it_happens(synthesizer, monkeypatch):
    with served(synthesizer) as server, omni(server) as socket:
        codec = synthesizer._models.any().codec
        monkeypatch.setattr(codec, "decode", lambda *_: 1 / 0)
        send(socket, "session.config", stream_audio=True, **HOW)
        send(socket, "input.text", text="Hello.")
        send(socket, "input.done")
        messages, data = read_to(socket, "session.done")
        assert [message["type"] for message in messages] == ["audio.start", "error", "audio.done", "session.done"]
        assert messages[1]["code"] == "engine_error" and messages[2]["error"] and data == b""


@needs("av", "qwen_tts")
def test_a_recording_may_come_in_the_configuration(tiny_base):
    from mktts.synth.cloning import clone_voice

    wav = encoded(tone(3.0, 200.0, peak=0.3), "wav")
    assert len(wav) > Limits().max_body_bytes  # of messages to checkpoints that clone nothing
    recording = f"data:audio/wav;base64,{base64.b64encode(wav).decode()}"
    with Synthesizer.load(tiny_base, engine="single") as synthesizer, served(synthesizer) as server:
        voice = clone_voice(tiny_base, from_pcm16(wav[44:]), SAMPLE_RATE_HZ)
        with omni(server) as socket:
            send(socket, "session.config", ref_audio=recording, stream_audio=True, task_type="Base", **HOW)
            send(socket, "input.text", text="Hello.")
            send(socket, "input.done")
            assert read_to(socket, "session.done")[1] == to_pcm16(synthesizer.say("Hello.", voice=voice, **HOW))


# ---- Nari


def test_naris_documented_session(server, synthesizer, tiny):
    voice = first_speaker(tiny)
    pieces = ["Hello ", "from ", "Nari ", "Labs."]
    with synthesizer.open(speaker=voice, language="english", **HOW) as session:
        for piece in pieces:
            session.feed(piece)
        session.finish()
        expected = to_pcm16(session.read())
    with nari(server) as socket:
        audio = {"encoding": "pcm_s16le", "sample_rate": 24_000, "channels": 1}
        assert read(socket) == {"type": "session.created", "protocol": "nari.speech.v1", "audio": audio}
        model = "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
        send(socket, "request.start", model=model, voice=voice, language="english", do_sample=True, **HOW)
        assert read(socket) == {"type": "request.configured"}
        for sequence, piece in enumerate(pieces):
            send(socket, "input_text.append", sequence=sequence, text=piece)
        send(socket, "input_text.end", sequence=len(pieces))
        messages, pcm = read_to(socket, "response.done")
        with pytest.raises(ConnectionClosed) as closed:
            read(socket)
    assert closed.value.rcvd.code == 1000 and pcm == expected
    acks = [message for message in messages if message["type"] == "input_text.ack"]
    assert [(ack["event"], ack["sequence"]) for ack in acks] == [
        *(("input_text.append", sequence) for sequence in range(len(pieces))),
        ("input_text.end", len(pieces)),
    ]
    assert messages[0]["type"] == "response.started" and messages[0]["audio"] == audio
    assert messages[-1]["stop_reason"] == "stop" and messages[-1]["audio_chunks"] > 0
    assert len({message["request_id"] for message in messages}) == 1


def test_nari_cancels_while_it_writes_and_while_it_listens(server):
    for ended in (False, True):
        with nari(server) as socket:
            send(socket, "request.start", max_frames=2_000)
            send(socket, "input_text.append", sequence=0, text=TEXT)
            if ended:
                send(socket, "input_text.end", sequence=1)
            while not isinstance(read(socket), bytes):
                pass
            send(socket, "response.cancel")
            assert read_to(socket, "response.done")[0][-1]["stop_reason"] == "cancelled"
        until(lambda: server.studio.streams_open == 0, "the stream to be ended")


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([("input_text.append", {"sequence": 0, "text": "early"})], "invalid_request"),
        ([("request.start", {"voice": "nobody"})], "unknown_speaker"),
        ([("request.start", {"temperature": -1})], "invalid_value"),
        ([("request.start", {"response_format": "mp3"})], "invalid_value"),
        ([("request.start", {"ignore_eos": True})], "unsupported_key"),
        ([("request.start", {}), ("input_text.append", {"sequence": 1, "text": "x"})], "invalid_sequence"),
        ([("request.start", {}), ("input_text.append", {"sequence": 0, "text": ""})], "invalid_value"),
        ([("request.start", {}), ("input_text.append", {"sequence": 0, "text": "x" * 5_001})], "text_too_long"),
        ([("request.start", {}), ("input_text.end", {"sequence": 0})], "bad_text"),
        ([("request.start", {}), ("request.start", {})], "unknown_event"),
        ([("sing", {})], "invalid_request"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_naris_mistakes_are_told_and_close_the_connection(server, messages, code):
    with nari(server) as socket:
        for type, fields in messages:
            send(socket, type, **fields)
        error = read_to(socket, "error")[0][-1]
        assert error["error"]["code"] == code and error["server_request_id"]
        with pytest.raises(ConnectionClosed) as closed:
            read(socket)
        assert closed.value.rcvd.code == 1008
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")


def test_nari_wants_its_protocol_by_name(server):
    with nari(server, subprotocols=None) as socket, pytest.raises(ConnectionClosed) as closed:
        read(socket)
    assert closed.value.rcvd.code == 1002


def test_nari_that_writes_nothing_is_let_go(synthesizer):
    with served(synthesizer, Limits(idle_s=0.2)) as server, nari(server) as socket:
        send(socket, "request.start")
        assert read_to(socket, "error")[0][-1]["error"]["code"] == "input_timeout"
        until(lambda: server.studio.streams_open == 0, "the place to be given back")


def test_nari_that_goes_away_leaves_nothing(server):
    with nari(server) as socket:
        send(socket, "request.start", max_frames=2_000)
        send(socket, "input_text.append", sequence=0, text=TEXT)
        while not isinstance(read(socket), bytes):
            pass
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")
