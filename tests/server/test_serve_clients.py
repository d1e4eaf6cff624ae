"""Clients that people have: Pipecat's own OpenAI service as it is, and the documented requests of other servers."""

from __future__ import annotations

import httpx
import pytest
from absent import needs
from served import first_speaker, served
from sounds import decoded

from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ

FRAMES = 8
TEXT = "Hello there."


@pytest.fixture(scope="module")
def server(synthesizer):
    with served(synthesizer) as running:
        yield running


# What each project's pages tell its users to send; only the text, the length and a voice that is its own are changed.
REQUESTS = {
    "vLLM-Omni, curl": {"input": TEXT, "voice": "SPEAKER", "language": "English"},
    "vLLM-Omni, streamed": {
        "input": TEXT, "voice": "SPEAKER", "language": "English", "stream": True, "stream_format": "audio",
        "response_format": "pcm",
    },
    "vLLM-Omni, custom voice": {
        "model": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", "input": TEXT, "voice": "SPEAKER", "task_type": "CustomVoice",
        "language": "Auto", "instructions": "", "max_new_tokens": 2048, "initial_codec_chunk_frames": 2,
        "response_format": "wav",
    },
    "SGLang-Omni": {
        "model": "Qwen/Qwen3-TTS", "input": TEXT, "voice": "default", "stream": True, "response_format": "pcm",
        "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "seed": 1, "max_new_tokens": 2048,
    },
    "tts_bench": {"input": TEXT, "voice": "SPEAKER", "stream": True, "non_streaming_mode": True,
                  "response_format": "pcm"},
    "Kokoro-FastAPI": {
        "model": "kokoro", "input": TEXT, "voice": "alloy", "response_format": "mp3", "speed": 1.0, "stream": True,
        "return_download_link": False, "lang_code": None, "volume_multiplier": 1.0,
    },
    "Open WebUI": {"model": "tts-1", "input": TEXT, "voice": "alloy"},
    "LiveKit's openai plugin": {"model": "gpt-4o-mini-tts", "input": TEXT, "voice": "ash", "response_format": "mp3",
                                "speed": 1.0},
    "faster-qwen3-tts": {"input": TEXT, "voice": "alloy", "response_format": "wav"},
}  # fmt: skip


@needs("av")
@pytest.mark.parametrize("name", REQUESTS)
def test_documented_requests_are_answered_by_sound_of_the_right_length(server, tiny, name):
    body = {key: first_speaker(tiny) if value == "SPEAKER" else value for key, value in REQUESTS[name].items()}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json={**body, "max_frames": FRAMES}, timeout=60)
    assert answer.status_code == 200, answer.text
    if answer.headers["Content-Type"].startswith("audio/pcm"):
        seconds = len(answer.content) / 2 / SAMPLE_RATE_HZ
    else:
        _, pcm, rate_hz = decoded(answer.content)
        seconds = len(pcm) / rate_hz
    assert seconds == pytest.approx(FRAMES / FRAME_RATE_HZ, abs=0.1)


@needs("pipecat", "openai")
@pytest.mark.parametrize("speed", [None, 2.0])
async def test_pipecats_openai_service_speaks_here_unchanged(synthesizer, speed):
    from pipecat.frames.frames import ErrorFrame, TTSAudioRawFrame, TTSSpeakFrame
    from pipecat.services.openai.tts import OpenAITTSService
    from pipecat.tests.utils import run_test

    from mktts.server import Limits

    with served(synthesizer, Limits(max_duration_s=FRAMES / FRAME_RATE_HZ)) as server:
        service = OpenAITTSService(
            api_key="none",
            base_url=f"{server.url}/v1",
            sample_rate=SAMPLE_RATE_HZ,
            settings=OpenAITTSService.Settings(voice="nova", speed=speed),
        )
        down, up = await run_test(service, frames_to_send=[TTSSpeakFrame(TEXT)])
    assert not [frame for frame in (*down, *up) if isinstance(frame, ErrorFrame)]
    audio = b"".join(frame.audio for frame in down if isinstance(frame, TTSAudioRawFrame))
    assert len(audio) / 2 / SAMPLE_RATE_HZ == pytest.approx(FRAMES / FRAME_RATE_HZ / (speed or 1), abs=0.01)
    assert any(audio)
