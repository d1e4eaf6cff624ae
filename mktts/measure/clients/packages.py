"""Clients that package indexes have, as they are: whatever is installed here is tried."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from mktts.errors import MetricsError
from mktts.measure.clients.documented import recording
from mktts.measure.clients.trial import TEXT, Place, Trial, version_of
from mktts.spec import SAMPLE_RATE_HZ

PACKAGES = ("openai", "pipecat-ai", "livekit-plugins-openai")  # as package indexes call them
_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")


def trials() -> Iterator[Trial]:
    """Of the clients that are installed."""
    openai, pipecat, livekit = (version_of(package) for package in PACKAGES)
    if openai is not None:
        for format in _FORMATS:
            feature = f"{format}, streamed" + (" (its default)" if format == "mp3" else "")
            yield Trial("openai (Python)", openai, feature, partial(_openai, format, 1.0))
        yield Trial("openai (Python)", openai, "speed 2", partial(_openai, "wav", 2.0))
        yield Trial("openai (Python)", openai, "server-sent events", _openai_events)
        yield Trial("openai (Python)", openai, "models.list", _openai_models)
        yield Trial("openai (Python)", openai, "audio.voices.create, and speech with it", _openai_voice, clones=True)
    if pipecat is not None:
        if openai is not None:
            yield Trial("Pipecat's OpenAITTSService", pipecat, "speech", _pipecat_openai)
        yield Trial("Pipecat, MkttsTTSService over RemoteSource", pipecat, "speech", _pipecat_ours)
    if livekit is not None:
        yield Trial("LiveKit's openai plugin", livekit, "speech as it asks by default", _livekit)


def missing() -> list[str]:
    """Packages of clients that are not installed here."""
    return [package for package in PACKAGES if version_of(package) is None]


def _client(place: Place) -> Any:
    return importlib.import_module("openai").OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0)


def _openai(format: str, speed: float, place: Place) -> str:
    wishes: dict[str, Any] = {} if format == "mp3" else {"response_format": format}
    wishes |= {} if speed == 1 else {"speed": speed}
    with _client(place) as client:
        speech = client.audio.speech.with_streaming_response
        with speech.create(model="tts-1", voice="alloy", input=TEXT, **wishes) as answer:
            pieces = list(answer.iter_bytes())
    return f"{place.check(b''.join(pieces), format, speed)}, in {len(pieces)} pieces"


def _openai_events(place: Place) -> str:
    module = importlib.import_module("openai")
    body = {"model": "tts-1", "voice": "alloy", "input": TEXT, "stream_format": "sse", "response_format": "pcm"}
    with _client(place) as client:
        how = {"cast_to": object, "stream": True, "stream_cls": module.Stream[dict]}
        events = list(client.post("/audio/speech", body=body, **how))
    if events[-1]["type"] != "speech.audio.done":
        raise MetricsError(f"expected speech.audio.done last, got {events[-1]}")
    return place.check(b"".join(base64.b64decode(event["audio"]) for event in events[:-1]), "pcm")


def _openai_models(place: Place) -> str:
    with _client(place) as client:
        return ", ".join(model.id for model in client.models.list().data)


def _openai_voice(place: Place) -> str:
    with _client(place) as client:
        sample = ("me.wav", recording(), "audio/wav")
        voice = client.audio.voices.create(name="of-openais-client", consent="cons_1234", audio_sample=sample)
        content = client.audio.speech.create(model="tts-1", voice={"id": voice.id}, input=TEXT).content
    return place.check(content, "mp3")


async def _pipecat_openai(place: Place) -> str:
    service = importlib.import_module("pipecat.services.openai.tts").OpenAITTSService
    settings = service.Settings(voice="nova")
    return await _pipecat(
        service(api_key="none", base_url=f"{place.url}/v1", sample_rate=SAMPLE_RATE_HZ, settings=settings), place
    )


async def _pipecat_ours(place: Place) -> str:
    from mktts.pipecat import MkttsTTSService, RemoteSource

    settings = MkttsTTSService.Settings(voice=place.speaker)
    return await _pipecat(MkttsTTSService(source=RemoteSource(place.url), settings=settings), place)


async def _pipecat(service: Any, place: Place) -> str:
    logger = importlib.import_module("loguru").logger
    for package in ("pipecat", "mktts.pipecat"):  # which tell every step
        logger.disable(package)
    frames = importlib.import_module("pipecat.frames.frames")
    run_test = importlib.import_module("pipecat.tests.utils").run_test
    # one utterance: a service speaks sentence by sentence
    down, up = await run_test(service, frames_to_send=[frames.TTSSpeakFrame(TEXT.replace(". ", ", "))])
    errors = [frame.error for frame in (*down, *up) if isinstance(frame, frames.ErrorFrame)]
    if errors:
        raise MetricsError(errors[0])
    return place.check(b"".join(frame.audio for frame in down if isinstance(frame, frames.TTSAudioRawFrame)), "pcm")


async def _livekit(place: Place) -> str:
    plugin = importlib.import_module("livekit.plugins.openai")
    speech = plugin.TTS(base_url=f"{place.url}/v1", api_key="none")
    try:
        stream = speech.synthesize(TEXT)
        frames = [event.frame async for event in stream]
    finally:
        await speech.aclose()
    rate_hz = frames[0].sample_rate
    if rate_hz != SAMPLE_RATE_HZ:
        raise MetricsError(f"expected frames of {SAMPLE_RATE_HZ} Hz, got {rate_hz}")
    return f"{place.check(b''.join(bytes(frame.data) for frame in frames), 'pcm')}; the plugin decoded the MP3"
