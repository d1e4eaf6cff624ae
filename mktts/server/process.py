"""The server in a process: how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Collection, Sequence

from mktts.server.app import make_app
from mktts.server.orderly import OrderlyServer
from mktts.server.problems import RETRY_AFTER_S, Problem
from mktts.server.references import ReferenceSources
from mktts.server.studio import Studio
from mktts.server.uploads.folder import VoiceFolder

_POLL_S = 0.02
_SWEEP_S = 5.0  # within which a voice that another server deleted is out of this one's memory

log = logging.getLogger(__name__)


class Server(OrderlyServer):
    """uvicorn, ending in order: refuse new streams, let open ones finish for a while, cancel the rest, go."""

    def __init__(
        self,
        studio: Studio,
        api_key: str | Sequence[str] | None = None,
        origins: Collection[str] = (),
        sources: ReferenceSources | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        super().__init__(
            make_app(studio, api_key, origins, sources, hosts),
            largest_message_bytes(studio),
            head_s=studio.limits.head_s,
            # A client that plays as it reads has its pong behind minutes of audio; stall_s finds dead ones.
            ws_ping_timeout=None,
        )
        self._studio = studio
        self._sweeping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._studio.uploads is not None:
            self._sweeping = asyncio.create_task(sweep(self._studio.uploads))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._studio.stopping = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        if not await self._wait_for_streams(self._studio.limits.grace_s):
            self._studio.cancel_all(Problem(503, "stopping", "the server stopped", retry_after_s=RETRY_AFTER_S))
        await asyncio.sleep(_POLL_S)  # the last messages go out before uvicorn closes the connections
        await super().shutdown(sockets)

    async def _wait_for_streams(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while self._studio.streams_open and time.monotonic() < end_s and not self.force_exit:
            await asyncio.sleep(_POLL_S)
        return not self._studio.streams_open


def largest_message_bytes(studio: Studio) -> int:
    """Of a WebSocket: with a Base checkpoint it may bring a recording, as vLLM-Omni's clients do."""
    limits = studio.limits
    recording_bytes = limits.max_reference_bytes * 4 // 3 if studio.model.clones else 0
    return limits.max_body_bytes + recording_bytes


async def sweep(folder: VoiceFolder) -> None:
    """Lets go, again and again, of voices that have expired or that another server of the folder has deleted."""
    while True:
        try:
            await asyncio.to_thread(folder.sweep)
        except Exception:
            log.exception("the folder of uploaded voices could not be swept")
        await asyncio.sleep(_SWEEP_S)
