"""A source of speech behind a server: faults of the server and the connection, refusals, backpressure, tries."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from pipecat.frames.frames import LLMFullResponseEndFrame, TTSAudioRawFrame, TTSSpeakFrame, TTSStoppedFrame
from pipecat.services.tts_service import TextAggregationMode
from pipecat.utils.errors import ErrorCategory
from pipecat_fakes import PIECE, TOO_LATE_S, Talk, taken, turn, until
from served import Served, served
from websockets.asyncio.client import connect
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from mktts import errors
from mktts.engine import scheduler
from mktts.pipecat import MkttsTTSService, RemoteSource, Style
from mktts.pipecat.remote import PATIENCE_S
from mktts.server.settings import Limits
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

KEY = "a-key-of-the-tests"


class Client:
    """One connection, as the server sees it. `got`: what has been read of it."""

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.got: list[dict[str, Any]] = []

    async def read(self, *types: str) -> dict[str, Any]:
        """Reads up to the next message of one of these types."""
        while True:
            self.got.append(json.loads(await self.socket.recv()))
            if self.got[-1]["type"] in types:
                return self.got[-1]

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type, "error": None, **fields}))

    async def audio(self, *pieces: bytes) -> None:
        for piece in pieces:
            await self.say("chunk")
            await self.socket.send(piece)

    async def finished(self, reason: str = "eos", code: str | None = None) -> None:
        await self.say("finished", finish_reason=reason, error=code and failure(code))


def failure(code: str) -> dict[str, Any]:
    return {"message": "told by the server", "type": "server_error", "param": None, "code": code}


@contextlib.asynccontextmanager
async def fake_server(
    script: Callable[[Client], Awaitable[None]] | None = None, silence_s: float = 5.0, **health: Any
) -> AsyncIterator[SimpleNamespace]:
    """Its url and clients, and a source that asks it. It plays `script` for each connection, and says nothing from then
    on. health: what `GET /health` says beside the usual."""
    clients: list[Client] = []
    said = {"status": "ok", "sample_rate_hz": SAMPLE_RATE_HZ, "speakers": ["vivian"], "languages": ["auto", "english"]}
    said |= {"model": {"checkpoint": "fake", "type": "custom_voice", "random_weights": True}, **health}

    def answer(connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/health":
            return None
        status = HTTPStatus.OK if said["status"] == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return connection.respond(status, json.dumps(said))

    async def play(socket: ServerConnection) -> None:
        clients.append(Client(socket))
        with contextlib.suppress(ConnectionClosed):
            if script is not None:
                await script(clients[-1])
            await asyncio.wait_for(socket.wait_closed(), 60)

    async with serve(play, "127.0.0.1", 0, process_request=answer, close_timeout=0.1) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        source = RemoteSource(url, silence_s=silence_s)
        yield SimpleNamespace(url=url, clients=clients, source=source)
        await source.disconnect()


@pytest.fixture(scope="module")
def server(synth: Synthesizer) -> Iterator[Served]:
    with served(synth, Limits(max_streams=1), api_key=KEY) as running:
        yield running


@pytest.mark.parametrize("fault", ["breaks off", "hangs", "stops", "babbles"])
@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_a_server_lost_in_mid_utterance_ends_it_and_the_context_is_true(fault, mode):
    """It is a permanent error only of a server that speaks another protocol: a lost one may come back."""
    text = "One two three four five six seven eight nine ten eleven."
    babbles = fault == "babbles"

    async def script(client: Client) -> None:
        await client.read("start")
        await client.audio(PIECE, PIECE, PIECE)
        if fault == "breaks off":
            return client.socket.transport.abort()
        if fault == "hangs":
            client.socket.transport.pause_reading()  # pings too
        elif fault == "stops":
            await client.finished("error", "stopping")
        else:
            await client.socket.send("[1, 2]")

    async with fake_server(script, silence_s=0.1) as server:
        tts = MkttsTTSService(source=server.source, text_aggregation_mode=mode, stop_frame_timeout_s=TOO_LATE_S)
        async with Talk(tts) as talk:
            await talk.say(*turn(text))
            await talk.until(lambda: talk.up and talk.of(LLMFullResponseEndFrame))
            if babbles:
                await talk.say(*turn("Never said."))
    expected = (errors.EngineError, True) if babbles else (errors.ConnectionLost, False)
    assert [(type(error.exception), error.permanent) for error in talk.failures] == [expected]
    assert tts.is_usable != babbles
    assert b"".join(frame.audio for frame in talk.of(TTSAudioRawFrame)) == 3 * PIECE
    assert talk.heard() and "One two three".startswith(talk.heard())  # of a quarter of a second
    assert sum(message["type"] == "start" for client in server.clients for message in client.got) == 1  # no retry


async def test_a_cancel_ends_the_connection_and_the_next_utterance_has_one_that_is_open():
    async def script(client: Client) -> None:
        if client is server.clients[0]:
            await client.read("start")
            return await client.audio(*[PIECE] * 3)
        await client.read("start")
        await client.audio(b"\1\0", b"\2\0")
        await client.finished()

    async with fake_server(script) as server:
        source = server.source
        await source.connect()
        first = await source.speak("One.", Style())
        assert await anext(first) == PIECE
        first.cancel()
        assert await taken(first) == b"" and first.finish_reason == "cancelled"
        for text in ("Two.", "Three."):
            await until(lambda: source._spares and source._spares[0].done())  # opened for the next one
            speech = await source.speak(text, Style())
            assert await taken(speech) == b"\1\0\2\0" and speech.finish_reason == "eos"
    assert [[message["type"] for message in client.got] for client in server.clients] == [["start"]] * 3 + [[]]


async def test_a_slow_server_that_answers_pings_is_waited_for_and_a_slow_consumer_stops_it_and_loses_nothing():
    piece, sent = bytes(30_000), 0

    async def fast(client: Client) -> None:
        nonlocal sent
        await client.read("start")
        await asyncio.sleep(0.6)
        for _ in range(2_000):
            await client.audio(piece)
            sent += 1
        await client.finished()

    async with fake_server(fast, silence_s=0.2) as server:
        speech = await server.source.speak("Hello.", Style())
        await anext(speech)
        await asyncio.sleep(0.5)  # long enough for all of it; not reading is no silence of the server either
        assert sent * len(piece) < 16 << 20  # far above what Linux lets two sockets on loopback hold
        assert len(await taken(speech)) == 1_999 * len(piece)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        *((code, errors.TextError) for code in ("text_too_long", "bad_text", "idle")),
        *((code, errors.PromptError) for code in ("unknown_speaker", "bad_prompt")),
        *(("bad_voice", errors.VoiceError), ("bad_sampling", errors.SamplingError)),
        *(("duration_too_long", errors.OptionsError), ("engine_error", errors.EngineError)),
        ("of a later version", errors.EngineError),
    ],
)
async def test_errors_of_the_server_are_those_of_a_source_in_process(code, error):
    async def refuse(client: Client) -> None:
        await client.read("start")
        if client is server.clients[0]:
            return await client.say("error", error=failure(code))
        await client.say("started")
        await client.audio(PIECE)
        await client.finished("error", code)

    async with fake_server(refuse) as server:
        refused = await server.source.open(Style())
        refused.feed("Hello.")
        refused.finish()
        with pytest.raises(error, match="told by the server"):
            await anext(refused)
        broken = await server.source.speak("Hello.", Style())
        assert await anext(broken) == PIECE
        with pytest.raises(error, match="told by the server"):
            await anext(broken)
        assert await taken(broken) == b""


@pytest.mark.parametrize("by", ["source", "task"])
async def test_disconnecting_and_cancelling_the_task_that_waits_end_the_generation(by):
    async with fake_server() as server:
        waiting = asyncio.create_task(taken(await server.source.speak("Hello.", Style())))
        await asyncio.sleep(0.05)  # it waits
        if by == "source":
            await server.source.disconnect()
            with pytest.raises(errors.EngineError, match="disconnected"):
                await waiting
        else:
            waiting.cancel()
        await until(lambda: server.clients[0].socket.state is State.CLOSED)


@pytest.mark.parametrize(
    ("health", "message"),
    [
        (None, "python -m mktts serve"),  # there is no server
        ({"status": "stopping"}, "stopping"),
        ({"speakers": None}, "does not answer as"),
        ({"model": {}}, "does not answer as"),
    ],
    ids=str,
)
async def test_a_server_that_is_none_or_stops_is_an_error_at_the_start_and_the_pipeline_ends_in_order(health, message):
    async with contextlib.AsyncExitStack() as running:
        url = (await running.enter_async_context(fake_server(**health or {}))).url
        if health is None:
            await running.aclose()
            with pytest.raises(errors.ConnectionLost, match=message):
                await taken(await RemoteSource(url).speak("Hello.", Style()))
        with pytest.raises(errors.EngineError, match=message):
            await RemoteSource(url).connect()
        tts = MkttsTTSService(source=RemoteSource(url))
        async with Talk(tts) as talk:
            await talk.say(TTSSpeakFrame("Never said."))
        assert not tts.is_usable and talk.samples() == 0 and talk.heard() == ""


@pytest.mark.parametrize(
    ("key", "style", "error", "message"),
    [
        (None, {}, errors.AccessError, "it needs an api_key"),
        ("another", {}, errors.AccessError, "does not accept this api_key"),
        (KEY, {"voice": "mine.safetensors"}, errors.PromptError, "--voice NAME=FILE"),
        (KEY, {"language": "klingon"}, errors.PromptError, "klingon"),
    ],
)
async def test_a_wrong_key_and_a_voice_that_the_server_lacks_are_told_at_the_start(server, key, style, error, message):
    source = RemoteSource(server.url, key)
    tts = MkttsTTSService(source=source, settings=MkttsTTSService.Settings(**style))
    async with Talk(tts):
        assert not tts.is_usable
    with pytest.raises(error, match=message) as refused:
        await source.connect()
        source.check(Style(**style))
    assert "another" not in str(refused.value)


async def test_every_name_that_the_server_may_know_is_left_to_it(server):
    async with fake_server(uploads=True) as other:
        source = RemoteSource(server.url, KEY)
        for one, voice in ((source, "alloy"), (source, "Default"), (other.source, "uploaded")):
            await one.connect()
            one.check(Style(voice=voice, language="en-US"))
            await one.disconnect()


async def test_a_server_with_no_place_free_costs_the_sentence_and_not_the_service(server, tiny, monkeypatch):
    monkeypatch.setattr(scheduler, "ABSENT_S", math.inf)  # the other one listens, although it reads nothing
    source = RemoteSource(server.url, KEY, max_frames=4, retry_s=1.0)
    tts = MkttsTTSService(source=source, stop_frame_timeout_s=TOO_LATE_S)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with Talk(tts) as talk:
        # Its farewell would wait ten seconds behind what it has not read.
        async with connect(server.ws, additional_headers=headers, close_timeout=0.1) as other:
            await other.send(json.dumps({"type": "start", "text": "Once upon a time. " * 20, "max_frames": 5_000}))
            await other.recv()
            await talk.say(*turn("One two."))
            await talk.until(lambda: talk.of(TTSStoppedFrame))
        await until(lambda: server.service.streams_open == 0)
        await talk.say(*turn("Three four."))
    (failed,) = talk.failures
    assert type(failed.exception) is errors.BusyError and failed.category == ErrorCategory.RATE_LIMIT
    assert not failed.permanent and tts.is_usable and talk.heard() == "Three four."


def test_the_address_of_the_websocket_follows_from_the_servers_and_what_is_no_key_is_not_repeated():
    for url, address in (
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/tts/ws"),
        ("https://speech.example/", "wss://speech.example/tts/ws"),
        ("ws://[::1]:80/deep/", "ws://[::1]:80/deep/tts/ws"),
    ):
        assert RemoteSource(url)._ws == address
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:y", "http://me:key@x", "http://x?a=1", ""):
        with pytest.raises(errors.OptionsError, match="url must be"):
            RemoteSource(url)
    for key in ("", " ", "a\nb", "schlüssel"):
        with pytest.raises(errors.OptionsError, match="api_key") as refused:
            RemoteSource("http://x", key)
        assert not key.strip() or key not in str(refused.value)


# ---- servers that go away, come back, or have no place free


@pytest.mark.parametrize("fed", [False, True], ids=["known", "fed"])
@pytest.mark.parametrize("how", ["lost", "busy", "stopping"])
async def test_an_utterance_of_which_nothing_was_heard_begins_again(fed, how):
    async def script(client: Client) -> None:
        await client.read("start")
        if len(server.clients) == 1:
            if how == "lost":
                return client.socket.transport.abort()
            return await client.say("error", error=failure(how))
        if fed:
            await client.read("finish")
        await client.audio(PIECE)
        await client.finished()

    async with fake_server(script) as server:
        if fed:
            speech = await server.source.open(Style())
            speech.feed("Hel")
            await until(lambda: server.clients and server.clients[0].got)
            speech.feed("lo.")
            speech.finish()
        else:
            speech = await server.source.speak("Hello.", Style(seed=3))
        assert await taken(speech) == PIECE and speech.finish_reason == "eos"
    last = server.clients[-1].got
    assert "".join(message.get("text", "") for message in last) == "Hello." and len(server.clients) == 2


async def test_tries_have_an_end_and_a_cancel_ends_them():
    async def lost(client: Client) -> None:
        await client.read("start")
        client.socket.transport.abort()

    async with fake_server(lost) as server:
        server.source.retry_s = sum(PATIENCE_S) + 1.5 * PATIENCE_S[-1]
        with pytest.raises(errors.ConnectionLost):
            await taken(await server.source.speak("Hello.", Style()))
        assert len(server.clients) == 2 + len(PATIENCE_S)  # the last delay twice
        speech = await server.source.speak("Hello.", Style())
        waiting = asyncio.create_task(taken(speech))
        await until(lambda: len(server.clients) > 3 + len(PATIENCE_S))
        speech.cancel()
        assert await waiting == b"" and speech.finish_reason == "cancelled"
