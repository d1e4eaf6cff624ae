"""Requests that other servers' pages tell their users to send, replayed: text, voice and recording alone are ours."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from mktts.audio import encoded
from mktts.errors import MetricsError
from mktts.measure.clients.trial import TEXT, Place, Trial
from mktts.spec import SAMPLE_RATE_HZ

VLLM = ("vLLM-Omni, documented requests", "docs/serving/speech_api.md 078de2d")
SGLANG = ("SGLang-Omni, documented requests", "docs/cookbook/qwen3_tts.md 0103a88")
NARI = ("Nari, documented requests", "README.md e8c5b2b")
KOKORO = ("Kokoro-FastAPI, documented requests", "docs/integrations/openai.md a904f7c")
OPEN_WEBUI = ("Open WebUI, its requests", "routers/audio.py 6adde20")
FASTER = ("faster-qwen3-tts, documented requests", "examples/openai_server.py 335e6bb")
BENCH = ("tts_bench, its requests", "tts_bench/README.md a2d65e1")

_TTS_1, _MODEL = "tts-1", "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
_WAIT_S = 120.0
# client, feature, body, what comes. SPEAKER stands for a speaker of the checkpoint.
SPEECH: list[tuple[tuple[str, str], str, dict[str, Any], str]] = [
    (VLLM, "curl", {"voice": "SPEAKER", "language": "English"}, "mp3"),
    (VLLM, "stream_format audio", {"voice": "SPEAKER", "stream_format": "audio", "response_format": "pcm"}, "pcm"),
    (VLLM, "stream_format sse", {"voice": "SPEAKER", "stream_format": "sse", "response_format": "pcm"}, "sse"),
    (
        VLLM,
        "every key of its table",
        {
            "model": _MODEL, "voice": "SPEAKER", "response_format": "wav", "speed": 1.0, "task_type": "CustomVoice",
            "language": "Auto", "instructions": "", "max_new_tokens": 2048, "initial_codec_chunk_frames": None,
            "non_streaming_mode": None, "stream": False, "stream_format": None,
        },
        "wav",
    ),
    (
        SGLANG,
        "generation parameters, streamed",
        {
            "model": _MODEL, "voice": "default", "language": "auto", "temperature": 0.9, "top_p": 1.0, "top_k": 50,
            "repetition_penalty": 1.05, "max_new_tokens": 2048, "seed": None, "stream": True, "response_format": "pcm",
            "initial_codec_chunk_frames": 8,
        },
        "pcm",
    ),
    (
        NARI,
        "HTTP",
        {"model": _MODEL, "voice": "SPEAKER", "language": "english", "response_format": "wav", "stream": False},
        "wav",
    ),
    (
        BENCH,
        "targets vllm-omni, sglang-omni, nari",
        {
            "model": _MODEL, "voice": "SPEAKER", "language": "english", "stream": True, "non_streaming_mode": False,
            "stream_format": "audio", "response_format": "pcm",
        },
        "pcm",
    ),
    (
        KOKORO,
        "its own keys, mp3",
        {
            "model": "kokoro", "voice": "alloy", "response_format": "mp3", "speed": 1.0, "stream": True,
            "return_download_link": False, "lang_code": None, "volume_multiplier": 1.0,
        },
        "mp3",
    ),
    (OPEN_WEBUI, "speech", {"model": _TTS_1, "voice": "alloy"}, "mp3"),
    (FASTER, "curl", {"model": _TTS_1, "voice": "alloy", "response_format": "wav"}, "wav"),
]  # fmt: skip
SAID = "We asked over twenty different people, and they all said it was his."


def trials() -> Iterator[Trial]:
    """Over HTTP."""
    for (client, version), feature, body, kind in SPEECH:
        yield Trial(client, version, feature, partial(_speech, body, kind))
    for client, version, feature, key in (
        (*SGLANG, "references", "references"),
        (*VLLM, "ref_audio, ref_text, task_type Base", "ref_audio"),
    ):
        yield Trial(client, version, feature, partial(_cloned, key), clones=True)
    yield Trial(*VLLM, "voices: upload, use, delete", _kept, clones=True)
    yield Trial(*OPEN_WEBUI, "lists of models and voices", _lists)
    probes = ((NARI, "/ready"), (NARI, "/health"), (VLLM, "/v1/models"), (VLLM, "/v1/audio/voices"))
    for (client, version), path in probes:
        yield Trial(client, version, f"GET {path}", partial(_answered, path))


def recording() -> bytes:
    """A WAV of two seconds that can be cloned, as far as a machine is concerned: a hum with a melody."""
    seconds = np.arange(2 * SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ
    turns = np.cumsum(140 + 30 * np.sin(2 * np.pi * 1.5 * seconds)) / SAMPLE_RATE_HZ
    return encoded((0.1 * sum(np.sin(2 * np.pi * k * turns) / k for k in range(1, 8))).astype(np.float32), "wav")


def ask(place: Place, method: str, path: str, body: Any = None, kind: str = "application/json") -> bytes:
    """The body of an answer. Raises MetricsError with what an error says."""
    connection = http.client.HTTPConnection(urlsplit(place.url).netloc, timeout=_WAIT_S)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {} if data is None else {"Content-Type": kind})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.client.OK:
            raise MetricsError(f"HTTP {answer.status}: {content.decode(errors='replace')[:200]}")
        return content
    finally:
        connection.close()


def _speech(body: dict[str, Any], kind: str, place: Place) -> str:
    wishes = {key: place.speaker if value == "SPEAKER" else value for key, value in body.items()}
    content = ask(place, "POST", "/v1/audio/speech", {"input": TEXT, **wishes})
    if kind != "sse":
        return place.check(content, kind)
    events = [json.loads(line.removeprefix("data: ")) for line in content.decode().split("\n\n") if line]
    if events[-1]["type"] != "speech.audio.done":
        raise MetricsError(f"expected speech.audio.done last, got {events[-1]}")
    return place.check(b"".join(base64.b64decode(event["audio"]) for event in events[:-1]), "pcm")


def _cloned(key: str, place: Place) -> str:
    sound = f"data:audio/wav;base64,{base64.b64encode(recording()).decode()}"
    brought: dict[str, Any] = {"references": [{"audio_path": sound, "text": SAID}]}
    if key == "ref_audio":
        brought = {"ref_audio": sound, "ref_text": SAID, "task_type": "Base"}
    body = {"model": "Qwen/Qwen3-TTS-12Hz-0.6B-Base", "voice": "default", "response_format": "wav", **brought}
    return place.check(ask(place, "POST", "/v1/audio/speech", {"input": TEXT, **body}), "wav")


def _kept(place: Place) -> str:
    form = {"consent": "user_consent_id", "name": "custom_voice_1", "speaker_description": "warm narrator"}
    edge = "mktts-boundary"
    named = f"--{edge}\r\nContent-Disposition: form-data; name="
    parts = [f'{named}"{key}"\r\n\r\n{value}\r\n' for key, value in form.items()]
    head = f'{named}"audio_sample"; filename="a.wav"\r\n'
    body = "".join(parts).encode() + f"{head}Content-Type: audio/wav\r\n\r\n".encode() + recording()
    body += f"\r\n--{edge}--\r\n".encode()
    kept = json.loads(ask(place, "POST", "/v1/audio/voices", body, f"multipart/form-data; boundary={edge}"))
    if not kept["success"] or kept["voice"]["name"] != "custom_voice_1":
        raise MetricsError(f"expected the voice, got {kept}")
    speech = {"input": TEXT, "voice": "custom_voice_1", "response_format": "wav"}
    note = place.check(ask(place, "POST", "/v1/audio/speech", speech), "wav")
    if not json.loads(ask(place, "DELETE", "/v1/audio/voices/custom_voice_1"))["success"]:
        raise MetricsError("the voice was not deleted")
    return note


def _lists(place: Place) -> str:
    models = json.loads(ask(place, "GET", "/v1/audio/models"))["models"]
    voices = json.loads(ask(place, "GET", "/v1/audio/voices"))["voices"]
    if not all(model["id"] for model in models) or not voices:
        raise MetricsError(f"expected models and voices, got {models} and {voices}")
    return f"{len(models)} model, {len(voices)} voices"


def _answered(path: str, place: Place) -> str:
    return f"{len(json.loads(ask(place, 'GET', path)))} keys"
