"""A headless Chromium whose microphone is a WAV file, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
import wave
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import websockets

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S, WAIT_S = 60.0, 60.0
MICROPHONE_RATE_HZ = 48_000  # what the fake microphone takes


def write_microphone(path: Path, pcm: np.ndarray) -> Path:
    """pcm: what the browser's microphone hears, float32 (S,) at MICROPHONE_RATE_HZ."""
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, MICROPHONE_RATE_HZ, 0, "NONE", ""))
        out.writeframes((pcm * 32_767).astype("<i2").tobytes())
    return path


def binary() -> str | None:
    """The first Chromium on the PATH, None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class Chromium:
    """A running browser; `port` is where its DevTools listen."""

    port: int

    @contextlib.asynccontextmanager
    async def tab(self, url: str, height: int = 680) -> AsyncIterator[Tab]:
        """A new tab at `url`, loaded; closed afterwards."""
        about = await asyncio.to_thread(self._ask, f"new?{urllib.parse.quote(url, safe='')}", "PUT")
        async with websockets.connect(about["webSocketDebuggerUrl"], max_size=None, close_timeout=0.1) as socket:
            tab = Tab(socket)
            for domain in ("Runtime", "Page", "Network"):
                await tab.command(f"{domain}.enable")
            size = {"width": 760, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await tab.command("Emulation.setDeviceMetricsOverride", **size)
            await tab.until("location.href !== 'about:blank' && document.readyState === 'complete'")
            await tab.command("Page.bringToFront")  # a tab behind another one gets no clicks
            yield tab
            await asyncio.to_thread(self._ask, f"close/{about['id']}")

    def _ask(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/{path}", method=method)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            body = answer.read()
        return json.loads(body) if body.startswith((b"{", b"[")) else body


class Tab:
    """One page. `errors` holds uncaught exceptions, `requested` every address it asked for while it was watched."""

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
            self._note(message)

    async def js(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; what it throws fails the test."""
        result = await self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, wait_s: float = WAIT_S) -> None:
        """Waits until `expression` is true, as JavaScript sees it, in the page."""
        end_s = time.monotonic() + wait_s
        while not await self.js(f"(async () => Boolean({expression}))()"):
            if time.monotonic() > end_s:
                raise AssertionError(f"waited in vain for {expression}; the page says {await self.text('body')!r}")
            await asyncio.sleep(0.03)

    async def text(self, selector: str) -> str:
        return await self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    async def number(self, selector: str) -> float:
        return float(await self.text(selector))

    async def click(self, selector: str) -> None:
        """A real click in the middle of the element, once it can be clicked."""
        named = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"({named} || {{disabled: true}}).disabled === false")
        await self.js(f"({named}).addEventListener('pointerdown', () => {{ window.hit = true }}, {{once: true}})")
        await self.js("window.hit = false")
        end_s = time.monotonic() + WAIT_S
        while not await self.js("window.hit"):  # a page takes no clicks before it has been painted
            assert time.monotonic() < end_s, f"{selector} cannot be clicked"
            box = await self.js(
                f"(b => ({{x: b.x + b.width / 2, y: b.y + b.height / 2}}))({named}.getBoundingClientRect())"
            )
            for kind in ("mousePressed", "mouseReleased"):
                await self.command("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    async def press(self, key: str) -> None:
        """key: a letter."""
        code = ord(key.upper())
        await self.command("Input.dispatchKeyEvent", type="keyDown", key=key, text=key, windowsVirtualKeyCode=code)
        await self.command("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def picture(self, path: Path) -> None:
        shot = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])


@contextlib.contextmanager
def chromium(folder: Path, microphone: Path, *, repeat: bool = True) -> Iterator[Chromium]:
    """Runs the browser with its profile in `folder`; `microphone` is a WAV file, played once unless `repeat`."""
    profile = folder / "profile"
    command = [
        binary(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={microphone}{'' if repeat else '%noloop'}",
        "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Chromium(_port(profile / "DevToolsActivePort", process, folder / "chromium.log"))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(file: Path, process: subprocess.Popen, log: Path) -> int:
    end_s = time.monotonic() + START_S
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < end_s, log.read_text(errors="replace")[-2_000:]
        time.sleep(0.05)
    return int(file.read_text().split()[0])
