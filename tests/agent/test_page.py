"""The agent's page: its audio code in node, and the page itself in a real Chromium with a fake microphone."""

import contextlib
import json
import mimetypes
import shutil
import subprocess
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absent import needs
from agent_picture import SPOKEN, visit
from chromium import BINARY, MICROPHONE_RATE_HZ, NAMES, visited
from pipecat_fakes import until
from served import running_agent
from sounds import tone
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

import mktts
from mktts.agent.settings import AgentSettings
from mktts.audio import from_pcm16, to_pcm16
from mktts.spec import SAMPLE_RATE_HZ

PAGE = Path(mktts.__file__).parent / "agent" / "page"
BEEP_HZ, INPUT_RATE_HZ = 600, 16_000
CONFIG = {"stt": "a grammar", "llm": "scripted", "voice": "random:tiny", "random_weights": True}
CONFIG |= {"input_rate_hz": INPUT_RATE_HZ, "output_rate_hz": SAMPLE_RATE_HZ, "transports": ["websocket"]}
CONFIG |= {"hints": ["hello", "what time is it"]}
MUTED = {"type": "mute", "muted": True}
needs_chromium = pytest.mark.skipif(BINARY is None, reason=f"no Chromium on this machine (looked for {NAMES})")


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
        self.paths: list[str] = []  # of its conversations
        self.closed = 0
        self.socket: ServerConnection | None = None

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def new_samples(self, frames: int) -> np.ndarray:
        """Those of the next `frames` frames of the microphone, float32."""
        wanted = len(self.frames) + frames
        await until(lambda: len(self.frames) >= wanted)
        return from_pcm16(np.frombuffer(b"".join(self.frames[-frames:]), "<i2"))

    async def converse(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.paths.append(socket.request.path)
        with contextlib.suppress(ConnectionClosed):
            async for message in socket:
                if isinstance(message, bytes):
                    self.frames.append(message)
                else:
                    self.messages.append(json.loads(message))
        self.closed += 1

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """A file of the page, or what it asks of its configuration; None opens a conversation."""
        name = request.path.partition("?")[0].lstrip("/") or "index.html"
        if name == "agent":
            return None
        if name == "agent/config":
            return connection.respond(HTTPStatus.OK, json.dumps(CONFIG))
        if not (PAGE / name).is_file():
            return connection.respond(HTTPStatus.NOT_FOUND, name)
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        return Response(200, "OK", Headers({"Content-Type": kind}), (PAGE / name).read_bytes())


@needs_chromium
async def test_the_page_talks(tmp_path):
    beep = np.concatenate([tone(0.3, BEEP_HZ, MICROPHONE_RATE_HZ, peak) for peak in (0.5, 0.0)])
    bot = PageBot()
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(bot.converse, "127.0.0.1", 0, process_request=bot.answer))
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        page = await stack.enter_async_context(visited(f"{url}/?key=a%2Fb", tmp_path, np.tile(beep, 20)))
        await page.until("document.querySelector('#facts').textContent")
        assert "noise, not speech" in await page.text("#noise") and "“hello”" in await page.text("#hints")
        await page.click("#start")
        await until(lambda: bot.messages)
        assert bot.messages[0] == {"type": "hello"} and bot.paths == ["/agent?key=a%2Fb"]
        heard = await bot.new_samples(100)
        assert {len(frame) for frame in bot.frames} == {2 * INPUT_RATE_HZ // 50}
        assert abs(np.abs(np.fft.rfft(heard)).argmax() * INPUT_RATE_HZ / len(heard) - BEEP_HZ) < 10

        await bot.socket.send(to_pcm16(tone(5.0)))
        await page.until("Number(document.querySelector('#played').textContent) > 100")
        await bot.send("clear")
        await page.until("Number(document.querySelector('#dropped').textContent) > 0")
        await page.until("Number(document.querySelector('#queued').textContent) === 0")
        assert await page.number("#played") < 4_000

        await bot.send("caption", who="user", text="What time is it?", final=True)
        await bot.send("caption", who="bot", text="<b>Once", final=True, turn=1, interrupted=True, unheard="upon")
        await bot.send("latency", turn=1, first_audio_ms=402.4)
        await page.until("document.querySelectorAll('#captions li').length === 2")
        assert await page.text("#captions .cut .said") == "<b>Once" and await page.text("#captions .cut s") == "upon"
        await page.until("document.querySelector('#tiles [data-name=first_audio_ms]').textContent === '402'")

        await page.js("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'm', bubbles: true}))")
        await until(lambda: MUTED in bot.messages)
        await bot.new_samples(5)  # what was under way
        assert not (await bot.new_samples(60)).any()
        await page.js("document.querySelector('#typed').value = ' hm '")
        await page.click("#send")
        await until(lambda: bot.messages[-1] == {"type": "text", "text": "hm"})
        await bot.socket.close(1012)  # as a server that is started again does
        await until(lambda: bot.closed == 1 and bot.messages[-2:] == [{"type": "hello"}, MUTED])  # by itself
        await bot.send("error", message="The model is gone.", fatal=True)
        await until(lambda: bot.closed == 2)
        assert "gone" in await page.text("#problem") and page.errors == []
        assert all(asked.startswith((url, "data:")) for asked in page.requested)


@pytest.mark.slow  # in real time, three processes at once: beside other tests on two cores the audio runs dry
@needs_chromium
@needs("pocketsphinx", "aiortc")
@pytest.mark.parametrize("transport", ["websocket", "webrtc"])
async def test_a_conversation_with_the_real_agent(tmp_path, checkpoint_cache, transport):
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
