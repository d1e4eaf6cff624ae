"""The routes of OpenAI's shape: speech, models, voices, and the voices of recordings that requests bring."""

import asyncio
import base64
import hashlib
import re
import time
from collections import OrderedDict
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import Response

from mktts.audio.encoding import STREAM_FORMATS, Encoder
from mktts.audio.untrusted import decode_untrusted
from mktts.errors import BackendUnavailable, MkttsError
from mktts.model.voice import Voice
from mktts.server.api_errors import ApiError
from mktts.server.audio_response import MEDIA_TYPES, AudioResponse, KeptSounds, documented
from mktts.server.schemas import DEFAULT, OpenAISpeechQuery, OpenAISpeechRequest, UploadedVoice, VoiceUpload
from mktts.server.service import SpeechService
from mktts.server.settings import DAY_S, LOOPBACK_ORIGIN
from mktts.server.voices import OPENAI_VOICES, VoiceFolder
from mktts.spec import MODEL_TYPES, SAMPLE_RATE_HZ
from mktts.synth.cloning import clone_voice

PREFIX = "/v1/"  # under it the caller's mistakes are 400, as OpenAI's are
SPEECH_PATH = "/v1/audio/speech"
VOICES_PATH = "/v1/audio/voices"
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\s-]+={0,2}\s*")
_SHORTEST_BASE64 = 64  # characters; a WAV's header alone has 60
_MAX_KEY_CHARS = 40  # of an unknown key in an answer


def wrong(code: str, key: str, what: str) -> ApiError:
    """A mistake in one key of a request, whose name begins the message."""
    return ApiError(400, code, f"{key}: {what}", key)


async def no_foreign_element(request: Request) -> None:
    """Raises ApiError 403 for an element or a link of a page from elsewhere: its GET brings no Origin to be checked,
    and would let any page make this machine speak. Pages of this machine are same-site to it."""
    here = ("same-origin", "none")
    if re.fullmatch(LOOPBACK_ORIGIN, f"http://{request.headers.get('host', '')}"):
        here += ("same-site",)
    if "origin" not in request.headers and request.headers.get("sec-fetch-site", "none") not in here:
        message = "pages from elsewhere need --allow-origin, and their elements crossorigin"
        raise ApiError(403, "foreign_origin", message)


class References:
    """Makes voices of recordings, one at a time, in a thread; keeps the last ones that requests brought."""

    def __init__(self, service: SpeechService) -> None:
        limits = service.limits
        self._service = service
        self._decoding = limits.max_reference_bytes, limits.max_reference_s, limits.reference_decode_s
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._lock = asyncio.Lock()

    async def make(self, data: bytes, transcript: str | None, key: str = "ref_audio") -> Voice:
        """The voice of a recording's bytes, which is not kept here, in-context where `transcript` is given. key: what
        the caller calls it. Raises ApiError."""
        service, said = self._service, (transcript or "").strip() or None
        if not service.model.clones:
            what = f"a {service.model.type} checkpoint clones no voices: serve a Base one"
            raise wrong("cloning_unavailable", key, what)
        service.check_chars(len(said or ""), "ref_text")
        service.admit()  # before the work, not after it

        def made() -> Voice:
            pcm, rate_hz = decode_untrusted(data, *self._decoding)
            return clone_voice(service.checkpoint, pcm, rate_hz, said)

        try:
            async with self._lock:
                return await asyncio.to_thread(made)
        except MkttsError as error:
            unable = isinstance(error, BackendUnavailable)
            raise wrong("cloning_unavailable" if unable else "bad_reference", key, str(error)) from None

    async def brought(self, body: OpenAISpeechRequest, owner: str) -> Voice:
        """The voice of the recording that a request brings, the same one again for the same one, or of the name that it
        has in its place. Raises ApiError."""
        recording, transcript = body.ref_audio, (body.ref_text or "").strip() or None
        if not recording:
            raise wrong("bad_reference", "ref_text", "there is no ref_audio that says it")
        if (body.speaker or DEFAULT).lower() not in (DEFAULT, *OPENAI_VOICES):
            raise wrong("two_voices", "ref_audio", "leave out voice, or this")
        if (saved := self._service.saved_voice(recording[:256], owner)) is not None:
            return saved
        if body.x_vector_only_mode is False and transcript is None:
            raise wrong("bad_reference", "ref_text", "expected what ref_audio says, or x_vector_only_mode")
        if body.x_vector_only_mode:
            transcript = None
        data = await asyncio.to_thread(_read, recording)
        key = hashlib.sha256(data + repr(transcript).encode()).hexdigest()
        if key not in self._voices:
            self._voices[key] = await self.make(data, transcript)
        self._voices.move_to_end(key)
        while len(self._voices) > self._service.limits.kept_voices:
            self._voices.popitem(last=False)
        return self._voices[key]


