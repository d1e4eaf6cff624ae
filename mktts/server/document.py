"""The OpenAPI document: FastAPI's, with what the checkpoint and the limits add, and without what cannot happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mktts.server.schemas import DEFAULT, ErrorBody
from mktts.spec import LANGUAGE_CODES, SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.server.service import SpeechService

_DESCRIPTION = f"""Qwen3-TTS speech, streamed frame by frame: 16-bit PCM at {SAMPLE_RATE_HZ} Hz, one channel.

**Finish reason.** `X-Request-Id` is the id under which `GET /tts/stream/{{id}}` says how a response's stream ended:
`eos` (the text was spoken), `max_frames` (the limit), `runaway` (the model lost the end), `cancelled`, `error`. The
record is complete before the last byte of the body is sent. A body that breaks off without its last chunk is not whole.

**A slow reader** stops the generation until it reads on. **Closing the connection** cancels it within one frame.

**WebSocket** `/tts/ws`, for text that is still being written. Messages of the client, JSON:
`{{"type": "start", ...}}` with the keys of `POST /tts/stream`, of which `text` is left out where it is still being
written; then `{{"type": "text", "text": "..."}}` any number of times; `{{"type": "finish"}}`; `{{"type": "cancel"}}` at
any time. Of the server: `started` (id, seed, format), then for each chunk a `chunk` (id, start_s, duration_s, frames,
timings in ms; with `word_timestamps` also `words` that were said before, each with `word`, `start_s`, `end_s`) followed
by one binary message of PCM, then `finished` (what `GET /tts/stream/{{id}}` says, with all words). Another
`start` may follow on the same connection, once `finished` has come or, after `cancel`, at once. A refused `start` is
answered by `error`; what was sent for it is dropped. A message that makes no sense is answered by `error` and the
connection is closed with 1008. With a key, a page may open it with `?key=KEY`.

**Errors** have one shape, OpenAI's, and the id of their request: in `X-Request-Id` and in the body."""
AUDIO_HEADERS = {
    "X-Request-Id": "for GET /tts/stream/{id}",
    "X-Seed": "repeats this draw",
    "X-Sample-Rate-Hz": "of the samples",
    "X-Sample-Format": "s16le: signed 16 bits, little endian; or the name of the format that holds them",
    "X-Random-Weights": "true: the audio is noise, not speech",
}
ERRORS = {  # of every route: the shape is the same everywhere
    "4XX": {"description": "The caller's mistake, or a server with too much to do (429).", "model": ErrorBody},
    "5XX": {"description": "The server's own, or that it stops (503).", "model": ErrorBody},
}


def audio_response(*media_types: str) -> dict[str, Any]:
    """FastAPI's entry for a streamed body and its headers."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    binary = {"type": "string", "format": "binary"}
    text = {"type": "string"}
    return {
        "description": "Audio, sent while it is made.",
        "content": {kind: {"schema": event if kind == "text/event-stream" else binary} for kind in media_types},
        "headers": {
            name: {"description": meaning, "required": True, "schema": text} for name, meaning in AUDIO_HEADERS.items()
        },
    }


def describe(document: dict[str, Any], service: SpeechService) -> None:
    """Adds to FastAPI's document what `service` serves."""
    document["info"]["description"] = _DESCRIPTION
    schemas = document["components"]["schemas"]
    speech, openai = schemas["SpeechRequest"]["properties"], schemas["OpenAISpeechRequest"]["properties"]
    codes = [code for code, name in LANGUAGE_CODES.items() if name in service.languages]
    for properties, text, instruct in ((speech, "text", "instruct"), (openai, "input", "instructions")):
        properties[text]["maxLength"] = service.limits.max_chars
        _narrow(properties["language"], enum=[*service.languages, *codes])  # a region may follow a code
        _narrow(properties["max_frames"], maximum=service.limits.max_frames)
        if service.takes_instruct:
            _narrow(properties[instruct], maxLength=service.limits.max_chars)
        else:  # it would be refused or ignored, whatever it says
            del properties[instruct]
    _narrow(speech["speaker"], enum=service.speakers)
    name = {"type": "string", "enum": [*service.speakers, *service.aliases, DEFAULT]}
    as_object = {"type": "object", "properties": {"id": name}, "required": ["id"], "additionalProperties": False}
    openai["voice"] = {"description": openai["voice"]["description"], "anyOf": [name, as_object, {"type": "null"}]}


def _narrow(schema: dict[str, Any], **limit: Any) -> None:
    """Adds a limit to a schema, or to the part of an optional value's that is not null."""
    next((part for part in schema.get("anyOf", ()) if part["type"] != "null"), schema).update(limit)
