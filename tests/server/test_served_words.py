"""Word times over HTTP and the WebSocket: the words of the stream, each once, in the time of what is played."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from mktts.audio import to_pcm16
from mktts.server.service import KEPT_WORDS

FRAMES = 40
WORDS = [
    {"word": f"word {number}", "start_s": start_s, "end_s": start_s + 0.08, "estimated": True}
    for number, start_s in enumerate((0.32 * i for i in range(10)), 1)
]


def near(found: list[dict[str, Any]], speed: float = 1.0) -> bool:
    times = ("start_s", "end_s")
    played = [{**word, **{name: word[name] / speed for name in times}} for word in WORDS]
    return [{**word, **{name: pytest.approx(word[name], abs=0.001) for name in times}} for word in played] == found


@pytest.mark.parametrize("speed", [1.0, 1.6])
def test_events_have_the_words_each_once_beside_the_same_sound(api, speed):
    if speed != 1:
        pytest.importorskip("av")
    how = {"stream_format": "sse", "speed": speed, "max_frames": FRAMES, "seed": 1}
    plain, timed = (api.speech(word_timestamps=asked, **how) for asked in (False, True))
    events = [[json.loads(line[6:]) for line in answer.text.split("\n\n") if line] for answer in (plain, timed)]
    assert near([word for event in events[1] for word in event.get("words", [])], speed)
    assert events[1][-1]["type"] == "speech.audio.done" and events[1][-2]["type"] == "speech.audio.words"
    sound = [b"".join(base64.b64decode(event["audio"]) for event in of if "audio" in event) for of in events]
    assert sound[0] == sound[1] and not any("words" in event for event in events[0])


def test_where_words_have_no_place_they_are_ignored_or_refused(api):
    answer = api.speech(word_timestamps=True)
    assert answer.status_code == 200 and answer.headers["X-Mktts-Ignored"] == "word_timestamps"
    assert not api.synth.streams[-1].settings["options"].word_times
    refused = api.speech(word_timestamps=True, strict=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "word_timestamps"


def test_the_websocket_sends_words_with_chunks_and_all_of_them_at_the_end(api):
    for asked in (True, False):
        with api.open_socket() as socket:
            socket.send_json(
                {"type": "start", "text": "Hi.", "max_frames": FRAMES, "seed": 1, "word_timestamps": asked}
            )
            messages, sound = [socket.receive_json()], b""
            while messages[-1]["type"] != "finished":
                messages.append(socket.receive_json())
                if messages[-1]["type"] == "chunk":
                    sound += socket.receive_bytes()
        *chunks, finished = messages[1:]
        assert sound == to_pcm16(api.synth.streams[-1].sound)
        if not asked:
            assert finished["words"] is None and not any("words" in chunk for chunk in chunks)
            continue
        assert near(finished["words"])
        of_chunks = [word for chunk in chunks for word in chunk["words"]]
        assert of_chunks == finished["words"][: len(of_chunks)] and len(of_chunks) == len(WORDS) - 1


def test_the_record_has_the_words_of_the_last_streams_only(api):
    ids = [api.tts(max_frames=FRAMES, word_timestamps=True).headers["X-Request-Id"]]
    assert near(api.get(f"/tts/stream/{ids[0]}").json()["words"])
    ids += [api.tts().headers["X-Request-Id"] for _ in range(KEPT_WORDS)]
    first, *others = (api.get(f"/tts/stream/{id}").json() for id in ids)
    assert first["words"] is None and first["frames"] == FRAMES
    assert [other["words"] for other in others] == [None] * KEPT_WORDS
