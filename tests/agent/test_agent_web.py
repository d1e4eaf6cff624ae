"""The agent's server, over real HTTP and WebSocket. Random weights: who may connect, what comes in which order."""

import asyncio
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import pytest
import websockets
from absent import needs
from pipecat.frames.frames import LLMFullResponseEndFrame, LLMFullResponseStartFrame, LLMTextFrame
from pipecat.observers.base_observer import FramePushed
from pipecat.processors.frame_processor import FrameDirection
from served import running_agent, until

from mktts.agent import intents, live, user_speech
from mktts.agent.settings import AgentSettings
from mktts.agent.web import PageObserver
from mktts.cli import main
from mktts.common import python_path
from mktts.errors import AgentError
from mktts.spec import SAMPLE_RATE_HZ

pytestmark = needs("pocketsphinx")  # the speech to text that the agent has without a key
SETTINGS = AgentSettings(checkpoint="random:tiny", turn_end="timeout", seed=1)
KEY = "let-me-in"
PIECE_S = 0.02
PIECE_BYTES = 2 * round(PIECE_S * user_speech.USER_RATE_HZ)
WAIT_S = 60.0
BARE_SDP = "v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 0\r\n"


@pytest.fixture(scope="module")
def url(checkpoint_cache):
    with running_agent(SETTINGS) as address:
        yield address


def socket_of(url: str, query: str = "") -> str:
    return url.replace("http", "ws", 1) + "/agent" + query


async def is_ready(url: str, query: str = "") -> bool:
    """Whether a page that connects now gets a conversation."""
    async with websockets.connect(socket_of(url, query)) as socket:
        with suppress(websockets.ConnectionClosed):
            return json.loads(await asyncio.wait_for(socket.recv(), WAIT_S))["type"] == "ready"
    return False


class Visitor:
    """A page that listens on a socket and has a microphone. messages: what came, but for sound."""

    def __init__(self, socket) -> None:
        self.socket, self.messages, self.audio_bytes, self._due_s = socket, [], 0, time.monotonic()

    async def listen(self) -> None:
        async for message in self.socket:
            if isinstance(message, bytes):
                self.audio_bytes += len(message)
            else:
                self.messages.append(json.loads(message))

    async def say(self, kind: str, **fields: object) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def speak(self, pcm: bytes) -> None:
        for start in range(0, len(pcm), PIECE_BYTES):
            await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
            self._due_s += PIECE_S  # as a microphone: late pieces are made up for
            await self.socket.send(pcm[start : start + PIECE_BYTES])

    def of(self, kind: str, **fields: object) -> list[dict]:
        wanted = {"type": kind, **fields}.items()
        return [message for message in self.messages if wanted <= message.items()]

    async def until(self, kind: str, **fields: object) -> None:
        """Waits for such a message; the microphone hears nothing meanwhile."""
        async with asyncio.timeout(WAIT_S):
            while not self.of(kind, **fields):
                await self.speak(bytes(PIECE_BYTES))


@asynccontextmanager
async def visit(url: str) -> AsyncIterator[Visitor]:
    async with websockets.connect(socket_of(url)) as socket, asyncio.TaskGroup() as tasks:
        visitor = Visitor(socket)
        listening = tasks.create_task(visitor.listen())
        yield visitor
        listening.cancel()


async def test_a_conversation_over_the_pages_socket(url):
    async with visit(url) as page:
        for wrong in ("not json", "[]", '"hello"', b"\1\2\3"):
            await page.socket.send(wrong)
        await page.until("ready")
        assert not page.of("caption")  # greeted when the page says hello, not before
        await page.say("hello")
        await page.until("caption", who="bot", final=True)
        await page.say("mute", muted=True)
        await page.speak(user_speech.load("tell me a joke").tobytes())
        await page.say("mute", muted=False)
        await page.speak(bytes(40 * PIECE_BYTES) + user_speech.load("thank you").tobytes())
        await page.until("latency")
        await page.until("caption", who="bot", final=True, text="You are welcome.")
    assert page.of("caption", who="bot", final=True)[0]["text"] == SETTINGS.greeting
    said = [message["text"] for message in page.of("caption", who="user", final=True)]
    assert said == ["thank you"]  # the mute was kept
    assert page.of("state", bot="speaking") and page.of("state", user="speaking") and page.of("state", bot="thinking")
    (latency,) = page.of("latency")
    assert latency["turn"] == 1 and 0 < latency["transcript_ms"] < latency["first_audio_ms"]
    assert page.messages.index(page.of("clear")[0]) < page.messages.index(latency)
    assert page.audio_bytes > SAMPLE_RATE_HZ  # more than half a second


