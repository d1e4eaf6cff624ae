"""POST and DELETE of /v1/audio/voices."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request

from mktts.errors import BusyError
from mktts.server.access.gate import owner_of_request
from mktts.server.document import error_responses
from mktts.server.problems import Problem
from mktts.server.references import References
from mktts.server.schemas import Deleted, KeptVoice, UploadedVoice
from mktts.server.studio import Studio
from mktts.server.uploads.folder import VoiceFolder
from mktts.server.uploads.form import FORM, JSON, VoiceUpload, read_upload
from mktts.server.uploads.record import UploadRecord

VOICES_PATH = "/v1/audio/voices"
_BINARY = {"type": "string", "format": "binary"}


def add_upload_routes(
    app: FastAPI, studio: Studio, references: References, locked: list[Any], known: dict[Any, Any]
) -> None:
    """locked: the dependencies of routes behind the key. known: their documented refusals."""

    @app.post(
        VOICES_PATH,
        dependencies=locked,
        responses={**known, **error_responses(400, 403, 408, 413, 415, 429, 500, 503)},
        openapi_extra={"requestBody": _request_body()},
    )
    async def upload_voice(request: Request) -> KeptVoice:
        """Keeps the voice of a recording under a name of the caller's, for requests with the caller's key. The
        recording itself is not kept."""
        folder = _folder(studio)
        if not studio.model.clones:
            message = f"a {studio.model.type} checkpoint clones no voices: serve a Base one"
            raise Problem(400, "cloning_unavailable", message)
        upload, recording = await read_upload(request)
        owner, name = owner_of_request(request.scope), upload.name.lower()
        if studio.is_taken(name):
            raise Problem(400, "name_taken", f"name: {name} is a voice of this server's own: take another", "name")
        transcript = (upload.ref_text or "").strip() or None
        if transcript is not None:
            studio.check_chars(len(transcript), "ref_text")
        voice = await references.make(recording.data, transcript, "audio_sample")
        now_s = int(time.time())
        lifetime_s = min(upload.expires_in_s or studio.limits.voice_s, studio.limits.voice_s)
        record = UploadRecord(
            name=name,
            consent=upload.consent,
            created_at=now_s,
            expires_at=now_s + max(1, int(lifetime_s)),
            mime_type=recording.mime_type,
            file_size=len(recording.data),
            ref_text=transcript,
            speaker_description=upload.speaker_description,
        )
        try:
            await asyncio.to_thread(folder.keep, owner, voice, record)
        except BusyError as error:
            raise Problem(400, "too_many_voices", str(error)) from None
        return KeptVoice(id=name, name=name, created_at=now_s, voice=shown(record))

    @app.delete(f"{VOICES_PATH}/{{name}}", dependencies=locked, responses={**known, **error_responses(403, 404)})
    async def delete_voice(name: str, request: Request) -> Deleted:
        """Deletes an uploaded voice of the caller's: on every server that shares the folder, and out of its caches.
        Speech that is on its way goes on."""
        if not await asyncio.to_thread(_folder(studio).delete, owner_of_request(request.scope), name):
            raise Problem(404, "unknown_voice", "you have no voice of this name", "name")
        return Deleted(id=name.lower(), message=f"Voice '{name.lower()}' deleted successfully")


def shown(record: UploadRecord) -> UploadedVoice:
    """The record as its owner sees it."""
    return UploadedVoice(
        name=record.name,
        consent=record.consent,
        created_at=record.created_at,
        expires_at=record.expires_at,
        mime_type=record.mime_type,
        file_size=record.file_size,
        ref_text=record.ref_text,
        speaker_description=record.speaker_description,
    )


def _folder(studio: Studio) -> VoiceFolder:
    if studio.uploads is None:
        raise Problem(403, "uploads_off", "this server keeps no voices: it was started without --voice-folder")
    return studio.uploads


def _request_body() -> dict[str, Any]:
    schema = VoiceUpload.model_json_schema(by_alias=False)
    schema.pop("description", None)
    form = {
        **schema,
        "properties": {**schema["properties"], "audio_sample": {**_BINARY, "description": "the recording"}},
    }
    return {"required": True, "content": {JSON: {"schema": schema}, FORM: {"schema": form}}}
