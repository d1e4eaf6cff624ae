"""A bot that does what the test says: it serves the real page, keeps what the page sends, and sends what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

import mktts
from mktts.audio import to_pcm16
from mktts.server import Limits, listen
from mktts.spec import SAMPLE_RATE_HZ

PAGE = Path(mktts.__file__).parent / "agent" / "page"
INPUT_RATE_HZ = 16_000
PIECE_S = 0.04
WAIT_S = 30.0


class PageBot:
    """`frames` and `messages` are what came from the page, in order, of all its conversations."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.messages: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.closed = 0
        self.url = ""
        self.config = {
            "input_rate_hz": INPUT_RATE_HZ,
            "output_rate_hz": SAMPLE_RATE_HZ,
            "ears": "keyword ears",
            "mind": "scripted",
            "voice": "random:tiny",
            "random_weights": True,
            "transports": ["websocket"],
            "hints": ["hello", "what time is it"],
        }
        self.refuse_with: int | None = None  # a close code
        self._socket: WebSocket | None = None
        self.app = FastAPI()
        self.app.get("/agent/config")(lambda: self.config)
        self.app.get("/around")(_around)
        self.app.websocket("/agent")(self._converse)
        self.app.mount("/", StaticFiles(directory=PAGE, html=True))

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def heard(self, last: int | None = None) -> np.ndarray:
        """The microphone's samples (S,) float32, of the `last` frames or of all."""
        frames = self.frames[-last:] if last else self.frames
        return np.frombuffer(b"".join(frames), "<i2").astype(np.float32) / 2**15

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send_text(json.dumps({"type": kind, **fields}))

    async def play(self, seconds: float, *, hz: float = 440.0, paced: bool = True) -> None:
        """A tone, in pieces; all at once where not `paced`."""
        samples = np.arange(round(seconds * SAMPLE_RATE_HZ))
        pcm = to_pcm16((0.3 * np.sin(2 * np.pi * hz / SAMPLE_RATE_HZ * samples)).astype(np.float32))
        step = 2 * round(PIECE_S * SAMPLE_RATE_HZ)
        for start in range(0, len(pcm), step):
            await self._socket.send_bytes(pcm[start : start + step])
            if paced:
                await asyncio.sleep(PIECE_S)

    async def hang_up(self, code: int) -> None:
        await self._socket.close(code)

    async def until(self, condition: Any, what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, f"waited in vain for: {what}"
            await asyncio.sleep(0.02)

    async def new_frames(self, count: int) -> np.ndarray:
        """The samples of the next `count` frames that come."""
        wanted = len(self.frames) + count
        await self.until(lambda: len(self.frames) >= wanted, f"{count} more microphone frames")
        return self.heard(count)

    async def _converse(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.refuse_with:
            await socket.close(self.refuse_with)
            return
        self._socket = socket
        self.keys += socket.query_params.getlist("key")
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                if message.get("bytes") is not None:
                    self.frames.append(message["bytes"])
                else:
                    self.messages.append(json.loads(message["text"]))
        self.closed += 1


def _around(frame: str, allow: str = "") -> HTMLResponse:
    """A page of another site around the agent's, as a notebook's output is."""
    return HTMLResponse(
        f'<body style="margin:0"><iframe src="{frame}" allow="{allow}" width="760" height="640"></iframe>'
    )


@contextlib.asynccontextmanager
async def page_bot() -> AsyncIterator[PageBot]:
    """Serves a PageBot on a free port, in this event loop."""
    bot = PageBot()
    bound = listen("127.0.0.1", 0, Limits())
    bot.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(bot.app, log_config=None, ws="websockets-sansio", lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve([bound]))
    await bot.until(lambda: server.started or serving.done(), "the server's start")
    yield bot
    server.should_exit = server.force_exit = True
    await serving
