"""WebSockets as other servers of this model speak them, for clients that were written for those."""

from __future__ import annotations

from fastapi import FastAPI, WebSocket

from mktts.server.peers.nari import NariSocket
from mktts.server.peers.omni import OmniSocket
from mktts.server.speaking import Speaking
from mktts.server.studio import Studio

OMNI_PATH, NARI_PATH = "/v1/audio/speech/stream", "/v1/audio/speech/ws"


def add_peer_sockets(app: FastAPI, studio: Studio, speaking: Speaking) -> None:
    """vLLM-Omni's and Nari's."""

    @app.websocket(OMNI_PATH)
    async def omni(socket: WebSocket) -> None:
        await OmniSocket(socket, studio, speaking).run()

    @app.websocket(NARI_PATH)
    async def nari(socket: WebSocket) -> None:
        await NariSocket(socket, studio, speaking).run()
