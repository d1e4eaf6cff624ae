"""The conversation's context behind an output that plays in real time: what was heard is in it."""

from __future__ import annotations

import asyncio

import pytest
from pipecat.frames.frames import BotStartedSpeakingFrame, InterruptionFrame, OutputAudioRawFrame, StartFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat_fakes import FakeSource, FakeSpeech, Talk, turn

from mktts.pipecat import MkttsTTSService
from mktts.spec import FRAME_RATE_HZ

SENTENCES = ("Once upon a time there was a computer. ", "It dreamed of singing in the opera.")


class Loudspeaker(BaseOutputTransport):
    """Takes audio as fast as it is heard, and counts it."""

    def __init__(self) -> None:
        super().__init__(TransportParams(audio_out_enabled=True, audio_out_end_silence_secs=0))
        self.played_s = 0.0

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        duration_s = len(frame.audio) / 2 / frame.sample_rate
        await asyncio.sleep(duration_s)
        self.played_s += duration_s
        return True


def conversation(mode: TextAggregationMode, speech_s: float) -> tuple[LLMContext, Loudspeaker, Talk]:
    """`speech_s`: of each of two sentences."""
    frames = round(speech_s * FRAME_RATE_HZ)
    source = FakeSource(lambda text: FakeSpeech(frames if text else 2 * frames))
    context = LLMContext()
    loudspeaker, assistant = Loudspeaker(), LLMContextAggregatorPair(context).assistant()
    tts = MkttsTTSService(source=source, text_aggregation_mode=mode)
    return context, loudspeaker, Talk(tts, after=[loudspeaker, assistant])


def said(context: LLMContext) -> str:
    return " ".join(message["content"] for message in context.get_messages() if message["role"] == "assistant")


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_after_an_interruption_the_context_ends_where_the_listener_was(mode):
    context, loudspeaker, talk = conversation(mode, 2.4)
    async with talk:
        await talk.say(*turn(*SENTENCES))
        await talk.until(lambda: loudspeaker.played_s > 1.0)
        await talk.say(InterruptionFrame())
        await talk.until(lambda: said(context))
    heard, text = said(context), "".join(SENTENCES)
    assert text.startswith(heard)
    assert "Once upon a" in heard  # all audio was made long before: what counts is what was played
    assert "computer" not in heard
    assert talk.of(BotStartedSpeakingFrame)


@pytest.mark.parametrize("mode", TextAggregationMode)
async def test_a_turn_that_is_heard_to_its_end_is_in_the_context_word_for_word(mode):
    context, loudspeaker, talk = conversation(mode, 0.4)
    async with talk:
        await talk.say(*turn("One. ", "Two."))
        await talk.until(lambda: said(context))
    assert said(context) == "One. Two."
    assert loudspeaker.played_s >= 0.8
