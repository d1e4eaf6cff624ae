"""OpenAI-compatible routes, and the response that carries a stream of speech: encoded while it is generated, as
server-sent events, or complete and cached."""

import asyncio
import base64
import hashlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import Response, StreamingResponse

from mktts.audio.encoding import UNCODED, Encoder, StreamFormat
from mktts.audio.untrusted import decode_untrusted
from mktts.engine.options import Chunk
from mktts.errors import BackendUnavailable, MkttsError
from mktts.model.voice import Voice
from mktts.server.access import REQUEST_ID_HEADER, ApiError
from mktts.server.schemas import DEFAULT, OpenAISpeechQuery, OpenAISpeechRequest, UploadedVoice, VoiceUpload
from mktts.server.service import ServedStream, SpeechService
from mktts.server.settings import DAY_S, LOOPBACK_ORIGIN
from mktts.server.voices import OPENAI_VOICES, VoiceFolder
from mktts.spec import MODEL_TYPES
from mktts.synth.cloning import clone_voice

SPEECH_PATH = "/v1/audio/speech"
VOICES_PATH = "/v1/audio/voices"
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\s-]+={0,2}\s*")
_SHORTEST_BASE64 = 64  # characters; the header of a WAV alone has 60
_MAX_KEY_CHARS = 40  # of an unknown key that a response repeats
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
MEDIA_TYPES: dict[StreamFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate={rate_hz};channels=1;format=s16le",
    "mulaw": "audio/PCMU;rate={rate_hz}",
    "alaw": "audio/PCMA;rate={rate_hz}",
}
AUDIO_HEADERS = {
    REQUEST_ID_HEADER: "the id for GET /tts/stream/{id}",
    "X-Seed": "the seed that repeats this draw",
    "X-Sample-Rate-Hz": "the sample rate of the audio",
    "X-Sample-Format": "s16le: signed 16 bits, little endian; or the name of the format that holds them",
    "X-Random-Weights": "true: the audio is noise, not speech",
}

log = logging.getLogger(__name__)


def wrong(code: str, key: str, what: str) -> ApiError:
    """An ApiError 400 about one key of a request; the message begins with the key."""
    return ApiError(400, code, f"{key}: {what}", key)


async def no_foreign_element(request: Request) -> None:
    """Raises ApiError 403 for a GET that an element or a link of a foreign page sends: it has no Origin to check, and
    any page could make this machine speak. Pages served from loopback are same-site to a server there, and may."""
    is_local = re.fullmatch(LOOPBACK_ORIGIN, f"http://{request.headers.get('host', '')}")
    here = ("same-origin", "none", "same-site") if is_local else ("same-origin", "none")
    if "origin" not in request.headers and request.headers.get("sec-fetch-site", "none") not in here:
        message = "pages from other origins need --allow-origin, and their elements the attribute crossorigin"
        raise ApiError(403, "foreign_origin", message)


class References:
    """Clones voices from recordings, one at a time in a thread, and caches those of recent requests."""

    def __init__(self, service: SpeechService) -> None:
        self._service, limits = service, service.limits
        self._decoding = limits.max_reference_bytes, limits.max_reference_s, limits.reference_decode_s
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._lock = asyncio.Lock()

    async def make(self, data: bytes, transcript: str | None, key: str = "ref_audio") -> Voice:
        """Clones a voice from a recording, in context if there is a transcript. key: for errors. Raises ApiError."""
        service = self._service
        if not service.model.clones:
            what = f"a {service.model.type} checkpoint clones no voices: serve a Base one"
            raise wrong("cloning_unavailable", key, what)
        service.check_chars(len(transcript or ""), "ref_text")
        service.admit()  # refuses before the work, not after it
        try:
            async with self._lock:
                pcm, rate_hz = await asyncio.to_thread(decode_untrusted, data, *self._decoding)
                return await asyncio.to_thread(clone_voice, service.checkpoint, pcm, rate_hz, transcript or None)
        except MkttsError as error:
            unable = isinstance(error, BackendUnavailable)
            raise wrong("cloning_unavailable" if unable else "bad_reference", key, str(error)) from None

    async def brought(self, body: OpenAISpeechRequest, owner: str) -> Voice:
        """The voice that `ref_audio` holds as a recording, or names. Raises ApiError."""
        recording, transcript = body.ref_audio, body.ref_text or None
        if not recording:
            raise wrong("bad_reference", "ref_text", "expected a ref_audio that it transcribes")
        if (body.speaker or DEFAULT).lower() not in (DEFAULT, *OPENAI_VOICES):
            raise wrong("two_voices", "ref_audio", "expected either this or voice, got both")
        if (saved := self._service.saved_voice(recording[:256], owner)) is not None:
            return saved
        if body.x_vector_only_mode is False and transcript is None:
            raise wrong("bad_reference", "ref_text", "expected a transcript of ref_audio, or x_vector_only_mode")
        transcript = None if body.x_vector_only_mode else transcript
        data = await asyncio.to_thread(_read, recording)
        key = hashlib.sha256(data + repr(transcript).encode()).hexdigest()
        if key not in self._voices:
            self._voices[key] = await self.make(data, transcript)
        self._voices.move_to_end(key)
        while len(self._voices) > self._service.limits.kept_voices:
            self._voices.popitem(last=False)
        return self._voices[key]


