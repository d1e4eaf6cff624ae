"""Servers that go away, come back, or have no place free: what a pipeline loses by it, and what it does not."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fake_server import Client, FakeServer, failure, forever, one_piece
from pipecat.frames.frames import TTSStoppedFrame
from pipecat.services.tts_service import TextAggregationMode
from pipecat_fakes import PIECE, TOO_LATE_S, Talk, taken, turn, until
from running import running

from mktts.errors import ConnectionLost, OptionsError
from mktts.pipecat import MkttsTTSService, RemoteSource, SpeechFailedFrame, Style
from mktts.pipecat.remote import PATIENCE_S
from mktts.server import Limits, listen
from mktts.server.graceful import SpeechServer
from mktts.server.service import SpeechService


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_a_pipeline_speaks_again_once_its_server_is_back(synth, mode):
    """As at a rolling deployment: stopped while it speaks, away for a sentence, back on the same port."""
    limits = Limits(grace_s=0.1)
    with listen("127.0.0.1", 0, limits) as bound:
        port = bound.getsockname()[1]
    tts = MkttsTTSService(
        source=RemoteSource(f"http://127.0.0.1:{port}", max_frames=300),
        text_aggregation_mode=mode,
        stop_frame_timeout_s=TOO_LATE_S,
    )

    def serving():
        return running(SpeechServer(SpeechService(synth, limits)), listen("127.0.0.1", port, limits))

    with contextlib.ExitStack() as first:
        first.enter_context(serving())
        async with Talk(tts) as talk:
            await talk.say(*turn("This is cut short, because its server goes away."))
            await talk.until(lambda: talk.samples())
            await asyncio.to_thread(first.close)
            await talk.until(lambda: talk.of(TTSStoppedFrame))
            await talk.say(*turn("Never said."))
            await talk.until(lambda: len(talk.of(TTSStoppedFrame)) == 2)
            tts._source._limits["max_frames"] = 4
            with serving():
                await talk.say(*turn("Back again."))
                await talk.until(lambda: len(talk.of(TTSStoppedFrame)) == 3)
    failed = [frame for frame in talk.up if isinstance(frame, SpeechFailedFrame)]
    assert [(type(frame.exception), frame.permanent) for frame in failed] == [(ConnectionLost, False)] * 2
    assert tts.is_usable and talk.heard().endswith("Back again.")


@pytest.mark.parametrize("fed", [False, True], ids=["known", "fed"])
@pytest.mark.parametrize("how", ["lost", "busy", "stopping"])
async def test_an_utterance_of_which_nothing_was_heard_begins_again(fed, how):
    async def script(client: Client) -> None:
        await client.read("start")
        if len(server.clients) == 1 and not any(one.got for one in server.clients[1:]):
            if how == "lost":
                client.break_off()
                return
            await client.say("error", error=failure(how))
            await client.read("start")
        if fed:
            await client.read("finish")
        await client.audio(PIECE)
        await client.finished()
        await forever(client)

    async with FakeServer(script) as server:
        source = RemoteSource(server.url)
        if fed:
            speech = await source.open(Style())
            speech.feed("Hel")
            await until(lambda: server.clients and server.clients[0].got)
            speech.feed("lo.")
            speech.finish()
        else:
            speech = await source.speak("Hello.", Style(seed=3))
        assert await taken(speech) == PIECE and speech.finish_reason == "eos"
        await source.disconnect()
    last = server.clients[-1].got
    starts = [at for at, message in enumerate(last) if message["type"] == "start"]
    said = "".join(message.get("text", "") for message in last[starts[-1] :])
    assert said == "Hello."
    assert len(server.clients) == (2 if how == "lost" else 1)


async def test_tries_have_an_end_and_a_cancel_ends_them():
    async with FakeServer(lambda client: client.read("start")) as server:  # and breaks off
        source = RemoteSource(server.url)
        with pytest.raises(ConnectionLost):
            await taken(await source.speak("Hello.", Style()))
        assert len(server.clients) == 1 + len(PATIENCE_S)
        speech = await source.speak("Hello.", Style())
        waiting = asyncio.create_task(taken(speech))
        await until(lambda: speech._ended)
        speech.cancel()
        assert await waiting == b"" and speech.finish_reason == "cancelled"
        await source.disconnect()


async def test_several_servers_take_turns_and_one_that_is_away_is_passed_over():
    async with FakeServer(one_piece) as away:
        pass
    async with FakeServer(one_piece) as one, FakeServer(one_piece) as other:
        source = RemoteSource([one.url, away.url, other.url])
        await source.connect()
        for _ in range(6):
            assert await taken(await source.speak("Hello.", Style())) == PIECE
            await until(lambda: not source._connections)
        await source.disconnect()
    assert (len(one.clients), len(other.clients)) == (3, 3)
    with pytest.raises(OptionsError, match="empty"):
        RemoteSource([])
