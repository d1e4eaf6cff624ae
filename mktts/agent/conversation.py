"""The agent's Pipecat pipeline: speech to text, language model and voice between a transport's input and output."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipecat.audio.turn.smart_turn.base_smart_turn import SmartTurnParams
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import InterruptionFrame, LLMMessagesAppendFrame, TTSSpeakFrame
from pipecat.observers.base_observer import BaseObserver
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.base_transport import BaseTransport
from pipecat.turns.user_stop import SpeechTimeoutUserTurnStopStrategy, TurnAnalyzerUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.workers.runner import WorkerRunner

from mktts.agent.intents import STORY
from mktts.agent.latency import LatencyObserver
from mktts.agent.llm import create_llm
from mktts.agent.settings import AgentSettings
from mktts.agent.stt import create_stt
from mktts.agent.user_speech import USER_RATE_HZ
from mktts.checkpoint import open_checkpoint
from mktts.engine.options import Guard, StreamOptions
from mktts.pipecat import LocalSource, MkttsTTSService, shared_synthesizer
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

# Silence that ends a turn which the turn model considers unfinished (below 0.5). Pipecat's default of 3 s is long when
# the model is wrong; of our recorded questions, "what time is it" scores only 0.69 to 0.81.
_UNSURE_S = 1.5
_CHARACTERS_PER_S = 15.0  # speech of 150 words per minute, at six characters per word including the space


@dataclass(frozen=True)
class Conversation:
    """One pipeline and its state. context: what the user said, and what the user heard of the bot's replies."""

    settings: AgentSettings
    worker: PipelineWorker
    context: LLMContext
    latency: LatencyObserver

    async def run(self) -> None:
        """Runs until the conversation ends. It installs no signal handlers, as a notebook's kernel has its own."""
        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(self.worker)
        await runner.run()

    async def greet(self) -> None:
        """Says the greeting, if there is one."""
        if self.settings.greeting:
            await self.worker.queue_frame(TTSSpeakFrame(self.settings.greeting))

    async def answer(self, text: str) -> None:
        """Handles typed `text` as if the user had said it: interrupts the bot and has the language model answer."""
        await self.worker.queue_frame(InterruptionFrame())
        await self.worker.flush_pipeline()  # first adds the heard part of the interrupted reply to the context
        said = {"role": "user", "content": text}
        await self.worker.queue_frame(LLMMessagesAppendFrame(messages=[said], run_llm=True))


def load_voice(settings: AgentSettings) -> Synthesizer:
    """The process's synthesizer for these settings. The first call loads it for seconds: not on an event loop."""
    checkpoint = settings.checkpoint
    if settings.revision is not None:
        checkpoint = open_checkpoint(checkpoint, settings.revision)
    return shared_synthesizer(checkpoint, backend=settings.backend, device=settings.device, dtype=settings.dtype)


def create_tts(settings: AgentSettings) -> MkttsTTSService:
    """Creates the TTS service that `settings` select. Raises what loading raises, and errors of the voice, language or
    instruction."""
    synthesizer, options = load_voice(settings), None
    checkpoint = synthesizer.checkpoint
    if checkpoint.is_random:
        # A model with random weights never stops by itself: the guard ends it where speech of the text would end.
        tokens = len(checkpoint.tokenizer().encode(STORY))
        frames = len(STORY) / _CHARACTERS_PER_S * FRAME_RATE_HZ
        options = StreamOptions(guard=Guard(frames_per_text_token=frames / tokens, slack_frames=1), markup="strip")
    source = LocalSource(synthesizer, settings.checkpoint, options, settings.layout)
    voice = settings.voice or source.default_voice
    style = MkttsTTSService.Settings(
        voice=voice, language=settings.language, instruct=settings.instruct, seed=settings.seed
    )
    mode = TextAggregationMode.TOKEN if settings.tokens else TextAggregationMode.SENTENCE
    return MkttsTTSService(source=source, text_aggregation_mode=mode, settings=style)


def build(
    transport: BaseTransport,
    settings: AgentSettings,
    *,
    observers: Sequence[BaseObserver] = (),
    idle_timeout_s: float | None = None,
) -> Conversation:
    """Builds a conversation over `transport`, without running it; loads models that are not loaded yet.
    idle_timeout_s: a conversation ends after so many seconds without speech. Raises what loading raises, and
    AgentError for a missing package."""
    stt, llm, tts = create_stt(settings), create_llm(settings), create_tts(settings)
    context = LLMContext()
    turns = LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer(), user_turn_strategies=_turn_strategies(settings))
    user, assistant = LLMContextAggregatorPair(context, user_params=turns)
    latency = LatencyObserver()
    rates = {"audio_in_sample_rate": USER_RATE_HZ, "audio_out_sample_rate": SAMPLE_RATE_HZ}
    worker = PipelineWorker(
        Pipeline([transport.input(), stt, user, llm, tts, transport.output(), assistant]),
        params=PipelineParams(**rates, enable_metrics=True, enable_usage_metrics=True),
        observers=[latency, *observers],
        enable_rtvi=False,
        idle_timeout_secs=idle_timeout_s,
    )
    assistant.add_event_handler("on_assistant_turn_stopped", latency.note_heard)
    return Conversation(settings, worker, context, latency)


def _turn_strategies(settings: AgentSettings) -> UserTurnStrategies:
    if settings.turn_end == "smart":
        from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3

        analyzer = LocalSmartTurnAnalyzerV3(params=SmartTurnParams(stop_secs=_UNSURE_S))
        return UserTurnStrategies(stop=[TurnAnalyzerUserTurnStopStrategy(turn_analyzer=analyzer)])
    return UserTurnStrategies(stop=[SpeechTimeoutUserTurnStopStrategy(user_speech_timeout=settings.turn_end_s)])
