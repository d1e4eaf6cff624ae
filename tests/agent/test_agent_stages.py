"""Where the time to the first byte goes: the stages of an utterance add up to the time on its clock."""

from __future__ import annotations

import asyncio
import json

import pytest
from commands import run
from pipecat.frames.frames import TTSSpeakFrame, TTSStoppedFrame
from pipecat_fakes import Talk

from mktts.agent import stages
from mktts.agent.conversation import load_voice, make_voice, voice_options
from mktts.agent.settings import AgentSettings
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions

SETTINGS = AgentSettings(
    checkpoint="random:tiny", seed=1, options=StreamOptions(guard=Guard(frames_per_text_token=0.5, slack_frames=3))
)


async def test_the_stages_add_up_to_the_time_between_pipecats_two_calls(checkpoint_cache):
    synthesizer = await asyncio.to_thread(load_voice, SETTINGS)
    watchmaker = stages.Watchmaker()
    options = voice_options(SETTINGS, synthesizer)
    voice = make_voice(SETTINGS, stages.DatedSource(synthesizer, "tiny", options, SETTINGS.layout, watchmaker))
    watchmaker.watch(voice)
    talk = Talk(voice)
    async with talk:
        for count in (1, 2):
            await talk.say(TTSSpeakFrame("Once upon a time."))
            await talk.until(lambda count=count: len(talk.of(TTSStoppedFrame)) == count)
    found = watchmaker.stages()
    assert len(found) == 2 and all(set(each) == set(stages.STAGES) for each in found)
    for dates, of in zip(watchmaker.dates, found, strict=True):
        assert dates.clock_s < dates.asked_s < dates.taken_s < dates.stopped_s
        assert sum(of.values()) == pytest.approx(1e3 * (dates.stopped_s - dates.clock_s))
        assert min(of.values()) >= 0


def test_the_table_shows_every_condition_with_what_it_adds_and_every_stage():
    figures = {name: {"median": 1.0 + i} for i, name in enumerate(stages.CONDITIONS)}
    of = {"whole": dict.fromkeys(stages.STAGES, 0.5), "pipecat": dict.fromkeys(stages.STAGES, 0.25)}
    lines = stages.table(figures, of).splitlines()
    assert len(lines) == 2 + len(stages.CONDITIONS) + len(stages.STAGES)
    for line, (name, words) in zip(lines[1:], stages.CONDITIONS.items(), strict=False):
        assert words in line and f"{figures[name]['median']:.2f}" in line
    assert all("+1.00" in line for line in lines[2 : 1 + len(stages.CONDITIONS)])
    assert all("0.50     0.25  " in line for line in lines[-len(stages.STAGES) :])


def test_the_engine_alone_is_measured_under_every_condition_without_pipecat(checkpoint_cache, monkeypatch):
    monkeypatch.setattr(stages, "FRAMES", 1)
    found = stages.alone(load_voice(SETTINGS), ["One.", "Two."], StreamOptions(guard=Guard.off()))
    assert list(found) == list(stages.CONDITIONS)[:-2]
    assert all(len(values) == 1 and values[0] > 0 for values in found.values())


@pytest.mark.slow
def test_the_command_says_every_condition_and_every_stage(checkpoint_cache, capsys):
    assert run("agent measure", "--checkpoint", "random:tiny", "--utterances", 1, "--turns", 0) == 0
    said = capsys.readouterr()
    document = json.loads(said.out.splitlines()[-1])
    assert set(stages.CONDITIONS) <= set(document["figures"])
    assert set(document["stages"]) == {"whole", "pipecat"}
    assert all(words in said.err for words in (*stages.CONDITIONS.values(), *stages.STAGES.values()))
