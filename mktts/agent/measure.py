"""`python -m mktts agent measure`: how long the voice takes inside Pipecat, beside what its engine takes alone.

`engine_ttfc_ms` is `mktts.speech.metrics`' TTFC of a reply's first sentence. `pipecat_ttfb_ms` is the time to first
byte that the service reports to Pipecat for the same sentences, through a separate pipeline. The last part is the
scripted conversation of `mktts.agent.scripted`, in real time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

from pipecat.frames.frames import EndFrame, Frame, MetricsFrame, TTSSpeakFrame, TTSStoppedFrame
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner

from mktts.agent.conversation import load_voice, make_voice
from mktts.agent.intents import STORY
from mktts.agent.scripted import SCRIPT, Talk, converse
from mktts.agent.settings import AgentSettings
from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.common import write_json
from mktts.measure.environment import head
from mktts.measure.metrics import percentiles
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.guard import Guard
from mktts.speech.metrics import summarise
from mktts.speech.options import StreamOptions
from mktts.synth import Synthesizer

_FRAMES = 25  # of an utterance, two seconds: only its beginning is measured
_PAUSE_S = 0.05  # between utterances, so that none waits for the one before
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


def engine_ttfc_ms(synthesizer: Synthesizer, sentences: list[str], options: StreamOptions) -> list[float]:
    """Of each sentence, spoken by the engine alone."""
    found = []
    speaker = synthesizer.checkpoint.config.default_speaker
    for seed, sentence in enumerate(sentences):
        stream = synthesizer.stream(sentence, speaker=speaker, seed=seed, max_frames=_FRAMES, options=options)
        found.append(summarise(list(stream)).ttfc_ms)
        time.sleep(_PAUSE_S)
    return found


async def pipecat_ttfb_ms(settings: AgentSettings, sentences: list[str]) -> list[float]:
    """Of each sentence, spoken by the service in a pipeline."""
    ear = _Ear()
    params = PipelineParams(audio_out_sample_rate=SAMPLE_RATE_HZ, enable_metrics=True)
    worker = PipelineWorker(Pipeline([make_voice(settings), ear]), params=params)
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    for sentence in sentences:
        ear.ended.clear()
        await worker.queue_frame(TTSSpeakFrame(sentence))
        await asyncio.wait_for(ear.ended.wait(), _LIMIT_S)
        await asyncio.sleep(_PAUSE_S)
    await worker.queue_frame(EndFrame())
    await running
    return ear.ttfb_ms


async def measure(settings: AgentSettings, utterances: int, turns: int) -> dict[str, Any]:
    """The document: figures, and the conversation."""
    voice = await asyncio.to_thread(load_voice, settings)
    story = re.findall(r"[^.]+\.", STORY)
    sentences = [story[i % len(story)].strip() for i in range(utterances + 1)]
    options = StreamOptions(guard=Guard.off())
    alone = (await asyncio.to_thread(engine_ttfc_ms, voice, sentences, options))[1:]  # the first one warms up
    inside = (await pipecat_ttfb_ms(settings, sentences))[1:]
    talk: Talk | None = await converse(settings, SCRIPT[:turns]) if turns else None
    figures = {"engine_ttfc_ms": alone, "pipecat_ttfb_ms": inside}
    return {
        **head(str(voice.device)),
        "backend": voice.backend_name,
        "checkpoint": settings.checkpoint,
        "figures": {name: {**percentiles(values), "unit": "ms"} for name, values in figures.items()},
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
    document = asyncio.run(measure(settings, arguments.utterances, arguments.turns))
    if arguments.output:
        write_json(arguments.output, document)
    print(json.dumps(document))
    return 0
