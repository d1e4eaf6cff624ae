"""What the WebSockets of other servers have in common: JSON in, JSON and sound out, each wait with an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from mktts.server.access.gate import owner_of_request
from mktts.server.problems import Problem
from mktts.server.speaking import Speaking
from mktts.server.studio import Studio

POLICY_VIOLATION, NORMAL, FAILED = 1008, 1000, 1011  # RFC 6455, 7.4.1

log = logging.getLogger(__name__)


class Stalled(Exception):
    """The client took nothing for too long."""


class PeerSocket:
    """One connection. Belongs to the event loop."""

    def __init__(self, socket: WebSocket, studio: Studio, speaking: Speaking) -> None:
        self.socket = socket
        self.studio = studio
        self.speaking = speaking
        self.owner = owner_of_request(socket.scope)

    async def receive(self, seconds: float | None) -> dict[str, Any]:
        """The next message, a JSON object. Raises TimeoutError after `seconds`, Problem for anything else, and
        WebSocketDisconnect at the end of the connection."""
        try:
            async with asyncio.timeout(seconds):
                message = json.loads(await self.socket.receive_text())
        except KeyError:
            raise Problem(400, "not_text", "expected a JSON message, got a binary one") from None
        except (ValueError, RecursionError):
            raise Problem(400, "invalid_json", "expected JSON, could not read it") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise Problem(400, "invalid_value", "expected a JSON object with a type")
        return message

    async def send(self, message: dict[str, Any] | bytes) -> None:
        """Raises Stalled, and WebSocketDisconnect or RuntimeError where the connection is gone."""
        try:
            async with asyncio.timeout(self.studio.limits.stall_s):
                if isinstance(message, bytes):
                    await self.socket.send_bytes(message)
                else:
                    await self.socket.send_text(json.dumps(message))
        except TimeoutError:
            log.warning("a client took nothing for %g s", self.studio.limits.stall_s)
            raise Stalled from None

    async def close(self, code: int, reason: str = "") -> None:
        """Whatever became of the connection."""
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            async with asyncio.timeout(1):
                await self.socket.close(code, reason)
