"""LiveKit's agents speak through mktts: sessions without a room, over a synthesizer in this process and a server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from absent import needs
from served import Watched, fed, served, until

from mktts.engine.options import Guard, StreamOptions
from mktts.errors import OptionsError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

pytestmark = needs("livekit")
with contextlib.suppress(ModuleNotFoundError):
    from livekit.agents import Agent, AgentSession, APIConnectionError, APIConnectOptions, APIStatusError
    from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT
    from livekit.agents.voice import io

    from mktts.livekit import TTS

KEY = "a-key-of-the-tests"
SEED = 11
TOKENS = ["Good", " morning", ",", " **every", "one** here", ". It", " is three", " o'clock."]
GUARD = Guard(frames_per_text_token=0.001, slack_frames=12)  # random weights do not end by themselves
TOO_LATE_S = 60.0


@pytest.fixture(params=["here", "served"])
async def watched_tts(request, synth) -> AsyncIterator[tuple[Watched, TTS]]:
    with contextlib.ExitStack() as stack:
        if request.param == "here":
            watched = Watched(synth, GUARD)
            tts = TTS(watched, seed=SEED)
        else:
            server = stack.enter_context(served(synth, guard=GUARD, api_key=KEY))
            watched, tts = server.watched, TTS(f"{server.url}/", api_key=KEY, seed=SEED)
        yield watched, tts
        await tts.aclose()


def said(synth: Synthesizer, *tokens: str) -> bytes:
    return fed(synth, *tokens, seed=SEED, options=StreamOptions(markup="strip", guard=GUARD)).rstrip(b"\0")


async def heard(stream: Any) -> bytes:
    """Without the zeros that LiveKit puts at an end that came late, to mark it."""
    async with asyncio.timeout(TOO_LATE_S), stream:
        return b"".join([bytes(event.frame.data) async for event in stream]).rstrip(b"\0")


async def test_a_session_says_what_a_language_model_writes_and_stops_where_it_is_interrupted(watched_tts, synth):
    """A session without a language model, and what is heard of it."""

    class Loudspeaker(io.AudioOutput):
        async def capture_frame(self, frame: Any) -> None:
            await super().capture_frame(frame)
            assert (frame.sample_rate, frame.num_channels) == (SAMPLE_RATE_HZ, 1)
            pcm.extend(bytes(frame.data))

        def flush(self) -> None:
            super().flush()
            self.on_playback_finished(playback_position=1.0, interrupted=False)

        def clear_buffer(self) -> None:
            self.on_playback_finished(playback_position=0.0, interrupted=True)

    async def written() -> AsyncIterator[str]:
        for token in TOKENS:
            yield token
            await asyncio.sleep(0.01)

    watched, tts = watched_tts
    pcm, session = bytearray(), AgentSession(tts=tts, vad=None, tts_text_transforms=None)
    session.output.audio = Loudspeaker(label="test", capabilities=io.AudioOutputCapabilities(pause=False))
    async with asyncio.timeout(TOO_LATE_S), contextlib.aclosing(session):
        await session.start(Agent(instructions="Answer."))
        await session.say(written())
        assert pcm.rstrip(b"\0") == said(synth, *TOKENS)
        pcm.clear()
        watched._guard = None  # a long one
        speech = session.say("The quick brown fox jumps over the lazy dog. " * 20)
        await asyncio.to_thread(until, lambda: pcm, "sound")
        await speech.interrupt()
        await asyncio.to_thread(until, lambda: watched.made_at_cancel.get(id(watched.streams[-1])), "the end")
        assert speech.interrupted and watched.streams[-1].finish_reason == "cancelled"
        pcm.clear()
        watched._guard = GUARD
        await session.say("Once more.")
        assert pcm.rstrip(b"\0") == said(synth, "Once more.")


async def test_sound_comes_before_the_text_is_complete_and_metrics_count_both(watched_tts, synth):
    _, tts = watched_tts
    metrics = []
    tts.on("metrics_collected", metrics.append)
    async with tts.stream() as stream:
        for token in (" ", "\n", "Good", " morning, every"):
            stream.push_text(token)
        pcm = bytes((await anext(stream)).frame.data)
        stream.push_text("one.")
        stream.end_input()
        pcm += await heard(stream)
    assert pcm == said(synth, "Good morning, everyone.") == await heard(tts.synthesize("Good morning, everyone."))
    assert metrics[0].characters_count == len(" \nGood morning, everyone.") and metrics[0].ttfb > 0
    assert metrics[0].audio_duration == pytest.approx(len(pcm) / 2 / SAMPLE_RATE_HZ, abs=0.02)


async def test_words_come_with_their_times_and_join_into_the_beginning_of_the_text(watched_tts):
    _, tts = watched_tts
    text = " Good morning, everyone.\nIt is “three” o'clock."
    words, samples = [], 0
    async with asyncio.timeout(TOO_LATE_S), tts.stream() as stream:
        for token in (text[:8], text[8:19], text[19:]):
            stream.push_text(token)
        stream.end_input()
        async for event in stream:
            words += event.frame.userdata[USERDATA_TIMED_TRANSCRIPT]
            samples += event.frame.samples_per_channel
    assert text.startswith("".join(words)) and [[word.strip()] for word in words] == [word.split() for word in words]
    times_s = [0.0, *(time_s for word in words for time_s in (word.start_time, word.end_time))]
    assert len(words) > 1 and times_s == sorted(times_s) and times_s[-1] <= samples / SAMPLE_RATE_HZ + 0.02
    assert tts.capabilities.aligned_transcript


async def test_text_without_a_word_is_a_moment_of_silence_and_no_failure(watched_tts):
    watched, tts = watched_tts
    for text in ("...", "🙂 "):
        assert await heard(tts.synthesize(text)) == b""
    async with tts.stream() as stream:
        stream.end_input()
        assert [event async for event in stream] == []
    assert watched.streams == []


async def test_what_goes_wrong_is_an_error_that_livekit_knows(synth):
    once = APIConnectOptions(max_retry=0, timeout=5)
    with served(synth, guard=GUARD, api_key=KEY) as server:
        for source, wrong, status in (
            (server.watched, {"voice": "nobody"}, 400),
            (server.url, {"language": "klingon"}, 400),
            (server.url, {"api_key": "another"}, 401),
        ):
            async with TTS(source, **{"api_key": KEY, **wrong}) as tts:
                with pytest.raises(APIStatusError) as found:
                    await heard(tts.synthesize("Hello.", conn_options=once))
            assert (found.value.status_code, found.value.retryable) == (status, False)
    async with TTS(server.url) as tts:
        with pytest.raises(APIConnectionError, match="mktts serve") as found:
            await heard(tts.synthesize("Hello.", conn_options=once))
    assert found.value.retryable
    for address in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(OptionsError, match=r"http://127.0.0.1:8000"):
            TTS(address)


async def test_a_connection_serves_many_utterances_and_one_that_was_lost_is_made_anew(synth):
    with served(synth, guard=GUARD) as server:
        async with TTS(server.url, seed=SEED) as tts:
            sockets = set()
            for _ in range(3):
                assert await heard(tts.synthesize("Hello there.")) == said(synth, "Hello there.")
                sockets |= tts._sockets._available
            assert len(sockets) == 1
            await sockets.pop().close()
            assert await heard(tts.synthesize("Hello there.")) == said(synth, "Hello there.")