def _read(recording: str) -> bytes:
    """Decodes a recording from base64 in either alphabet, padded or not. Paths and URLs are refused: they would let a
    caller read files and addresses that only the server can reach. Raises ApiError."""
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


def documented(*media_types: str) -> dict[str, Any]:
    """FastAPI's OpenAPI entry for a streamed audio body and its headers."""
    text = {"type": "string"}
    event = {"type": "object", "properties": {"data": text}, "required": ["data"]}
    of = {kind: event if kind == "text/event-stream" else {**text, "format": "binary"} for kind in media_types}
    headers = {key: {"description": what, "required": True, "schema": text} for key, what in AUDIO_HEADERS.items()}
    content = {kind: {"schema": schema} for kind, schema in of.items()}
    return {"description": "Audio, sent while it is generated.", "content": content, "headers": headers}


class AudioResponse(StreamingResponse):
    """A stream of speech as the body of a response. Status and headers are sent with the first bytes, so an earlier
    failure is raised as an ApiError; if the first bytes are the whole body, Content-Length is set.

    A client that reads slowly pauses the generation (see StreamOptions.buffer_frames); one that disconnects, or takes
    no byte for `Limits.stall_s`, ends it. A failure after the first bytes ends the body without its last chunk, so
    that no client takes it for complete; server-sent events end with an error event instead.

    events_of: the text, to send server-sent events like OpenAI's (stream_format: sse): audio, words as their times
        become known, and at the end the text's token count. None sends the encoded bytes.
    kept: builds the response from headers and bytes if the first bytes are the whole body."""

    def __init__(
        self,
        stream: ServedStream,
        encoder: Encoder,
        *,
        events_of: str | None = None,
        ignored_keys: Sequence[str] = (),
        kept: Callable[[Mapping[str, str], bytes], Response] | None = None,
    ) -> None:
        kind, rate_hz = encoder.kind, encoder.rate_hz
        headers = {  # known before the first sample; GET /tts/stream/{X-Request-Id} has the rest
            "Content-Type": MEDIA_TYPES[kind].format(rate_hz=rate_hz) if events_of is None else "text/event-stream",
            REQUEST_ID_HEADER: stream.id,
            "X-Seed": str(stream.state.seed),
            "X-Sample-Rate-Hz": str(rate_hz),
            "X-Sample-Rate": str(rate_hz),  # the name that other servers of this model use
            "X-Sample-Format": "s16le" if kind in UNCODED else kind,
            "X-Channels": "1",
            "X-Random-Weights": str(stream.service.model.random_weights).lower(),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # nginx as a proxy then does not buffer the body
        }
        headers |= {"X-Mktts-Ignored": ", ".join(ignored_keys)} if ignored_keys else {}
        super().__init__(stream.chunks(), headers=headers)
        self._stream, self._encoder, self._events_of, self._kept = stream, encoder, events_of, kept
        self._words = 0  # number of words sent

    async def stream_response(self, send: Any) -> None:
        """Sends the whole response. If the client disconnects, Starlette cancels this coroutine, as it does for servers
        of ASGI before 2.4, such as uvicorn."""
        stream, sound_s, started = self._stream, 0.0, False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                if not more:
                    self.headers["Content-Length"] = str(len(data))
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for chunk in self.body_iterator:
                data = await self._encoded(chunk)
                sound_s += chunk.duration_s / self._encoder.speed
                if data:
                    async with stream.sending(sound_s):
                        await write(data)
                    sound_s = 0.0
            rest = await self._encoded(None)
            stream.close()  # before the last byte, so that the stream's state is final once the client has it all
            if self._kept is not None and not started:
                found = self._kept(dict(self.headers), rest)
                self.status_code, self.raw_headers, rest = found.status_code, found.raw_headers, found.body
            await write(rest, more=False)
        except ApiError as error:
            if not started:
                raise
            stream.close()
            if self._events_of is not None:  # OpenAI's clients raise the event as an exception
                await write(_event("error", error=error.detail().shown()), more=False)
        except TimeoutError:
            log.warning("stream %s: the client took nothing for %g s", stream.id, stream.service.limits.stall_s)
        finally:
            stream.close()

    async def _encoded(self, chunk: Chunk | None) -> bytes:
        """Encodes a chunk and returns what can be sent, perhaps nothing yet; None flushes. Codecs run in a thread."""
        encoder, stream = self._encoder, self._stream
        if encoder.takes_pcm16:
            data = encoder.feed_pcm16(b"" if chunk is None else chunk.pcm16)
        else:
            data = await asyncio.to_thread(encoder.finish if chunk is None else partial(encoder.feed, chunk.pcm))
        if self._events_of is None:
            return data
        if data:
            data = _event("speech.audio.delta", audio=base64.b64encode(data).decode())
        if words := (stream.state.words or [])[self._words :] if chunk is None else chunk.words:
            self._words += len(words)
            times = ("start_s", "end_s")
            told = (asdict(one) | {key: round(getattr(one, key) / encoder.speed, 3) for key in times} for one in words)
            data += _event("speech.audio.words", words=[*told])
        if chunk is None:
            tokenizer, frames = stream.service.tokenizer, stream.state.frames
            tokens = len(await asyncio.to_thread(lambda: tokenizer().encode(self._events_of)))
            usage = {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}
            data += _event("speech.audio.done", usage=usage)
        return data


