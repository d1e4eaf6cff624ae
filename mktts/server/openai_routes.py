"""The routes of OpenAI's shape: speech, models, voices."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from mktts.audio.encoding import STREAM_FORMATS
from mktts.server.access.gate import owner_of_request
from mktts.server.answer import MEDIA_TYPES, AudioAnswer, headers
from mktts.server.document import audio_response, error_responses
from mktts.server.problems import Problem
from mktts.server.schemas import ModelCard, ModelList, VoiceList
from mktts.server.speaking import Speaking
from mktts.server.speech_request import OpenAISpeechRequest
from mktts.server.studio import Studio
from mktts.server.uploads.routes import shown
from mktts.spec import SAMPLE_RATE_HZ

PREFIX = "/v1/"  # under it the caller's mistakes are 400, as OpenAI's are
SPEECH_PATH = "/v1/audio/speech"


def add_openai_routes(
    app: FastAPI, studio: Studio, speaking: Speaking, locked: list[Any], known: dict[Any, Any], checks: list[Any]
) -> None:
    """locked: the dependencies of routes behind the key. known: their documented refusals. checks: of bodies."""
    started_s = int(time.time())
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
        begun = await speaking.begin(body, owner_of_request(request.scope), "openai_speech")
        head = headers(begun.utterance, begun.sound, studio.model.random_weights)
        if begun.ignored:
            head["X-Ignored-Keys"] = ",".join(begun.ignored)
        return AudioAnswer(begun.utterance, begun.sound, head, studio.limits.stall_s)

    def card() -> ModelCard:
        return ModelCard(id=studio.model.checkpoint, created=started_s)

    @app.get("/v1/models", dependencies=locked, responses=known)
    async def models() -> ModelList:
        """The one model there is; requests may call it by any name."""
        return ModelList(data=[card()])

    @app.get("/v1/audio/models", dependencies=locked, include_in_schema=False)
    async def audio_models() -> dict[str, Any]:
        """As Open WebUI asks for them."""
        return {"models": [{"id": studio.model.checkpoint, "name": studio.model.checkpoint}]}

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
        uploads = folder is not None and studio.model.clones
        names = [*studio.speakers, *(voice.name for voice in uploaded)]
        return VoiceList(voices=names, aliases=studio.aliases, uploaded_voices=uploaded, uploads=uploads)