async def test_what_is_typed_is_answered_without_a_microphone_and_interrupts_the_answer(url):
    async with visit(url) as page:
        page.speak = lambda pcm: asyncio.sleep(PIECE_S)
        await page.until("ready")
        for wrong in ("", "  ", 7, None):
            await page.say("text", text=wrong)
        await page.say("text", text="tell me a story")
        await page.until("caption", who="user", text="tell me a story")
        await page.until("state", bot="speaking")
        await page.until("caption", who="bot", final=False)
        await page.say("text", text=" thank you ")
        await page.until("caption", who="bot", final=True, text="You are welcome.")
    captions = page.of("caption", final=True)
    assert [(m["who"], m.get("interrupted", False)) for m in captions] == [
        ("user", False), ("bot", True), ("user", False), ("bot", False),
    ]  # fmt: skip
    assert captions[2]["text"] == "thank you" and captions[1]["text"].startswith("Once") and captions[1]["unheard"]


def test_the_page_is_served_alone_and_learns_what_it_talks_to(url):
    assert "<html" in httpx.get(url + "/").raise_for_status().text
    for loaded in re.findall(r'(?:href|src)="(\w[^":]+)"', httpx.get(url + "/").text):
        assert httpx.get(f"{url}/{loaded}").status_code == 200, loaded
    assert httpx.get(f"{url}/../web.py").status_code == 404
    config = httpx.get(f"{url}/agent/config").raise_for_status().json()
    assert config["stt"].startswith("pocketsphinx") and config["random_weights"]
    assert (config["input_rate_hz"], config["output_rate_hz"]) == (user_speech.USER_RATE_HZ, SAMPLE_RATE_HZ)
    assert config["hints"] == intents.hints() and config["transports"][0] == "websocket"


async def test_the_page_is_guarded_as_a_server_is_and_takes_its_key_in_the_address(url):
    foreign = {"Origin": "https://example.org"}
    assert httpx.get(url + "/agent/config", headers=foreign).status_code == 403
    with pytest.raises(websockets.InvalidStatus, match="403"):
        async with websockets.connect(socket_of(url), additional_headers=foreign):
            pass
    with running_agent(SETTINGS, api_key=KEY) as locked:
        assert httpx.get(locked + "/").status_code == httpx.get(f"{locked}/agent/config?key={KEY}").status_code == 200
        assert httpx.post(f"{locked}/agent/offer?key=wrong", json={}).status_code == 401
        with pytest.raises(websockets.InvalidStatus, match="401"):
            async with websockets.connect(socket_of(locked)):
                pass
        assert await is_ready(locked, f"?key={KEY}")


