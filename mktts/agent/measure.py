"""`python -m mktts agent measure`: how long the voice takes inside Pipecat, beside what its engine takes alone.

`engine_ttfc_ms` is the engine's time to a sentence's first chunk. `pipecat_ttfb_ms` is the time to first byte that the
service reports to Pipecat for the same sentences, through a separate pipeline. What lies between them, and between them
and bench's first PCM, is `stages` (see `mktts.agent.stages`). The last part is the scripted conversation of
`mktts.agent.scripted`, in real time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger
from pipecat.frames.frames import EndFrame, Frame, MetricsFrame, TTSSpeakFrame, TTSStoppedFrame
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner

from mktts.agent import stages
from mktts.agent.conversation import load_voice, make_voice, voice_options
from mktts.agent.intents import STORY
from mktts.agent.scripted import SCRIPT, Talk, converse
from mktts.agent.settings import AgentSettings
from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.common import write_json
from mktts.measure.environment import head
from mktts.measure.metrics import percentiles
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions
from mktts.synth import Synthesizer

_LIMIT_S = 30.0


class _Ear(FrameProcessor):
    """After the voice in the pipeline: its times to first byte, and the end of each utterance."""

    def __init__(self) -> None:
        super().__init__()
        self.ttfb_ms: list[float] = []
        self.ended = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, MetricsFrame):
            found = [data.value for data in frame.data if isinstance(data, TTFBMetricsData)]
            self.ttfb_ms += [1e3 * value for value in found if value]  # Pipecat sends zeros at the start
        if isinstance(frame, TTSStoppedFrame):
            self.ended.set()
        await self.push_frame(frame, direction)


async def inside_pipecat(
    settings: AgentSettings, synthesizer: Synthesizer, sentences: list[str]
) -> tuple[list[float], list[dict[str, float]]]:
    """Time to first byte in ms, as the service in a pipeline reports it of each sentence; and its stages."""
    ear, watchmaker = _Ear(), stages.Watchmaker()
    options = voice_options(settings, synthesizer)
    source = stages.DatedSource(synthesizer, settings.checkpoint, options, settings.layout, watchmaker)
    voice = make_voice(settings, source)
    watchmaker.watch(voice)
    params = PipelineParams(audio_out_sample_rate=SAMPLE_RATE_HZ, enable_metrics=True)
    worker = PipelineWorker(Pipeline([voice, ear]), params=params)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        for sentence in sentences:
            ear.ended.clear()
            await worker.queue_frame(TTSSpeakFrame(sentence))
            await asyncio.wait_for(ear.ended.wait(), _LIMIT_S)
            await asyncio.sleep(stages.PAUSE_S)
        await worker.queue_frame(EndFrame())
    except BaseException:  # a runner does not mind the cancelling of its task
        await worker.cancel()
        raise
    finally:
        await running
    return ear.ttfb_ms, watchmaker.stages()


def measure(settings: AgentSettings, utterances: int, turns: int) -> dict[str, Any]:
    """The document: figures, stages, and the conversation."""
    voice = load_voice(settings)
    story = re.findall(r"[^.]+\.", STORY)
    sentences = [story[i % len(story)].strip() for i in range(utterances + 1)]
    figures = stages.alone(voice, sentences, StreamOptions(guard=Guard.off()))
    dated = {}
    for name, layout in (("whole_ms", "whole"), ("pipecat_ms", settings.layout)):
        inside, found = asyncio.run(inside_pipecat(replace(settings, layout=layout), voice, sentences))
        figures[name], dated[name.removesuffix("_ms")] = inside[1:], stages.medians(found[1:])  # the first warms up
    talk: Talk | None = asyncio.run(converse(settings, SCRIPT[:turns])) if turns else None
    named = {**figures, "engine_ttfc_ms": figures["paused_ms"], "pipecat_ttfb_ms": figures["pipecat_ms"]}
    return {
        **head(str(voice.device)),
        "backend": voice.backend_name,
        "checkpoint": settings.checkpoint,
        "figures": {name: {**percentiles(values), "unit": "ms"} for name, values in named.items()},
        "stages": dated,
        "conversation": None if talk is None else talk.document(),
    }


EXAMPLES = """examples:
  python -m mktts agent measure --checkpoint random:0.6b --output agent.json

The last line is one JSON document."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--utterances", type=int, default=40, help="of each kind (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=len(SCRIPT), help="of the conversation; 0 for none")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the document there")


def main(arguments: argparse.Namespace) -> int:
    """Measures, and prints the document."""
    settings = AgentSettings(
        checkpoint=arguments.checkpoint, revision=arguments.revision, turn_end="timeout", **loading(arguments)
    )
    logger.remove()  # Pipecat tells of every frame: formatting that is no part of the voice
    logger.add(sys.stderr, level="WARNING", filter={"": "WARNING", "mktts.pipecat.service": "ERROR"})
    document = measure(settings, arguments.utterances, arguments.turns)
    if arguments.output:
        write_json(arguments.output, document)
    print(stages.table(document["figures"], document["stages"]), file=sys.stderr)
    print(json.dumps(document))
    return 0
