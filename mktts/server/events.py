"""Server-sent events of OpenAI's speech endpoint (stream_format: sse)."""

from __future__ import annotations

import base64
import json
from typing import Any

from mktts.server.problems import Problem

MEDIA_TYPE = "text/event-stream"


def delta(data: bytes) -> bytes:
    """speech.audio.delta: a piece of the sound, in base64."""
    return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def done(input_tokens: int, output_tokens: int) -> bytes:
    """speech.audio.done: the end. input_tokens: of the text. output_tokens: frames of 80 ms."""
    usage = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    return _event({"type": "speech.audio.done", "usage": usage})


def failed(problem: Problem) -> bytes:
    """What broke the speech off; OpenAI's clients raise it."""
    return _event({"type": "error", "error": problem.detail().shown()})


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
