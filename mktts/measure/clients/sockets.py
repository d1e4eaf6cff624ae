"""WebSocket sessions that other servers document, replayed with the package websockets; and our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mktts.errors import MetricsError
from mktts.measure.clients.documented import NARI, VLLM
from mktts.measure.clients.trial import TEXT, Place, Trial, version_of

_WAIT_S = 120.0


def trials() -> Iterator[Trial]:
    """Over WebSockets."""
    yield Trial(*VLLM, "WebSocket /v1/audio/speech/stream, stream_audio", _omni_pieces)
    yield Trial(*VLLM, "WebSocket /v1/audio/speech/stream, one file", _omni_whole)
    yield Trial(NARI[0], "docs/websocket.md e8c5b2b", "WebSocket nari.speech.v1", _nari)
    yield Trial("websockets (Python)", str(version_of("websockets")), "WebSocket /tts/ws, a word at a time", _ours)


def _omni_pieces(place: Place) -> str:
    return _omni(place, "pcm", stream_audio=True)


def _omni_whole(place: Place) -> str:
    return _omni(place, "wav", stream_audio=False)


def _omni(place: Place, kind: str, *, stream_audio: bool) -> str:
    with _Session(f"{place.ws}/v1/audio/speech/stream") as session:
        config = {"voice": place.speaker, "response_format": kind, "stream_audio": stream_audio}
        session.send({"type": "session.config", **config})
        for word in TEXT.split(" "):
            session.send({"type": "input.text", "text": f"{word} "})
        session.send({"type": "input.done"})
        seen, sound = session.read_to("session.done")
        session.send({"type": "session.close"})
    if [message["type"] for message in seen] != ["audio.start", "audio.done", "session.done"]:
        raise MetricsError(f"expected audio.start, audio.done and session.done, got {seen}")
    return place.check(sound, kind)


def _nari(place: Place) -> str:
    with _Session(f"{place.ws}/v1/audio/speech/ws", ["nari.speech.v1"]) as session:
        session.read_to("session.created")
        session.send({"type": "request.start", "voice": place.speaker, "language": "english"})
        session.read_to("request.configured")
        words = TEXT.split(" ")
        for sequence, word in enumerate(words):
            session.send({"type": "input_text.append", "sequence": sequence, "text": f"{word} "})
        session.send({"type": "input_text.end", "sequence": len(words)})
        seen, sound = session.read_to("response.done")
    if seen[-1]["stop_reason"] != "stop":
        raise MetricsError(f"expected stop, got {seen[-1]}")
    return place.check(sound, "pcm")


def _ours(place: Place) -> str:
    with _Session(f"{place.ws}/tts/ws") as session:
        session.send({"type": "start", "speaker": place.speaker})
        for word in TEXT.split(" "):
            session.send({"type": "text", "text": f"{word} "})
        session.send({"type": "finish"})
        _, sound = session.read_to("finished")
    return place.check(sound, "pcm")


class _Session:
    """A WebSocket."""

    def __init__(self, url: str, subprotocols: list[str] | None = None) -> None:
        from websockets.sync.client import connect

        self._socket = connect(url, subprotocols=subprotocols, max_size=None)  # type: ignore[arg-type]

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message))

    def read_to(self, kind: str) -> tuple[list[dict[str, Any]], bytes]:
        """The messages up to one of this type, and all bytes between them. Raises MetricsError for an error."""
        seen, sound = [], b""
        while not seen or seen[-1]["type"] != kind:
            message = self._socket.recv(timeout=_WAIT_S)
            if isinstance(message, bytes):
                sound += message
                continue
            seen.append(json.loads(message))
            if seen[-1]["type"] == "error":
                raise MetricsError(f"the server says: {message}")
        return seen, sound