class KeptSounds:
    """An LRU cache of complete sounds by request, for players that request a part again to seek.
    most_bytes: of all sounds together. most: number of sounds."""

    def __init__(self, most_bytes: int = 64 * 2**20, most: int = 32) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._sounds: OrderedDict[Hashable, tuple[Mapping[str, str], bytes]] = OrderedDict()

    def answer(self, key: Hashable, wanted: str | None, headers: Mapping[str, str], data: bytes) -> Response:
        """Caches a sound and its headers, unless it alone exceeds `most_bytes`, and answers as `find` does."""
        if len(data) <= self._most_bytes:
            self._sounds[key] = {**headers, "Accept-Ranges": "bytes"}, data
        while len(self._sounds) > self._most or sum(len(kept) for _, kept in self._sounds.values()) > self._most_bytes:
            self._sounds.popitem(last=False)
        return self.find(key, wanted) or Response(data, headers=headers)

    def find(self, key: Hashable, wanted: str | None) -> Response | None:
        """The cached sound, or the part of it in a Range header (RFC 9110, section 14). Raises ApiError 416."""
        if key not in self._sounds:
            return None
        self._sounds.move_to_end(key)
        headers, data = self._sounds[key]
        first, last = found.groups() if (found := _RANGE.fullmatch(wanted or "")) else ("", "")
        start = int(first) if first else max(0, len(data) - int(last or len(data)))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        if not (first or last) or (first and last and int(last) < int(first)):  # no valid single range: ignored
            return Response(data, headers=headers)
        if start >= end:
            raise ApiError(416, "bad_range", f"Range: expected bytes of {len(data)}, got {wanted}", "Range")
        return Response(data[start:end], 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})


def _event(type: str, **content: Any) -> bytes:
    return f"data: {json.dumps({'type': type, **content}, separators=(',', ':'))}\n\n".encode()


