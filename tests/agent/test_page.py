"""The agent's page: its audio code in node, and the page itself in a real Chromium with a fake microphone.

`make reference` takes a picture of the page in a conversation with the real bot.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from absent import needs
from agent_picture import SPOKEN, visit
from chromium import MICROPHONE_RATE_HZ, NAMES, binary, chromium, write_microphone
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.staticfiles import StaticFiles
from pipecat_fakes import until
from served import running_agent

import mktts
from mktts.agent.settings import AgentSettings
from mktts.audio import to_pcm16
from mktts.server.settings import Limits, listen
from mktts.spec import SAMPLE_RATE_HZ

PAGE = Path(mktts.__file__).parent / "agent" / "page"
BEEP_HZ, INPUT_RATE_HZ = 600, 16_000
CONFIG = {
    "input_rate_hz": INPUT_RATE_HZ,
    "output_rate_hz": SAMPLE_RATE_HZ,
    "stt": "a grammar",
    "llm": "scripted",
    "voice": "random:tiny",
    "random_weights": True,
    "transports": ["websocket"],
    "hints": ["hello", "what time is it"],
}
MUTED = {"type": "mute", "muted": True}
needs_chromium = pytest.mark.skipif(binary() is None, reason=f"no Chromium on this machine (looked for {NAMES})")


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript runtime (node) on this machine")
def test_resampling_and_the_playback_queue_do_what_they_promise():
    harness = Path(__file__).with_name("page_harness.mjs")
    done = subprocess.run(["node", str(harness), str(PAGE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class PageBot:
    """Serves the real page, keeps what it sends (`frames`, `messages`), and sends what the test says."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.messages: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.closed = 0
        self.url = ""
        self.app = FastAPI()
        self.app.get("/agent/config")(lambda: CONFIG)
        self.app.websocket("/agent")(self._converse)
        self.app.mount("/", StaticFiles(directory=PAGE, html=True))
        self._socket: WebSocket | None = None

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send_text(json.dumps({"type": kind, **fields}))

    async def lose(self) -> None:
        """Ends the connection as a server that is started again does."""
        await self._socket.close(1012)

    async def play(self, seconds: float) -> None:
        samples = np.arange(round(seconds * SAMPLE_RATE_HZ))
        await self._socket.send_bytes(
            to_pcm16((0.3 * np.sin(2 * np.pi * 440 / SAMPLE_RATE_HZ * samples)).astype(np.float32))
        )

    async def new_samples(self, frames: int) -> np.ndarray:
        """Those of the next `frames` frames of the microphone, float32."""
        wanted = len(self.frames) + frames
        await until(lambda: len(self.frames) >= wanted)
        return np.frombuffer(b"".join(self.frames[-frames:]), "<i2").astype(np.float32) / 2**15

    async def _converse(self, socket: WebSocket) -> None:
        await socket.accept()
        self._socket = socket
        self.keys += socket.query_params.getlist("key")
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                if message.get("bytes") is not None:
                    self.frames.append(message["bytes"])
                else:
                    self.messages.append(json.loads(message["text"]))
        self.closed += 1


@contextlib.asynccontextmanager
async def page_bot() -> AsyncIterator[PageBot]:
    """Serves a PageBot on a free port, in this event loop."""
    bot = PageBot()
    bound = listen("127.0.0.1", 0, Limits())
    bot.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(bot.app, log_config=None, ws="websockets-sansio", lifespan="off"))
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve([bound]))
    await until(lambda: server.started or serving.done())
    yield bot
    server.should_exit = server.force_exit = True
    await serving


@needs_chromium
async def test_the_page_talks(tmp_path):
    """Microphone, playback, an interruption, captions, latencies, mute, typed text, errors, in one visit."""
    times = np.arange(MICROPHONE_RATE_HZ * 6 // 10) / MICROPHONE_RATE_HZ
    beep = 0.5 * np.sin(2 * np.pi * BEEP_HZ * times) * (times < 0.3)
    with chromium(tmp_path, write_microphone(tmp_path / "beeps.wav", np.tile(beep, 20))) as browser:
        async with page_bot() as bot, browser.tab(f"{bot.url}/?key=a%2Fb") as page:
            await page.until("document.querySelector('#facts').textContent")
            assert "noise, not speech" in await page.text("#noise") and "“hello”" in await page.text("#hints")
            await page.click("#start")
            await until(lambda: bot.messages)
            assert bot.messages[0] == {"type": "hello"} and bot.keys == ["a/b"]
            heard = await bot.new_samples(100)
            assert {len(frame) for frame in bot.frames} == {2 * INPUT_RATE_HZ // 50}
            assert abs(np.abs(np.fft.rfft(heard)).argmax() * INPUT_RATE_HZ / len(heard) - BEEP_HZ) < 10

            await bot.play(5.0)
            await page.until("Number(document.querySelector('#played').textContent) > 100")
            await bot.send("clear")
            await page.until("Number(document.querySelector('#dropped').textContent) > 0")
            await page.until("Number(document.querySelector('#queued').textContent) === 0")
            assert await page.number("#played") < 4_000

            await bot.send("caption", who="user", text="What time is it?", final=True)
            await bot.send("caption", who="bot", text="<b>Once", final=True, turn=1, interrupted=True, unheard="upon")
            await bot.send("latency", turn=1, first_audio_ms=402.4)
            await page.until("document.querySelectorAll('#captions li').length === 2")
            assert (
                await page.text("#captions .cut .said") == "<b>Once" and await page.text("#captions .cut s") == "upon"
            )
            await page.until("document.querySelector('#tiles [data-name=first_audio_ms]').textContent === '402'")

            await page.press("m")
            await until(lambda: MUTED in bot.messages)
            await bot.new_samples(5)  # what was under way
            assert not (await bot.new_samples(60)).any()
            await page.js("document.querySelector('#typed').value = ' hm '")
            await page.click("#send")
            await until(lambda: bot.messages[-1] == {"type": "text", "text": "hm"})
            await bot.lose()
            await until(lambda: bot.closed == 1 and bot.messages[-2:] == [{"type": "hello"}, MUTED])  # by itself
            await bot.send("error", message="The model is gone.", fatal=True)
            await until(lambda: bot.closed == 2)
            assert "gone" in await page.text("#problem") and page.errors == []
            assert all(url.startswith((bot.url, "data:")) for url in page.requested)


@pytest.mark.slow  # in real time, three processes at once: beside other tests on two cores the audio runs dry
@needs_chromium
@needs("pocketsphinx", "aiortc")
@pytest.mark.parametrize("transport", ["websocket", "webrtc"])
async def test_a_conversation_with_the_real_agent(tmp_path, checkpoint_cache, transport):
    """Three turns of recorded speech, the last of which interrupts; what the page shows is what both have said."""
    with running_agent(AgentSettings(turn_end="timeout", seed=1)) as url:
        async with visit(tmp_path, url, transport) as page:
            said = "[...document.querySelectorAll('#captions .user .said')].map(s => s.textContent)"
            assert await page.js(said) == [text for _, text in SPOKEN]
            assert "Once upon a time" in await page.text("#captions .cut .said")
            assert "everybody cheered" in await page.text("#captions .cut s")
            assert await page.number("#played") > 1_000 and await page.number("#sent") > 500
            for kind in ("transcript_ms", "first_token_ms", "first_audio_ms", "page_ms", "silence_ms"):
                assert await page.number(f"#tiles [data-name={kind}]") > 0
            assert page.errors == []
