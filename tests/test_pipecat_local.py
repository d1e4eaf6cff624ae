"""The Pipecat service over synthesizers in this process. Random weights: order, limits and parity only."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pipecat
import pytest
import torch
from fakes import FakeBackend, fake_synthesizer, settle
from pipecat.frames.frames import InterruptionFrame, TTSAudioRawFrame, TTSSpeakFrame, TTSStoppedFrame
from pipecat.services.tts_service import TextAggregationMode
from pipecat_fakes import Talk, turn

import mktts.pipecat
from mktts.audio import to_pcm16
from mktts.checkpoint import Checkpoint
from mktts.errors import EngineError, PromptError
from mktts.options import Guard, StreamOptions
from mktts.pipecat import (
    LocalSource,
    MkttsTTSService,
    SpeechFailedFrame,
    Style,
    close_shared_synthesizers,
    shared_synthesizer,
)
from mktts.synth import Synthesizer
from mktts.voice import Voice

SHORT = StreamOptions(guard=Guard(frames_per_text_token=0.5, slack_frames=6))  # random weights never end by themselves
Settings = MkttsTTSService.Settings


@pytest.fixture(scope="module")
def synth(tiny: Checkpoint) -> Iterator[Synthesizer]:
    with Synthesizer.load(tiny, device="cpu", cpu_threads=1) as loaded:
        yield loaded


def service(synth: Synthesizer, **kwargs) -> MkttsTTSService:
    kwargs.setdefault("settings", Settings(voice="vivian", seed=5))
    return MkttsTTSService(source=LocalSource(synth, options=SHORT), **kwargs)


def audio(talk: Talk) -> bytes:
    return b"".join(frame.audio for frame in talk.of(TTSAudioRawFrame))


async def test_the_audio_of_a_turn_is_the_synthesizers_sentence_by_sentence(synth):
    async with Talk(service(synth)) as talk:
        await talk.say(*turn("Hello there. ", "How are you?"))
    alone = [synth.say(text, speaker="vivian", seed=5, options=SHORT) for text in ("Hello there.", "How are you?")]
    assert audio(talk) == b"".join(to_pcm16(pcm) for pcm in alone)
    assert talk.heard() == "Hello there. How are you?"


async def test_the_audio_of_a_token_turn_is_that_of_a_fed_session(synth):
    async with Talk(service(synth, text_aggregation_mode=TextAggregationMode.TOKEN)) as talk:
        await talk.say(*turn("Hel", "lo there.", " How are", " you?"))
    with synth.open(speaker="vivian", seed=5, options=SHORT) as session:
        session.feed("Hello there. How are you?")
        session.finish()
        assert audio(talk) == to_pcm16(session.read())
    assert talk.heard() == "Hello there. How are you?"


async def test_two_sessions_share_the_model_and_take_turns(synth):
    async with Talk(service(synth)) as one, Talk(service(synth)) as two:
        await one.say(TTSSpeakFrame("This is a rather long sentence, so that the other one can begin in its middle."))
        await one.until(lambda: one.of(TTSAudioRawFrame))
        await two.say(TTSSpeakFrame("Yes."))
        await two.until(lambda: two.of(TTSAudioRawFrame))
        assert not one.of(TTSStoppedFrame)  # the second caller did not wait for the first one's sentence
    assert audio(two) == to_pcm16(synth.say("Yes.", speaker="vivian", seed=5, options=SHORT))
    assert one.heard().endswith("in its middle.")


async def test_an_interruption_wastes_the_one_frame_in_flight():
    backend = FakeBackend(held=True)
    with fake_synthesizer(backend) as synth:
        options = StreamOptions(schedule=(1,), guard=Guard.off())
        tts = MkttsTTSService(source=LocalSource(synth, "fake", options), settings=Settings(seed=7))
        async with Talk(tts) as talk:
            await talk.say(TTSSpeakFrame("One two three four five six."))
            backend.let(2)
            await talk.until(lambda: len(talk.of(TTSAudioRawFrame)) == 2)
            await asyncio.to_thread(backend.wait_entered, 3)
            await talk.say(InterruptionFrame())
            await talk.until(lambda: talk.of(InterruptionFrame))  # does not wait for the frame in flight
            backend.release()
            await asyncio.to_thread(settle, synth)
    assert backend.order.count(7) == 3
    assert len(talk.of(TTSAudioRawFrame)) == 2


async def test_a_synthesizer_closed_in_mid_speech_is_a_failure_not_an_end(tiny):
    synth = Synthesizer.load(tiny, device="cpu", cpu_threads=1)
    tts = MkttsTTSService(source=LocalSource(synth, options=StreamOptions(guard=Guard.off())))
    async with Talk(tts) as talk:
        await talk.say(TTSSpeakFrame("One two three four five six seven eight nine ten eleven."))
        await talk.until(lambda: talk.of(TTSAudioRawFrame))
        synth.close()
        await talk.until(lambda: talk.up)
    assert [type(frame) for frame in talk.up] == [SpeechFailedFrame]
    assert isinstance(talk.up[0].exception, EngineError)
    assert not talk.heard().endswith("eleven.")


async def test_what_the_checkpoint_refuses_is_refused_at_once(synth):
    with pytest.raises(PromptError, match="nobody"):
        service(synth, settings=Settings(voice="nobody"))
    with pytest.raises(PromptError, match="klingon"):
        service(synth, settings=Settings(language="klingon"))


async def test_a_saved_voice_speaks_on_a_base_checkpoint(tiny_base, tmp_path):
    with Synthesizer.load(tiny_base, device="cpu", cpu_threads=1) as synth:
        with pytest.raises(PromptError, match="voice"):
            service(synth, settings=Settings())
        hidden = tiny_base.config.talker.hidden_size
        voice = Voice(torch.zeros(hidden), None, None, tiny_base.config.model_size)
        voice.save(tmp_path / "voice.safetensors")
        tts = service(synth, settings=Settings(voice=str(tmp_path / "voice.safetensors"), seed=5))
        async with Talk(tts) as talk:
            await talk.say(TTSSpeakFrame("Hello."))
        assert audio(talk) == to_pcm16(synth.say("Hello.", voice=voice, seed=5, options=SHORT))


async def test_nothing_visible_in_a_fed_utterance_is_an_end_without_audio(synth):
    speech = await LocalSource(synth).open(Style(voice="vivian"))
    speech.feed("  ")
    speech.finish()
    assert [piece async for piece in speech] == []


def test_the_shared_model_is_loaded_once_and_closed_when_told():
    found: list[Synthesizer] = []
    threads = [threading.Thread(target=lambda: found.append(shared_synthesizer("random:tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = MkttsTTSService(checkpoint="random:tiny")
    two = MkttsTTSService(checkpoint="random:tiny", settings=Settings(voice="ryan"))
    assert {id(synth) for synth in (*found, one._source._synthesizer, two._source._synthesizer)} == {id(found[0])}
    assert one.settings.model == "random:tiny"
    close_shared_synthesizers()
    with pytest.raises(EngineError):
        found[0].stream("Hello.", speaker="vivian")
    again = shared_synthesizer("random:tiny")
    assert again is not found[0]
    assert isinstance(again.say("Hello.", speaker="vivian", max_frames=1), np.ndarray)
    close_shared_synthesizers()


def test_the_five_lines_of_the_docstring_are_five_and_run(synth, monkeypatch):
    lines = [line.strip() for line in mktts.pipecat.__doc__.splitlines() if line.startswith("    ")]
    assert len(lines) == 5
    code = ast.unparse(ast.parse("\n".join(lines))).replace("Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice", "random:tiny")
    names = {name: [name] for name in ("stt", "user", "llm", "assistant")}
    transport = type("Transport", (), {"input": lambda self: "in", "output": lambda self: "out"})()
    monkeypatch.setattr("mktts.pipecat.service.shared_synthesizer", lambda *_, **__: synth)
    made = {**names, "transport": transport, "Pipeline": list}
    exec(code, made)
    assert isinstance(made["pipeline"][4], MkttsTTSService)


def test_the_package_does_not_shadow_pipecat():
    assert Path(pipecat.__file__).parent != Path(mktts.pipecat.__file__).parent
