"""The OpenAPI document: FastAPI's, with what the checkpoint and the limits add, and without what cannot happen."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mktts.server.limits import Limits
from mktts.server.schemas import ErrorBody, ErrorDetail
from mktts.server.studio import Studio
from mktts.server.voices import DEFAULT
from mktts.spec import LANGUAGE_CODES, SAMPLE_RATE_HZ

TITLE = "mktts"
DESCRIPTION = f"""Qwen3-TTS speech, streamed frame by frame: 16-bit PCM at {SAMPLE_RATE_HZ} Hz, one channel.

**Finish reason.** `X-Request-Id` is the id under which `GET /tts/stream/{{id}}` says how a response's stream ended:
`eos` (the text was spoken), `max_frames` (the limit), `runaway` (the model lost the end), `cancelled`, `error`. The
record is complete before the last byte of the body is sent. A body that breaks off without its last chunk is not whole.

**A slow reader** stops the generation until it reads on. **Closing the connection** cancels it within one frame.

**WebSocket** `/tts/ws`, for text that is still being written. Messages of the client, JSON:
`{{"type": "start", ...}}` with the keys of `POST /tts/stream`, of which `text` is left out where it is still being
written; then `{{"type": "text", "text": "..."}}` any number of times; `{{"type": "finish"}}`; `{{"type": "cancel"}}` at
any time. Of the server: `started` (id, seed, format), then for each chunk a `chunk` (id, start_s, duration_s, frames,
timings in ms) followed by one binary message of PCM, then `finished` (what `GET /tts/stream/{{id}}` says). Another
`start` may follow on the same connection, once `finished` has come or, after `cancel`, at once. A refused `start` is
answered by `error`; what was sent for it is dropped. A message that makes no sense is answered by `error` and the
connection is closed with 1008.

`/v1/audio/speech/stream` is vLLM-Omni's WebSocket (`session.config`, `input.text`, `input.done`, `session.close`), and
`/v1/audio/speech/ws` Nari's (`nari.speech.v1`). With a key, a page may open any of them with `?key=KEY`, or offer the
subprotocols `mktts` and `mktts.key.` followed by the key in base64url.

**Errors** have one shape, OpenAI's, and the id of their request: in `X-Request-Id` and in the body."""


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for errors: the shape is the same everywhere."""
    meaning = {
        400: "The request makes no sense.",
        401: "The key is missing or wrong.",
        403: "A web page from elsewhere, another name than the server's, or something that it was not started with.",
        404: "No such stream.",
        413: "The body is too large.",
        415: "The body does not say that it is JSON.",
        422: "A value is missing, of the wrong type, over a limit, or not of this checkpoint.",
        500: "The generation failed.",
        408: "The body did not come in time.",
        429: "Every place is taken for now; streams_max says of how many.",
        503: "The server is stopping.",
    }
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}
    return {status: {"description": meaning[status], "content": body} for status in statuses}


def audio_response(*media_types: str, events: bool = False) -> dict[str, Any]:
    """FastAPI's entry for a streamed body and its headers. events: it may come in server-sent events too."""
    header = {
        "X-Request-Id": "for GET /tts/stream/{id}",
        "X-Seed": "repeats this draw",
        "X-Sample-Rate-Hz": "of the samples",
        "X-Sample-Rate": "the same",
        "X-Sample-Format": "s16le: signed 16 bits, little endian; or the name of the format that holds them",
        "X-Channels": "always 1",
        "X-Random-Weights": "true: the audio is noise, not speech",
    }
    content: dict[str, Any] = {
        media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in media_types
    }
    if events:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return {
        "description": "Audio, sent while it is made.",
        "content": content,
        "headers": {
            name: {"description": text, "required": True, "schema": {"type": "string"}} for name, text in header.items()
        },
    }


def describe(app: FastAPI, studio: Studio) -> dict[str, Any]:
    """The document of `app` serving `studio`."""
    document = get_openapi(title=TITLE, version=app.version, description=DESCRIPTION, routes=app.routes)
    schemas = document["components"]["schemas"]
    limits, speakers = studio.limits, studio.speakers
    speech, openai = schemas["SpeechRequest"]["properties"], schemas["OpenAISpeechRequest"]["properties"]
    for properties, text in ((speech, "text"), (openai, "input")):
        properties[text]["maxLength"] = limits.max_chars
        _set_languages(properties["language"], studio.languages)
        _narrow(properties["max_frames"], maximum=limits.max_frames)
    for properties, instruct in ((speech, "instruct"), (openai, "instructions")):
        if not studio.takes_instruct:  # it would be refused whatever it says
            properties.pop(instruct, None)
        elif instruct in properties:
            _narrow(properties[instruct], maxLength=limits.max_chars)
    speech["speaker"] = {**_only_description(speech["speaker"]), "enum": [*speakers, None]}
    openai["voice"] = {
        **_only_description(openai["voice"]),
        "anyOf": _voices([*speakers, *studio.aliases, DEFAULT]),
    }
    for shape in (ErrorBody, ErrorDetail):
        schemas[shape.__name__] = shape.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas[shape.__name__].pop("$defs", None)
    _drop_impossible(document)
    return document


def _set_languages(schema: dict[str, Any], languages: list[str]) -> None:
    """Their names, then their codes; a code may have a region behind it, which no enumeration can hold."""
    spoken = [*languages, *(code for code, name in LANGUAGE_CODES.items() if name in languages)]
    if "anyOf" in schema:
        _narrow(schema, enum=spoken)
    else:
        schema["enum"] = spoken


def _voices(names: list[str]) -> list[dict[str, Any]]:
    name = {"type": "string", "enum": names}
    as_object = {"type": "object", "properties": {"id": name}, "required": ["id"], "additionalProperties": False}
    return [name, as_object, {"type": "null"}]


def _narrow(schema: dict[str, Any], **limit: Any) -> None:
    """Adds a limit to the part of an optional value's schema that is not null."""
    next(part for part in schema["anyOf"] if part["type"] != "null").update(limit)


def _only_description(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": schema["description"]}


def _drop_impossible(document: dict[str, Any]) -> None:
    """FastAPI documents a 422 in its own shape for every operation with parameters; here some have none."""
    for operations in document["paths"].values():
        for operation in operations.values():
            answer = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
            if answer.get("schema", {}).get("$ref", "").endswith("/HTTPValidationError"):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def text_page(limits: Limits, carries: int) -> str:
    """GET /: where things are."""
    return f"""mktts: text in, {SAMPLE_RATE_HZ} Hz 16-bit PCM out while it is made.

POST /tts/stream        {{"text": "..."}} -> raw PCM
GET  /tts/stream/ID     how that stream ended
POST /v1/audio/speech   OpenAI's shape -> mp3, opus, aac, flac, wav or pcm
GET  /v1/models  /v1/audio/voices
POST /v1/audio/voices   a recording and a statement of consent -> a voice, where the server keeps them
WS   /tts/ws            text while it is written -> PCM and timings
WS   /v1/audio/speech/stream  /v1/audio/speech/ws    as vLLM-Omni and Nari speak them
GET  /health  /ready  /metrics  /openapi.json  /docs

About {carries} streams at once, {limits.max_chars} characters and {limits.max_duration_s:g} s each at most.
"""
