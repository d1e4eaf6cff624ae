"""A headless Chromium whose microphone is a WAV file, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import websockets
from pipecat_fakes import until

from mktts.audio import write_audio

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)  # the first on the PATH
WAIT_S = 60.0
MICROPHONE_RATE_HZ = 48_000  # what the fake microphone takes
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream", "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip


class Tab:
    """One page. `errors` holds uncaught exceptions, `requested` every address it asked for."""

    def __init__(self, socket: Any) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.recv(), WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, (method, message)
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])

    async def js(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited, as if the user had asked; what it throws fails the test."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        result = await self.command("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until `expression` is true, as JavaScript sees it, in the page."""
        async with asyncio.timeout(WAIT_S):
            while not await self.js(f"Boolean({expression})"):
                await asyncio.sleep(0.03)

    async def go(self, url: str) -> None:
        """Loads another page."""
        await self.command("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def text(self, selector: str) -> str:
        return await self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    async def number(self, selector: str) -> float:
        return float(await self.text(selector))

    async def click(self, selector: str) -> None:
        """A real click in the middle of the element, once it can be clicked."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"({found} || {{disabled: true}}).disabled === false")
        await self.js(f"({found}).addEventListener('pointerdown', () => {{ window.hit = true }}, {{once: true}})")
        await self.js("window.hit = false")
        async with asyncio.timeout(WAIT_S):
            while not await self.js("window.hit"):  # a page takes no clicks before it has been painted
                box = await self.js(
                    f"(b => ({{x: b.x + b.width / 2, y: b.y + b.height / 2}}))({found}.getBoundingClientRect())"
                )
                for kind in ("mousePressed", "mouseReleased"):
                    await self.command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    async def picture(self, path: Path) -> None:
        shot = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def visited(
    url: str, folder: Path, microphone: np.ndarray, *, repeat: bool = True, height: int = 680
) -> AsyncIterator[Tab]:
    """The page at `url`, loaded, in a browser of its own with its files in `folder`.
    microphone: what it hears, float32 (S,) at MICROPHONE_RATE_HZ, once unless `repeat`."""
    heard = write_audio(folder / "microphone.wav", microphone, MICROPHONE_RATE_HZ)
    sound = f"--use-file-for-fake-audio-capture={heard}{'' if repeat else '%noloop'}"
    port_file = folder / "profile" / "DevToolsActivePort"
    command = [BINARY, *FLAGS, sound, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        await until(lambda: port_file.exists() and port_file.read_text().strip())
        pages = httpx.get(f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/list").json()
        (about,) = [page for page in pages if page["type"] == "page"]
        async with websockets.connect(about["webSocketDebuggerUrl"], max_size=None, close_timeout=0.1) as socket:
            tab = Tab(socket)
            for domain in ("Runtime", "Page", "Network"):
                await tab.command(f"{domain}.enable")
            size = {"width": 760, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await tab.command("Emulation.setDeviceMetricsOverride", **size)
            await tab.go(url)
            await tab.command("Page.bringToFront")  # a tab behind another one gets no clicks
            yield tab
    finally:
        process.terminate()
        process.wait(WAIT_S)
