"""The page's WebSocket: raw PCM both ways, and JSON beside it.

Binary messages are mono 16-bit little-endian PCM, 16 kHz from the page and 24 kHz to it. Text messages are objects
with a "type" (`mktts.agent.messages`); from the page come "hello", after which the bot greets, "mute", and "text", what
was typed, which the bot answers as if it had been said.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from fastapi import WebSocket
from pipecat.frames.frames import (
    Frame,
    InputAudioRawFrame,
    InputTransportMessageFrame,
    InterruptionFrame,
    OutputAudioRawFrame,
    OutputTransportMessageFrame,
    OutputTransportMessageUrgentFrame,
)
from pipecat.serializers.base_serializer import FrameSerializer
from pipecat.transports.websocket.fastapi import (
    FastAPIWebsocketOutputTransport,
    FastAPIWebsocketParams,
    FastAPIWebsocketTransport,
)

from mktts.agent.user_speech import USER_RATE_HZ

_LEAD_S = 0.2  # of audio in the page's queue: enough for a busy network, and little to drop
_BYTES = 2


class PcmSerializer(FrameSerializer):
    """Frames as the page has them. Keeps whether the page is muted, and hears silence while it is."""

    def __init__(self, **kwargs: Any) -> None:
        """Initialize the serializer.

        Args:
            **kwargs: Additional arguments passed to parent class.
        """
        super().__init__(**kwargs)
        self._muted = False

    async def serialize(self, frame: Frame) -> str | bytes | None:
        """Convert a frame for the page.

        Args:
            frame: The frame to serialize.

        Returns:
            PCM, JSON, or None for what the page does not get.
        """
        if isinstance(frame, OutputAudioRawFrame):
            return frame.audio
        if isinstance(frame, InterruptionFrame):
            return json.dumps({"type": "clear"})  # what the page has queued cannot be taken back from here
        if isinstance(frame, (OutputTransportMessageFrame, OutputTransportMessageUrgentFrame)):
            return None if self.should_ignore_frame(frame) else json.dumps(frame.message)
        return None

    async def deserialize(self, data: str | bytes) -> Frame | None:
        """Convert a message of the page.

        Args:
            data: PCM or JSON.

        Returns:
            The frame; None for what is neither.
        """
        if isinstance(data, bytes):
            whole = len(data) - len(data) % _BYTES
            return InputAudioRawFrame(bytes(whole) if self._muted else data[:whole], USER_RATE_HZ, 1)
        try:
            message = json.loads(data)
        except ValueError:
            return None
        if not isinstance(message, dict):
            return None
        if message.get("type") == "mute":
            self._muted = message.get("muted") is True
        return InputTransportMessageFrame(message=message)


class PageTransport(FastAPIWebsocketTransport):
    """Pipecat's WebSocket transport at the pace of the listener."""

    def __init__(self, websocket: WebSocket, **kwargs: Any) -> None:
        """Initialize the transport.

        Args:
            websocket: The accepted WebSocket.
            **kwargs: Additional arguments passed to the parent ``FastAPIWebsocketTransport``.
        """
        params = FastAPIWebsocketParams(
            audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0, serializer=PcmSerializer()
        )
        super().__init__(websocket, params, **kwargs)
        self._output = _PacedOutput(self, self._client, self._params, name=self._output_name)


class _PacedOutput(FastAPIWebsocketOutputTransport):
    """Pipecat's own sends twice as fast as the audio is heard: the bot would count as silent half-way through, and the
    page would have seconds to drop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._until_s = 0.0

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        if not await super().write_audio_frame(frame):
            return False
        now_s = time.monotonic()
        self._until_s = max(self._until_s, now_s) + len(frame.audio) / _BYTES / self.sample_rate
        await asyncio.sleep(max(0.0, self._until_s - _LEAD_S - now_s))
        return True