def _read(recording: str) -> bytes:
    """The bytes of a recording as a request brings it: base64 of either alphabet, with or without its padding. A server
    that opened what a request names could be sent to files and addresses that only it can reach. Raises ApiError."""
    if recording[:64].partition(":")[0].lower() == "data":
        recording = recording.partition(",")[2]
    elif len(recording) < _SHORTEST_BASE64 or not _BASE64_TEXT.fullmatch(recording):
        what = "expected the recording in base64 or a data: URL, or the name of a voice; nothing else is read"
        raise wrong("reference_not_allowed", "ref_audio", what)
    plain = "".join(recording.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise wrong("bad_reference", "ref_audio", "expected base64, found other characters") from None


def openai_routes(service: SpeechService) -> APIRouter:
    router, references = APIRouter(), References(service)
    limits, model = service.limits, service.model
    task = MODEL_TYPES[model.type].upstream_name
    started_s = int(time.time())
    keys = [field.alias or name for name, field in OpenAISpeechRequest.model_fields.items()]
    media = [MEDIA_TYPES[format].format(rate_hz=SAMPLE_RATE_HZ).partition(";")[0] for format in STREAM_FORMATS]

    sounds = KeptSounds()
    spoken = {200: documented(*media, "text/event-stream")}
    in_parts = {**spoken, 206: {"description": "The part that Range asks for."}}

    @router.post(SPEECH_PATH, response_class=Response, responses=spoken)
    async def openai_speech(body: OpenAISpeechRequest, request: Request) -> Response:
        """OpenAI's speech endpoint, with more keys for this model. The sound is encoded and sent while it is made; a
        WAV's header then says 0xFFFFFFFF bytes, as its length is not known."""
        strict = service.strict if body.strict is None else body.strict
        ignored = []
        for key in body.model_extra or {}:
            near = get_close_matches(key, keys, 1, 0.85)
            if near or strict:
                hint = f"did you mean {near[0]}?" if near else "leave it out, or send strict: false"
                raise wrong("unknown_key", key[:_MAX_KEY_CHARS], f"there is no such key, {hint}")
            if key.isidentifier() and key.isascii() and len(key) <= _MAX_KEY_CHARS:  # the header takes no odd ones
                ignored.append(key)
        if body.instruct is not None and not service.takes_instruct and not strict:
            body.instruct = None
            ignored.append("instructions")
        if body.word_timestamps and body.stream_format != "sse":
            if strict:
                raise wrong("no_place", "word_timestamps", "expected stream_format: sse")
            body.word_timestamps = False
            ignored.append("word_timestamps")
        if body.task_type not in (None, task):
            raise wrong("wrong_task", "task_type", f"this checkpoint is for {task}, got {body.task_type}")

        whole = body.stream is False and body.stream_format is None
        how = {"speed": body.speed or 1.0, "sample_rate_hz": body.sample_rate, "whole": whole}
        try:
            encoder = Encoder(body.response_format or "mp3", **how)
        except MkttsError as error:
            raise ApiError(400, "bad_format", str(error), "response_format") from None
        owner, kept = request.state.owner, None
        brings = body.ref_audio or (body.ref_text or "").strip()
        voice = await references.brought(body, owner) if brings else None
        if whole and request.method == "GET":
            named = voice or service.saved_voice(body.speaker or DEFAULT, owner)
            asked = (owner, request.url.query, named and named.digest), request.headers.get("range")
            if (found := sounds.find(*asked)) is not None:
                return found
            kept = partial(sounds.answer, *asked)
        if body.max_frames is None and body.max_new_tokens is not None:
            body.max_frames = min(body.max_new_tokens, limits.max_frames)
        layout = {None: None, True: "whole", False: "streaming"}[body.non_streaming_mode]
        stream = service.speak("openai_speech", body, body.input, voice=voice, layout=layout, owner=owner)
        events_of = body.input if body.stream_format == "sse" else None
        return AudioResponse(stream, encoder, events_of=events_of, ignored_keys=sorted(ignored), kept=kept)

    @router.get(SPEECH_PATH, response_class=Response, dependencies=[Depends(no_foreign_element)], responses=in_parts)
    async def openai_speech_of_address(query: Annotated[OpenAISpeechQuery, Query()], request: Request) -> Response:
        """As POST, for what has an address and no body, such as `<audio src>`. With `stream=false` the sound is kept
        for a while, by its address and the caller's key, and Range is heeded."""
        return await openai_speech(query, request)

    def card(id: str) -> dict[str, Any]:
        return {"id": id, "object": "model", "created": started_s, "owned_by": "mktts"}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model there is; requests may call it by any name."""
        return {"object": "list", "data": [card(model.checkpoint)]}

    @router.get("/v1/models/{id:path}")
    async def one_model(id: str) -> dict[str, Any]:
        """The model, by any name, as POST /v1/audio/speech takes any."""
        return card(id)

    @router.get("/v1/audio/models", include_in_schema=False)
    async def audio_models() -> dict[str, Any]:
        """The models, at the address where Open WebUI asks for them."""
        return {"models": [{"id": model.checkpoint, "name": model.checkpoint}]}

    @router.get(VOICES_PATH)
    async def voices(request: Request) -> dict[str, Any]:
        """Every name that `voice` may have: `voices` of the checkpoint, saved ones and the caller's own; `aliases`,
        with the voice that each stands for. `uploaded_voices`: the caller's own. `uploads`: whether more may come."""
        uploaded = []
        if service.uploads is not None:
            uploaded = await asyncio.to_thread(service.uploads.list, request.state.owner)
        return {
            "voices": [*service.speakers, *(voice.name for voice in uploaded)],
            "aliases": service.aliases,
            "uploaded_voices": uploaded,
            "uploads": service.uploads is not None and model.clones,
        }

    def folder() -> VoiceFolder:
        if service.uploads is None:
            raise ApiError(403, "uploads_off", "this server keeps no voices: it was started without --voice-folder")
        return service.uploads

    @router.post(VOICES_PATH)
    async def upload_voice(
        upload: Annotated[VoiceUpload, Form(media_type="multipart/form-data")], request: Request
    ) -> dict[str, Any]:
        """Keeps the voice of a recording under a name of the caller's, for requests with the caller's key. The
        recording itself is not kept."""
        kept, owner = folder(), request.state.owner
        name, data = upload.name.lower(), await upload.audio_sample.read()
        if name in (*service.speakers, *service.aliases, DEFAULT):
            raise wrong("name_taken", "name", f"{name} is a voice of this server's own: take another")
        voice = await references.make(data, upload.ref_text, "audio_sample")
        now_s, longest_s = int(time.time()), limits.voice_days * DAY_S
        lifetime_s = min(upload.expires_in_s or longest_s, longest_s)
        record = UploadedVoice(
            **upload.model_dump(include={"consent", "speaker_description"}),
            name=name,
            created_at=now_s,
            expires_at=now_s + max(1, int(lifetime_s)),
            mime_type=(upload.audio_sample.content_type or "application/octet-stream")[:100],
            file_size=len(data),
            ref_text=voice.transcript,
        )
        await asyncio.to_thread(kept.keep, owner, voice, record)
        # OpenAI's shape, and under `voice` vLLM-Omni's
        kept_voice = {"object": "audio.voice", "id": name, "name": name, "created_at": now_s}
        return {**kept_voice, "success": True, "voice": record}

    @router.delete(f"{VOICES_PATH}/{{name}}")
    async def delete_voice(name: str, request: Request) -> dict[str, Any]:
        """Deletes an uploaded voice of the caller's: on every server that shares the folder, and out of its caches.
        Speech that is on its way goes on."""
        if not await asyncio.to_thread(folder().delete, request.state.owner, name):
            raise ApiError(404, "unknown_voice", "you have no voice of this name", "name")
        deleted = {"object": "audio.voice.deleted", "id": name.lower(), "deleted": True, "success": True}
        return {**deleted, "message": f"Voice '{name.lower()}' deleted successfully"}

    return router