def openai_routes(service: SpeechService) -> APIRouter:
    router, references = APIRouter(), References(service)
    limits, model, started_s = service.limits, service.model, int(time.time())
    task = MODEL_TYPES[model.type].upstream_name
    keys = [field.alias or name for name, field in OpenAISpeechRequest.model_fields.items()]
    media = [kind.partition(";")[0] for kind in MEDIA_TYPES.values()]
    sounds = KeptSounds()
    spoken = {200: documented(*media, "text/event-stream")}
    in_parts = {**spoken, 206: {"description": "The part that Range requests."}}

    @router.post(SPEECH_PATH, response_class=Response, responses=spoken)
    async def openai_speech(body: OpenAISpeechRequest, request: Request) -> Response:
        """OpenAI's speech endpoint, with further keys for this model. Audio is encoded and sent while it is generated.
        As its length is then unknown, the header of a WAV gives 0xFFFFFFFF bytes."""
        strict = service.strict if body.strict is None else body.strict
        ignored = []
        for key in body.model_extra or {}:
            if (near := get_close_matches(key, keys, 1, 0.85)) or strict:
                hint = f"did you mean {near[0]}?" if near else "leave it out, or send strict: false"
                raise wrong("unknown_key", key[:_MAX_KEY_CHARS], f"there is no such key, {hint}")
            if key.isidentifier() and key.isascii() and len(key) <= _MAX_KEY_CHARS:  # safe to name in a header
                ignored.append(key)
        if body.instruct and not service.takes_instruct and not strict:
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
        voice = await references.brought(body, owner) if body.ref_audio or body.ref_text else None
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
        """Does the same as POST, for clients that cannot send a body, such as `<audio src>`. With `stream=false` the
        audio is cached for a while, by URL and the caller's key, and Range requests are answered."""
        return await openai_speech(query, request)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Lists the one model that is served; requests may use any name for it."""
        return {"object": "list", "data": [await one_model(model.checkpoint)]}

    @router.get("/v1/models/{id:path}")
    async def one_model(id: str) -> dict[str, Any]:
        """Describes the model under any id, as POST /v1/audio/speech accepts any name."""
        return {"id": id, "object": "model", "created": started_s, "owned_by": "mktts"}

    @router.get("/v1/audio/models", include_in_schema=False)
    async def audio_models() -> dict[str, Any]:
        """Lists the model at the path that Open WebUI requests."""
        return {"models": [{"id": model.checkpoint, "name": model.checkpoint}]}

    @router.get(VOICES_PATH)
    async def voices(request: Request) -> dict[str, Any]:
        """Lists the names that `voice` accepts. `voices`: speakers, saved voices and the caller's uploads. `aliases`:
        the voice each stands for. `uploaded_voices`: the caller's uploads. `uploads`: whether uploads are possible."""
        kept = service.uploads
        uploaded = [] if kept is None else await asyncio.to_thread(kept.list, request.state.owner)
        names = [*service.speakers, *(voice.name for voice in uploaded)]
        said = {"voices": names, "aliases": service.aliases, "uploaded_voices": uploaded}
        return {**said, "uploads": kept is not None and model.clones}

    def folder() -> VoiceFolder:
        if service.uploads is None:
            raise ApiError(403, "uploads_off", "this server keeps no voices: it was started without --voice-folder")
        return service.uploads

    @router.post(VOICES_PATH)
    async def upload_voice(
        upload: Annotated[VoiceUpload, Form(media_type="multipart/form-data")], request: Request
    ) -> dict[str, Any]:
        """Clones the voice of a recording and stores it under a name, for requests with the caller's key. The recording
        itself is not stored."""
        kept, owner = folder(), request.state.owner
        name, data = upload.name.lower(), await upload.audio_sample.read()
        if name in (*service.speakers, *service.aliases, DEFAULT):
            raise wrong("name_taken", "name", f"{name} is a voice of the server itself: choose another name")
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
        # OpenAI's shape; `voice` holds vLLM-Omni's
        shape = {"object": "audio.voice", "id": name, "name": name, "created_at": now_s}
        return {**shape, "success": True, "voice": record}

    @router.delete(f"{VOICES_PATH}/{{name}}")
    async def delete_voice(name: str, request: Request) -> dict[str, Any]:
        """Deletes one of the caller's uploaded voices, from the caches and from every server that shares the folder.
        Streams that use it already go on."""
        if not await asyncio.to_thread(folder().delete, request.state.owner, name):
            raise ApiError(404, "unknown_voice", "you have no voice of this name", "name")
        name, done = name.lower(), {"object": "audio.voice.deleted", "deleted": True, "success": True}
        return {**done, "id": name, "message": f"Voice '{name}' deleted successfully"}

    return router
