"""The Pipecat service over synthesizers in this process. Random weights: order, limits and parity only."""

from __future__ import annotations

import ast
import threading

import numpy as np
import pytest
import torch
from pipecat.frames.frames import TTSAudioRawFrame, TTSSpeakFrame
from pipecat_fakes import Talk

import mktts.pipecat
from mktts.audio import to_pcm16
from mktts.errors import EngineError, PromptError
from mktts.model.voice import Voice
from mktts.pipecat import (
    LocalSource,
    MkttsTTSService,
    SpeechFailedFrame,
    close_shared_synthesizers,
    shared_synthesizer,
)
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions
from mktts.synth import Synthesizer

SHORT = StreamOptions(guard=Guard(frames_per_text_token=0.5, slack_frames=6))  # random weights never end by themselves
Settings = MkttsTTSService.Settings


def service(synth: Synthesizer, **kwargs) -> MkttsTTSService:
    kwargs.setdefault("settings", Settings(voice="vivian", seed=5))
    return MkttsTTSService(source=LocalSource(synth, options=SHORT), **kwargs)


def audio(talk: Talk) -> bytes:
    return b"".join(frame.audio for frame in talk.of(TTSAudioRawFrame))


async def test_a_synthesizer_closed_in_mid_speech_is_a_failure_not_an_end(tiny):
    synth = Synthesizer.load(tiny, device="cpu", cpu_threads=1, engine="single")
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
    with Synthesizer.load(tiny_base, device="cpu", cpu_threads=1, engine="single") as synth:
        with pytest.raises(PromptError, match="voice"):
            service(synth, settings=Settings())
        hidden = tiny_base.config.talker.hidden_size
        voice = Voice(torch.zeros(hidden), None, None, tiny_base.config.model_size)
        voice.save(tmp_path / "voice.safetensors")
        tts = service(synth, settings=Settings(voice=str(tmp_path / "voice.safetensors"), seed=5))
        async with Talk(tts) as talk:
            await talk.say(TTSSpeakFrame("Hello."))
        assert audio(talk) == to_pcm16(synth.say("Hello.", voice=voice, seed=5, options=SHORT))


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
