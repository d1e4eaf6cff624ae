"""What a caller uploads, as a form or as JSON."""

from __future__ import annotations

import base64
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.exceptions import StarletteHTTPException
from pydantic import AliasChoices, Field, ValidationError

from mktts.server.problems import Problem, from_validation
from mktts.server.references import from_base64
from mktts.server.schemas import StrictModel
from mktts.server.uploads.record import name_of

FORM, JSON = "multipart/form-data", "application/json"
_RECORDINGS = ("audio_sample", "file", "audio")  # what OpenAI and vLLM-Omni call it, and what else comes
_MAX_FIELDS, _MAX_FIELD_BYTES = 16, 32 * 1024
_DEFAULT_TYPE = "application/octet-stream"


class VoiceUpload(StrictModel):
    """Body of POST /v1/audio/voices as JSON. A form has the same keys, and `audio_sample` as a file."""

    name: str = Field(min_length=1, max_length=64, description="letters, digits, _ . and -, in any case")
    consent: str = Field(
        min_length=1,
        max_length=2_000,
        description="a statement that the speaker agrees, or the id of one; kept with its time",
    )
    audio_sample: str = Field(
        validation_alias=AliasChoices(*_RECORDINGS), description="the recording, base64 or a data: URL"
    )
    ref_text: str | None = Field(None, description="what is said in it; left out: the speaker's sound alone")
    speaker_description: str | None = Field(None, max_length=2_000)
    language: str | None = Field(None, description="changes nothing: a voice speaks every language")
    expires_in_s: int | None = Field(None, ge=1, description="until it is deleted; left out: the server's limit")


@dataclass(frozen=True)
class Recording:
    data: bytes
    mime_type: str


async def read_upload(request: Request) -> tuple[VoiceUpload, Recording]:
    """The upload in a request, as a form or as JSON. Raises Problem."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        fields, recording = await _form(request)
    elif kind == JSON:
        fields, recording = await _json(request), None
    else:
        message = f"expected the header Content-Type: {FORM} or {JSON}, got {kind or 'none'}"
        raise Problem(415, "not_a_form", message, "Content-Type")
    try:
        upload = VoiceUpload.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors(include_input=False)) from None
    if recording is None:
        head, _, text = upload.audio_sample.partition(",")
        as_url = head[:5].lower() == "data:" and text
        mime_type = head[5:].partition(";")[0] if as_url else ""
        data = from_base64(text if as_url else upload.audio_sample, "audio_sample")
        recording = Recording(data, mime_type or _DEFAULT_TYPE)
    if name_of(upload.name) is None:
        message = "name: expected letters, digits, _ . and -, the first a letter or a digit"
        raise Problem(400, "bad_name", message, "name")
    if not upload.consent.strip():
        raise Problem(400, "no_consent", "consent: expected a statement that the speaker agrees, got blanks", "consent")
    if not recording.data:
        raise Problem(400, "bad_reference", "audio_sample: expected a recording, got nothing", "audio_sample")
    return upload, recording


async def _json(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError):
        raise Problem(400, "invalid_json", "expected JSON, could not read it") from None


async def _form(request: Request) -> tuple[dict[str, Any], Recording | None]:
    if importlib.util.find_spec("python_multipart") is None:
        message = (
            "this server reads no forms (it lacks the package python-multipart): send JSON, the recording in base64"
        )
        raise Problem(400, "no_forms", message)
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    except StarletteHTTPException as error:
        raise Problem(400, "bad_form", f"could not read the form: {error.detail}") from None
    fields: dict[str, Any] = {}
    recording = None
    for key, value in form.multi_items():
        if not isinstance(value, str):
            if key not in _RECORDINGS:
                raise Problem(400, "bad_form", f"expected the file under audio_sample, got it under {key[:40]!r}")
            recording = Recording(await value.read(), (value.content_type or _DEFAULT_TYPE)[:100])
            fields["audio_sample"] = base64.b64encode(b"").decode()
        elif key == "expires_in_s" and value.isdecimal() and len(value) < 12:
            fields[key] = int(value)
        elif key != "type" or value != "audio_sample":  # OpenAI's name for this way of making a voice
            fields[key] = value
    return fields, recording
