"""`/tts/ws` over real sockets, with the websockets client: text as it is written, cancel, limits, odd messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import TEXT, Served, first_speaker, served, until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mktts.audio import to_pcm16
from mktts.server import Limits
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ

PIECES = ["Hel", "lo the", "re, who", "ever you are.", " Good", " morning."]
WAIT_S = 60


def send(socket: ClientConnection, type: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": type, **fields}))


def deaf(server: Served, **settings: Any) -> ClientConnection:
    """A client that reads as little as it can, for as long as it likes: it would not see the answer to a ping of its
    own behind what it has not read, and hang up."""
    return connect(server.ws, max_queue=1, ping_interval=None, **settings)


def read(socket: ClientConnection) -> dict | bytes:
    message = socket.recv(timeout=WAIT_S)
    return message if isinstance(message, bytes) else json.loads(message)


def read_to_end(socket: ClientConnection) -> tuple[list[dict], bytes, dict]:
    """(chunk notes, PCM, the last message) of the utterance that has started; each note is followed by its PCM."""
    notes, pcm = [], b""
    while True:
        message = read(socket)
        if message["type"] != "chunk":
            return notes, pcm, message
        notes.append(message)
        pcm += read(socket)


def say(socket: ClientConnection, pieces: list[str], **start: Any) -> tuple[list[dict], bytes, dict]:
    send(socket, "start", **start)
    for piece in pieces:
        send(socket, "text", text=piece)
    send(socket, "finish")
    assert read(socket)["type"] == "started"
    return read_to_end(socket)


def test_fed_text_gives_the_sessions_samples_with_timings_and_a_finish_reason(server: Served, synthesizer, tiny):
    with synthesizer.open(speaker=first_speaker(tiny), seed=5, max_frames=12) as session:
        for piece in PIECES:
            session.feed(piece)
        session.finish()
        expected = to_pcm16(session.read())
    with connect(server.ws) as socket:
        send(socket, "start", seed=5, max_frames=12)
        started = read(socket)
        assert (started["type"], started["seed"], started["sample_rate_hz"]) == ("started", 5, SAMPLE_RATE_HZ)
        for piece in PIECES:
            send(socket, "text", text=piece)
        send(socket, "finish")
        notes, pcm, finished = read_to_end(socket)
    assert pcm == expected
    assert (finished["type"], finished["finish_reason"], finished["frames"]) == ("finished", "max_frames", 12)
    assert finished["audio_s"] == pytest.approx(12 / FRAME_RATE_HZ) and finished["id"] == started["id"]
    assert sum(note["frames"] for note in notes) == 12
    ends = [note["start_s"] + note["duration_s"] for note in notes]
    assert [note["start_s"] for note in notes] == pytest.approx([0.0, *ends[:-1]])
    assert all(note["timings"]["ready_ms"] > 0 and note["id"] == started["id"] for note in notes)


def test_text_in_the_start_is_spoken_as_a_known_one(server: Served, synthesizer, tiny):
    with connect(server.ws) as socket:
        send(socket, "start", text="Hello there.", seed=5, max_frames=6)
        assert read(socket)["type"] == "started"
        _, pcm, finished = read_to_end(socket)
    assert finished["finish_reason"] == "max_frames"
    assert pcm == to_pcm16(synthesizer.say("Hello there.", speaker=first_speaker(tiny), seed=5, max_frames=6))


def test_what_was_sent_for_a_refused_start_is_dropped(server: Served):
    with connect(server.ws) as socket:
        send(socket, "start", speaker="nobody")
        send(socket, "text", text="Hello.")
        send(socket, "finish")
        send(socket, "cancel")
        assert read(socket)["error"]["code"] == "unknown_speaker"
        assert say(socket, PIECES, max_frames=2)[2]["finish_reason"] == "max_frames"


def test_audio_comes_before_the_text_is_complete(server):
    with connect(server.ws) as socket:
        send(socket, "start", seed=5, max_frames=400)
        send(socket, "text", text=TEXT)
        assert [read(socket)["type"] for _ in range(2)] == ["started", "chunk"]
        assert isinstance(read(socket), bytes)
        send(socket, "cancel")


def test_several_utterances_share_a_connection(server):
    with connect(server.ws) as socket:
        first = say(socket, PIECES, seed=1, max_frames=4)
        second = say(socket, PIECES, seed=1, max_frames=4)
    assert first[1] == second[1] and first[2]["id"] != second[2]["id"]


def test_cancel_ends_the_generation_within_one_frame_and_a_new_start_need_not_wait(server):
    with connect(server.ws) as socket:
        send(socket, "start", seed=1, max_frames=400)
        send(socket, "text", text=TEXT)
        first = read(socket)
        read(socket), read(socket)
        send(socket, "cancel")
        send(socket, "start", seed=2, max_frames=3)
        send(socket, "text", text="Hello there.")
        send(socket, "finish")
        _, _, finished = read_to_end(socket)
        assert (finished["id"], finished["finish_reason"]) == (first["id"], "cancelled")
        started = read(socket)
        notes, _, finished = read_to_end(socket)
    assert {note["id"] for note in notes} == {started["id"]} != {first["id"]}
    assert finished["finish_reason"] == "max_frames"
    assert server.watched.wasted_frames(server.watched.streams[0]) <= 1


def test_closing_the_connection_ends_the_generation_within_one_frame(server):
    with connect(server.ws) as socket:
        send(socket, "start", max_frames=400)
        send(socket, "text", text=TEXT)
        read(socket), read(socket), read(socket)
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")
    assert server.watched.wasted_frames(server.watched.streams[0]) <= 1


def test_cancel_is_heard_while_the_client_does_not_read(synthesizer):
    limits = Limits(buffer_frames=8, socket_bytes=16 * 1024)
    with served(synthesizer, limits) as server, deaf(server) as socket:
        send(socket, "start", max_frames=2_000)
        send(socket, "text", text=TEXT)
        until(lambda: server.watched.streams, "the stream to be opened")
        server.watched.frames_at_pause(server.watched.streams[0])
        send(socket, "cancel")
        until(lambda: server.studio.streams_open == 0, "the stream to be ended")
        read(socket)
        finished = read_to_end(socket)[2]
        assert finished["finish_reason"] == "cancelled", finished["error"]


def test_what_is_wrong_with_a_start_is_told_and_the_connection_goes_on(server):
    with connect(server.ws) as socket:
        for start, code in (
            ({"speaker": "nobody"}, "unknown_speaker"),
            ({"max_frames": 10**6}, "duration_too_long"),
            ({"language": "klingon"}, "bad_prompt"),
        ):
            send(socket, "start", **start)
            answer = read(socket)
            assert (answer["type"], answer["error"]["code"]) == ("error", code)
        assert say(socket, PIECES, max_frames=2)[2]["finish_reason"] == "max_frames"


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([("text", {"text": "x" * 5_001})], "text_too_long"),
        ([("text", {"text": "x" * 3_000}), ("text", {"text": "x" * 3_000})], "text_too_long"),
        ([("text", {"text": " \n"}), ("finish", {})], "bad_text"),
        ([("finish", {})], "bad_text"),
    ],
    ids=["one long text", "two that are too long together", "only blanks", "none"],
)
def test_text_that_cannot_be_spoken_ends_the_utterance_and_not_the_connection(server, messages, code):
    with connect(server.ws) as socket:
        send(socket, "start", max_frames=4_000)
        for type, fields in messages:
            send(socket, type, **fields)
        assert read(socket)["type"] == "started"
        _, _, finished = read_to_end(socket)
        assert (finished["finish_reason"], finished["error"]["code"]) == ("error", code)
        assert say(socket, PIECES, max_frames=2)[2]["finish_reason"] == "max_frames"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "invalid_json"),
        ('{"type": "sing"}', "invalid_value"),
        ('{"type": "start", "sped": 2}', "invalid_value"),
        ('{"type": "text", "text": 1}', "invalid_value"),
        ('{"type": "text", "text": "early"}', "not_started"),
        (b"\x00\x01", "not_text"),
        ("[" * 50_000, "invalid_json"),
    ],
    ids=["no json", "unknown type", "unknown key", "no text", "text before start", "binary", "deep"],
)
def test_a_message_that_makes_no_sense_is_told_and_closes_the_connection(server, message, code):
    with connect(server.ws) as socket:
        socket.send(message)
        answer = read(socket)
        assert (answer["type"], answer["error"]["code"]) == ("error", code)
        with pytest.raises(ConnectionClosed) as closed:
            read(socket)
        assert closed.value.rcvd.code == 1008


@pytest.mark.parametrize("key", ["speaker", "sped"])
def test_the_wrong_key_of_a_message_is_called_as_it_was_sent(server, key):
    with connect(server.ws) as socket:
        send(socket, "start", **{key: 2})
        error = read(socket)["error"]
        assert error["param"] == key and error["message"].startswith(f"{key}: ")


def test_a_second_start_before_the_end_of_the_first_is_refused_and_nothing_stays_open(server):
    with connect(server.ws) as socket:
        send(socket, "start", max_frames=400)
        send(socket, "text", text=TEXT)
        send(socket, "start")
        with pytest.raises(ConnectionClosed):
            while True:
                read(socket)
    until(lambda: server.studio.streams_open == 0, "the stream to be ended")


def test_a_message_over_the_size_limit_closes_the_connection(server):
    with connect(server.ws) as socket:
        socket.send("x" * 200_000)
        with pytest.raises(ConnectionClosed) as closed:
            read(socket)
        assert closed.value.rcvd.code == 1009


def test_starting_and_cancelling_without_reading_has_an_end(synthesizer):
    limits = Limits(buffer_frames=8, socket_bytes=16 * 1024)
    with served(synthesizer, limits) as server, deaf(server, close_timeout=0.1) as socket:
        send(socket, "start", max_frames=2_000)
        send(socket, "text", text=TEXT)
        until(lambda: server.watched.streams, "the stream to be opened")
        until(lambda: len(server.watched.streams[0].codes) > limits.buffer_frames, "chunks on the socket")
        for _ in range(20):
            send(socket, "cancel")
            send(socket, "start", max_frames=2_000)
        until(lambda: server.studio.streams_open == 0, "the connection to be given up")
        assert len(server.watched.streams) < 20


def test_an_utterance_that_waits_for_text_too_long_gives_its_place_back(synthesizer):
    with served(synthesizer, Limits(idle_s=0.2)) as server, connect(server.ws) as socket:
        send(socket, "start")
        assert read(socket)["type"] == "started"
        finished = read_to_end(socket)[2]
        assert (finished["finish_reason"], finished["error"]["code"]) == ("error", "idle")
        assert server.studio.streams_open == 0
        assert socket.ping().wait(WAIT_S)


def test_one_stream_too_many_is_told_to_come_back(synthesizer):
    limits = Limits(max_streams=1, wait_s=0.1)
    with served(synthesizer, limits) as server, connect(server.ws) as one, connect(server.ws) as other:
        send(one, "start", text=TEXT, max_frames=5_000)
        assert read(one)["type"] == "started"
        for text in ({"text": TEXT}, {}):  # the whole text, and one that is still being written
            send(other, "start", **text)
            if not text:
                assert read(other)["type"] == "started"
                send(other, "text", text=TEXT)
                send(other, "finish")
            answer = read(other)
            assert answer["error"]["code"] == "busy" and answer["error"]["streams_max"] == 1
            assert answer["type"] == ("error" if text else "finished")
            assert not text or answer["retry_after_s"] >= 1
        send(one, "cancel")
        assert read_to_end(one)[2]["finish_reason"] == "cancelled"
        assert say(other, PIECES, max_frames=2)[2]["finish_reason"] == "max_frames"
