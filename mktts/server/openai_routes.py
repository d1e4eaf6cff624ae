"""The routes of OpenAI's shape: speech, models, voices."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from mktts.audio.encoding import STREAM_FORMATS
from mktts.model.voice import Voice
from mktts.server.access.gate import owner_of_request
from mktts.server.answer import MEDIA_TYPES, AudioAnswer, Body, headers
from mktts.server.document import audio_response, error_responses
from mktts.server.problems import Problem
from mktts.server.references import References
from mktts.server.schemas import ModelCard, ModelList, VoiceList
from mktts.server.speech_request import TASKS, OpenAISpeechRequest
from mktts.server.studio import Studio
from mktts.server.uploads.routes import shown
from mktts.server.voices import DEFAULT, OPENAI_VOICES
from mktts.spec import SAMPLE_RATE_HZ

PREFIX = "/v1/"  # under it the caller's mistakes are 400, as OpenAI's are
SPEECH_PATH = "/v1/audio/speech"
KEYS = {"text": "input", "instruct": "instructions", "speaker": "voice"}  # what callers there call them
_MOST_NAMED = 100  # ignored keys that the log names, each once

log = logging.getLogger(__name__)


def add_openai_routes(
    app: FastAPI, studio: Studio, references: References, locked: list[Any], known: dict[Any, Any], checks: list[Any]
) -> None:
    """locked: the dependencies of routes behind the key. known: their documented refusals. checks: of bodies."""
    started_s = int(time.time())
    named: set[str] = set()
    media = [MEDIA_TYPES[format].format(rate_hz=SAMPLE_RATE_HZ).partition(";")[0] for format in STREAM_FORMATS]

    @app.post(
        SPEECH_PATH,
        response_class=Response,
        dependencies=[*locked, *checks],
        responses={
            200: audio_response(*media, events=True),
            **known,
            **error_responses(400, 408, 413, 415, 429, 500, 503),
        },
    )
    async def openai_speech(body: OpenAISpeechRequest, request: Request) -> Response:
        """OpenAI's speech endpoint, with the keys that vLLM-Omni and SGLang-Omni add for this model. The sound is
        encoded and sent while it is made; a WAV's header then says 0xFFFFFFFF bytes, as its length is not known."""
        ignored = body.ignored()
        _name_once(ignored, named)
        _check_task(body, studio)

        async def usage() -> tuple[int, int]:
            return await asyncio.to_thread(studio.count_tokens, body.input), utterance.frames

        sound = Body(
            body.format,
            speed=1.0 if body.speed is None else body.speed,
            sample_rate_hz=body.sample_rate or SAMPLE_RATE_HZ,
            whole=body.whole,
            as_events=body.events,
            usage=usage,
        )
        owner = owner_of_request(request.scope)
        voice = await _brought(body, studio, references, owner)
        manner = body.manner(studio.limits.max_frames)
        utterance = studio.speak(
            "openai_speech", body.input, manner, voice=voice, layout=body.layout, keys=KEYS, owner=owner
        )
        head = headers(utterance, sound, studio.model.random_weights)
        if ignored:
            head["X-Ignored-Keys"] = ",".join(ignored)
        return AudioAnswer(utterance, sound, head, studio.limits.stall_s)

    def card() -> ModelCard:
        return ModelCard(id=studio.model.checkpoint, created=started_s)

    @app.get("/v1/models", dependencies=locked, responses=known)
    async def models() -> ModelList:
        """The one model there is; requests may call it by any name."""
        return ModelList(data=[card()])

    @app.get("/v1/models/{id:path}", dependencies=locked, responses={**known, **error_responses(404)})
    async def model(id: str) -> ModelCard:
        """The model, by its name."""
        if id != studio.model.checkpoint:
            raise Problem(404, "unknown_model", f"the model here is {studio.model.checkpoint}", "id")
        return card()

    @app.get("/v1/audio/voices", dependencies=locked, responses=known)
    async def voices(request: Request) -> VoiceList:
        """Every name that `voice` may have."""
        folder, owner = studio.uploads, owner_of_request(request.scope)
        uploaded = [] if folder is None else [shown(record) for record in await asyncio.to_thread(folder.list, owner)]
        names = [*studio.speakers, *(voice.name for voice in uploaded)]
        return VoiceList(voices=names, aliases=studio.aliases, uploaded_voices=uploaded)


def _name_once(ignored: list[str], named: set[str]) -> None:
    for key in ignored:
        if key not in named and len(named) < _MOST_NAMED:
            named.add(key)
            log.info("requests have the key %s, which changes nothing here: ignored", key)


def _check_task(body: OpenAISpeechRequest, studio: Studio) -> None:
    task = TASKS[studio.model.type]
    if body.task_type not in (None, task):
        raise Problem(400, "wrong_task", f"task_type: this checkpoint is for {task}, got {body.task_type}", "task_type")


async def _brought(body: OpenAISpeechRequest, studio: Studio, references: References, owner: str) -> Voice | None:
    """The voice of the recording that the request brings or names; None where it does neither. Raises Problem."""
    recording, transcript = body.ref_audio, (body.ref_text or "").strip() or None
    if not recording:
        if transcript is not None:
            raise Problem(400, "bad_reference", "ref_text: there is no ref_audio that says it", "ref_text")
        return None
    if studio.model.type != "base":
        message = f"ref_audio: a {studio.model.type} checkpoint clones no voices; leave it out, or serve a Base one"
        raise Problem(400, "cloning_unavailable", message, "ref_audio")
    if (body.voice or DEFAULT).lower() not in (DEFAULT, *OPENAI_VOICES):
        raise Problem(400, "two_voices", "ref_audio: leave out voice, or this", "ref_audio")
    if (saved := studio.saved_voice(recording[:256], owner)) is not None:
        return saved
    if transcript is not None:
        studio.check_chars(len(transcript), "ref_text")
    if body.x_vector_only_mode:
        transcript = None
    elif body.x_vector_only_mode is False and transcript is None:
        raise Problem(400, "bad_reference", "ref_text: expected what ref_audio says, or x_vector_only_mode", "ref_text")
    studio.admit()  # before the work, not after it
    return await references.voice(recording, transcript)