async def test_an_offer_that_cannot_be_answered_or_that_nobody_follows_keeps_no_place(checkpoint_cache, monkeypatch):
    monkeypatch.setattr("mktts.agent.web.MAX_SESSIONS", 1)
    monkeypatch.setattr("mktts.agent.web.CONNECT_S", 0.5)
    peer = pytest.importorskip("aiortc").RTCPeerConnection()
    peer.addTransceiver("audio")
    peer.createDataChannel("chat")
    await peer.setLocalDescription(await peer.createOffer())
    sdp = peer.localDescription.sdp
    await peer.close()  # nobody follows
    broken = [sdp.replace(line, "") for line in ("a=rtcp-mux\r\n", "a=ice-pwd:", "a=fingerprint:")]
    assert sdp not in broken
    with running_agent(SETTINGS) as one_place:
        for body in (b"no json", b"[]", b'{"sdp": 1, "no": 2}'):
            assert httpx.post(f"{one_place}/agent/offer", content=body).status_code == 400
        for wrong in ("garbage", "", "v=0\r\n", BARE_SDP, *broken):
            answer = httpx.post(f"{one_place}/agent/offer", json={"sdp": wrong, "type": "offer"})
            assert answer.status_code == 400 and answer.json()["detail"], wrong
        offer = {"sdp": sdp, "type": "offer"}
        answer = await asyncio.to_thread(httpx.post, f"{one_place}/agent/offer", json=offer, timeout=WAIT_S)
        assert answer.status_code == 200 and answer.json()["type"] == "answer"
        assert httpx.post(f"{one_place}/agent/offer", json=offer).status_code == 503  # one conversation too many
        async with websockets.connect(socket_of(one_place)) as second:
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await asyncio.wait_for(second.recv(), WAIT_S)
            assert closed.value.rcvd.code == 1013
        async with asyncio.timeout(WAIT_S):
            while not await is_ready(one_place):
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("words", "hidden", "message"),
    [
        ("--host 0.0.0.0", None, "MKTTS_API_KEY"),
        ("--voice nosuch", None, "nosuch"),
        ("--language klingon", None, "klingon"),
        ("--instruct softly", None, "instruct"),
        ("--llm openai --openai-url localhost:11434", None, "http://"),
        ("--llm qwen3 --llm-checkpoint random:nosuch", None, "nosuch"),
        ("--stt-model tiny", None, "--stt whisper"),
        ("--llm-checkpoint random:tiny", None, "--llm qwen3"),
        ("--stt deepgram", None, "DEEPGRAM_API_KEY"),
        ("--llm openai", None, "OPENAI_BASE_URL"),
        ("", "fastapi", "the package fastapi: pip install -r requirements.txt"),
        ("", "pocketsphinx", "the package pocketsphinx: pip install -r requirements.txt"),
        ("--stt whisper", "faster_whisper", "the package faster-whisper"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(checkpoint_cache, monkeypatch, capsys, words, hidden, message):
    for variable in ("MKTTS_API_KEY", "DEEPGRAM_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    if hidden is not None:
        monkeypatch.setitem(sys.modules, hidden, None)
    if hidden == "fastapi":
        monkeypatch.delitem(sys.modules, "mktts.agent.web")
    checkpoint = "absent-folder" if hidden else "random:tiny"  # a missing package is told before anything is loaded
    assert main(["agent", "--checkpoint", checkpoint, "--port", "0", *words.split()]) == 2
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith("mktts: ")]
    assert message in line and "open http" not in said.out


@pytest.mark.parametrize(("words", "state"), [([], "silent"), ([" Hm."], "thinking")])
async def test_a_reply_without_words_leaves_nobody_thinking(words, state):
    page = PageObserver(output=None)
    page.send = AsyncMock()
    for frame in (LLMFullResponseStartFrame(), *map(LLMTextFrame, words), LLMFullResponseEndFrame()):
        await page.on_push_frame(FramePushed(page, None, frame, FrameDirection.DOWNSTREAM, 0))
    said = [call.kwargs["bot"] for call in page.send.call_args_list]
    assert said[0] == "thinking" and said[-1] == state


# ---- beside a kernel: a child process that starts, answers, and ends with the process that started it

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
KERNEL = """
import sys
from mktts.agent import live
agent = live.start(checkpoint="random:tiny", turn_end="timeout", voice="")
assert agent.config()["random_weights"]
print(agent.url, agent._process.pid, agent.running, flush=True)
sys.stdin.read()
"""


def a_child() -> live.LiveAgent:
    """Any child that ends with its standard input, as the agent does."""
    process = subprocess.Popen([sys.executable, "-Sc", "import sys; sys.stdin.read()"], **PIPES)
    return live.LiveAgent(process, io.StringIO("its last words"), "http://127.0.0.1:1/?key=a")


async def test_it_converses_until_the_process_that_started_it_is_killed(checkpoint_cache):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], env={**os.environ, **python_path()}, **PIPES)
    url, pid, running = kernel.stdout.readline().split()
    assert running == "True" and url.startswith("http://127.0.0.1:")
    assert httpx.get(url.split("?")[0] + "agent/config").status_code in (401, 403)
    config = httpx.get(url.replace("/?", "/agent/config?")).json()
    assert config["random_weights"] and "random:tiny" in config["voice"]
    async with websockets.connect(url.replace("http", "ws", 1).replace("/?", "/agent?")) as socket:
        await socket.send(json.dumps({"type": "hello"}))
        while not isinstance(await socket.recv(), bytes):
            pass  # the greeting sounds
        kernel.send_signal(signal.SIGKILL)
        state = Path(f"/proc/{pid}/stat")
        until(lambda: not state.exists() or " Z " in state.read_text(), "the agent's process to end")


def test_stop_and_the_last_reference_to_it_end_it_and_stop_again_is_harmless():
    agent = a_child()
    html = agent.frame(height=500)._repr_html_()
    assert agent.url in html.replace("&amp;", "&") and 'allow="microphone; autoplay"' in html and '"500"' in html
    assert agent.running
    agent.stop()
    agent.stop()
    assert not agent.running
    with pytest.raises(AgentError, match="(?s)does not answer.*its last words"):
        agent.config()
    agent = a_child()
    process = agent._process
    del agent
    gc.collect()
    assert process.poll() is not None


def test_an_unknown_option_is_refused_in_the_agents_own_words(checkpoint_cache):
    with pytest.raises(AgentError, match="--colour"):
        live.start(colour="red")
