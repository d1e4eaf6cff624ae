"""The speech service that all connections of a process share: one model, its voices and limits, and its streams."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import astuple
from functools import cache, partial
from itertools import accumulate, chain, islice

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mktts import audio
from mktts.engine.admission import AdmissionLimits
from mktts.engine.metrics import Player
from mktts.engine.options import Chunk, StreamOptions, Timings
from mktts.engine.runner import TICK_BOUNDS_S
from mktts.engine.stream import Session, Stream
from mktts.errors import MkttsError
from mktts.model.prompt import Layout
from mktts.model.voice import Voice
from mktts.server.access import NO_OWNER, ApiError, current_id, from_error
from mktts.server.schemas import DEFAULT, Health, ModelInfo, Route, SamplingParams, StreamState, VoiceParams
from mktts.server.settings import Limits
from mktts.server.voices import VoiceFolder, voice_aliases
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, language_named
from mktts.synth import Synthesizer

KEPT_LEAD_S = 0.5  # chunks are held back only while the listener has more than this left to play
MAX_HELD_FRAMES = round(FRAME_RATE_HZ)  # one second of audio
KEPT_WORDS = 32  # number of ended streams that keep their words: a text may have thousands
_FAILING_AFTER = 3  # consecutive failed streams: one may be the request's own fault, a broken device fails them all
_POLL_S = 0.02
_HELD_UP_S = 0.05  # a write that takes longer was blocked by the client

_FIRST_AUDIO_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_OF_ENGINES = {
    "mktts_streams_listened": ("Streams whose listener needs frames in time, by engine.", "listeners"),
    "mktts_streams_waiting": ("Streams that wait for admission, by engine.", "waiting"),
    "mktts_lanes": ("Slots for streams, by engine.", "lanes"),
    "mktts_lanes_used": ("Slots that a stream occupies, by engine.", "lanes_used"),
    "mktts_pages": ("Pages of keys and values, by engine.", "pages"),
    "mktts_pages_free": ("Pages that are free, by engine.", "pages_free"),
}

log = logging.getLogger(__name__)


class SpeechService:
    """Starts streams for requests and tracks them. For the event loop's thread only. The caller closes the synthesizer.

    voices: saved voices of a base checkpoint by the names that requests use.
    name: of the checkpoint, for GET /health; None takes the name of its folder.
    aliases: further names for the voices (`voice_aliases`). Raises ServerError for an alias of an unknown voice.
    uploads: stores the voices that callers upload; None disables uploads.
    strict: the default of an OpenAI request's `strict`: whether keys without effect are refused instead of ignored."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        limits: Limits | None = None,
        voices: Mapping[str, Voice] | None = None,
        name: str | None = None,
        aliases: Mapping[str, str] | None = None,
        uploads: VoiceFolder | None = None,
        strict: bool = False,
    ) -> None:
        self.limits = limits = limits or Limits()
        self.synthesizer, self.uploads, self.strict, self.stopping = synthesizer, uploads, strict, False
        if uploads is not None:
            uploads.on_gone = synthesizer.forget
        bounds = limits.max_streams, limits.min_streams, limits.max_waiting, limits.wait_s
        synthesizer.set_limits(AdmissionLimits(*bounds))
        self._voices = {name.lower(): voice for name, voice in (voices or {}).items()}
        self.checkpoint = checkpoint = synthesizer.checkpoint
        self.tokenizer = cache(checkpoint.tokenizer)  # the first call reads files: too slow for the event loop
        config = checkpoint.config
        self.speakers = [*self._voices, *sorted(config.speakers)]
        self._default_speaker = next(iter(self._voices), config.default_speaker)
        dialects = [name for name, dialect in config.dialects.items() if dialect]
        self.aliases = voice_aliases(self.speakers, dialects, aliases)
        self.languages = config.spoken_languages
        self.takes_instruct = config.takes_instruct
        self.model = ModelInfo(
            checkpoint=name or checkpoint.folder.name,
            revision=checkpoint.revision,
            type=config.type.name,
            clones=config.type.clones,
            size=config.model_size,
            random_weights=checkpoint.is_random,
        )
        self.served = {"backend": synthesizer.backend_name, "device": str(synthesizer.device)}
        self.meters = Meters(self)
        self._open: dict[str, ServedStream] = {}
        self._ended: OrderedDict[str, StreamState] = OrderedDict()
        self._failures = 0  # consecutive

    def speak(
        self,
        route: Route,
        params: VoiceParams,
        text: str | None,
        *,
        voice: Voice | None = None,
        layout: Layout | None = None,
        owner: str = NO_OWNER,
    ) -> ServedStream:
        """Starts a stream. Raises ApiError for invalid parameters; the engine decides on admission later, and
        `ServedStream.chunks` raises a refusal. text: None if it comes later (`ServedStream.feed`). voice: overrides the
        one in `params`. layout: of the prompt; None takes the checkpoint's. owner: whose uploads may be used."""
        self.admit()
        try:
            self.check_chars(len(text or ""))
            self.check_chars(len(params.instruct or ""), "instruct")
            if params.instruct and not self.takes_instruct:
                kind = f"{self.model.type} checkpoint ({self.model.size})"
                message = f"instruct: this {kind} takes no instructions; leave it out"
                raise ApiError(422, "bad_prompt", message, "instruct")
            most, wanted = self.limits.max_frames, params.max_frames
            if wanted is not None and wanted > most:
                message = f"max_frames may be at most {most} ({self.limits.max_duration_s:g} s), got {wanted}"
                raise ApiError(422, "duration_too_long", message, "max_frames")
            language = params.language
            if language not in self.languages and (language := language_named(language)) not in self.languages:
                message = f"language must be one of {', '.join(self.languages)}; got {params.language!r}"
                raise ApiError(422, "bad_prompt", message, "language")
            given = params.model_dump(include=set(SamplingParams.model_fields), exclude_none=True)
            if "greedy" in given:
                given.setdefault("predictor_greedy", given["greedy"])
            speaker, voice = (None, voice) if voice is not None else self._speaker_or_voice(params.speaker, owner)
            options = {"trim_lead": params.trim_lead, "markup": params.markup, "word_times": params.word_timestamps}
            settings = {
                "language": language,
                "speaker": speaker,
                "voice": voice,
                "voices": self._voices,
                "instruct": params.instruct or None,
                "seed": params.seed,
                "sampling": self.synthesizer.sampling.with_flat(given) if given else None,
                "max_frames": wanted or most,
                "pronunciations": params.pronunciations,
                "layout": layout,
                "options": StreamOptions(buffer_frames=self.limits.buffer_frames, **options),
            }
            stream = self.synthesizer.open(**settings) if text is None else self.synthesizer.stream(text, **settings)
        except Exception as error:
            raise from_error(error) from error
        made = ServedStream(self, route, stream, len(text or ""), params.word_timestamps)
        self._open[made.id] = made
        return made

    def admit(self) -> None:
        """Raises ApiError 503 once the server is stopping."""
        if self.stopping:
            raise ApiError(503, "stopping", "the server is stopping")

    def check_chars(self, chars: int, key: str = "text") -> None:
        """Raises ApiError if a text is longer than the limit."""
        if chars > self.limits.max_chars:
            message = f"{key} may have at most {self.limits.max_chars} characters, got {chars}"
            raise ApiError(422, f"{key}_too_long", message, key)

    def _speaker_or_voice(self, wanted: str | None, owner: str) -> tuple[str | None, Voice | None]:
        """The built-in speaker or the voice with that name or alias; the default for None. Raises ApiError."""
        name: str | None = (wanted or DEFAULT).lower()
        name = self.aliases.get(name, name)
        if name == DEFAULT and name not in self.speakers:
            name = self._default_speaker
        if name is None and self.model.clones:
            message = "speaker: this server has no voice: send ref_audio, or start it with --voice NAME=FILE"
            raise ApiError(422, "no_voice", message, "speaker")
        if name is None or (name in self.speakers and name not in self._voices):
            return name, None
        if (voice := self.saved_voice(name, owner)) is None:
            known = ", ".join(self.speakers) or f"none: a {self.model.type} checkpoint has no built-in speakers"
            raise ApiError(422, "unknown_speaker", f"speaker must be one of {known}; got {name!r}", "speaker")
        return None, voice

    def saved_voice(self, name: str, owner: str = NO_OWNER) -> Voice | None:
        """A saved voice by its name or alias, or one that `owner` has uploaded; None if there is none."""
        saved = self._voices.get(self.aliases.get(name.lower(), name.lower()))
        return saved if saved is not None or self.uploads is None else self.uploads.find(owner, name)

    def find(self, id: str) -> StreamState:
        """The state of a stream. Raises ApiError 404 if the id is unknown or its state is no longer kept."""
        state = self._open[id].state if id in self._open else self._ended.get(id)
        if state is None:
            raise ApiError(404, "unknown_stream", "no stream has this id, or it ended too many streams ago", "id")
        return state

    async def stop(self, at_once: Callable[[], bool] = lambda: False) -> None:
        """Refuses new streams, waits for open ones up to `Limits.grace_s` or until `at_once()`, cancels the rest."""
        self.stopping = True
        end_s = time.monotonic() + self.limits.grace_s
        while self._open and time.monotonic() < end_s and not at_once():
            await asyncio.sleep(_POLL_S)
        for stream in list(self._open.values()):
            stream.fail(ApiError(503, "stopping", "the server stopped"))
        await asyncio.sleep(_POLL_S)  # lets last messages be sent before the connections are closed

    @property
    def streams_open(self) -> int:
        return len(self._open)

    @property
    def streams_max(self) -> int:
        """The number of concurrent listeners that capacity and slots allow."""
        slots = max((one.lanes for one in self.synthesizer.stats.values()), default=1)
        return int(min(self.synthesizer.capacity.streams, slots))

    @property
    def health(self) -> Health:
        synthesizer = self.synthesizer
        failing = self._failures >= _FAILING_AFTER or synthesizer.engine.gone
        return Health(
            status="stopping" if self.stopping else "failing" if failing else "ok",
            model=self.model,
            **self.served,
            dtype=str(synthesizer.dtype).removeprefix("torch."),
            sample_rate_hz=SAMPLE_RATE_HZ,
            speakers=self.speakers,
            aliases=[*self.aliases, DEFAULT],
            uploads=self.uploads is not None,
            languages=self.languages,
            takes_instructions=self.takes_instruct,
            streams_open=self.streams_open,
            streams_max=self.streams_max,
            capacity=synthesizer.capacity.basis,
        )

    def has_ended(self, stream: ServedStream) -> None:
        """Moves a stream's state to those of ended streams, and updates the metrics."""
        del self._open[stream.id]
        self._ended[stream.id] = state = stream.state
        for id in islice(reversed(self._ended), KEPT_WORDS, KEPT_WORDS + 1):
            self._ended[id].words = None
        if len(self._ended) > self.limits.kept_states:
            self._ended.popitem(last=False)
        code, meters = state.error and state.error.code, self.meters
        if code == "engine_error":
            self._failures += 1
        elif state.frames:
            self._failures = 0
        if code != "busy":  # a stream without admission counts as a refused request instead
            meters.streams.labels(state.route, state.finish_reason).inc()
            meters.audio_s.inc(state.audio_s)
            if state.first_audio_ms is not None:
                meters.first_audio_s.labels(state.route).observe(state.first_audio_ms / 1_000)


class Meters(Collector):
    """Prometheus metrics of one service, in a registry of its own. Names follow
    https://prometheus.io/docs/practices/naming/: base units (seconds), and counters end in _total."""

    def __init__(self, service: SpeechService) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, labelnames=("route",), buckets=_FIRST_AUDIO_S, registry=registry)
        since = "From the request (or the first text) to the first"
        model = service.model
        labels = {"model": model.checkpoint, "random_weights": str(model.random_weights).lower(), **service.served}
        ProcessCollector(registry=registry)  # resident memory, open files
        gauge("mktts_info", "Always 1; the labels describe the model.", tuple(labels)).labels(**labels).set(1)
        gauge("mktts_capacity", "Listeners that are admitted at once.").set_function(lambda: service.streams_max)
        gauge("mktts_streams_open", "Streams being generated.").set_function(lambda: service.streams_open)
        self.streams = counter("mktts_streams", "Streams ended, by route and finish reason.", ("route", "reason"))
        self._refused = counter("mktts_refused", "Requests refused, by code.", ("code",))
        self.audio_s = counter("mktts_audio_seconds", "Audio handed to connections.")
        self.first_audio_s = seconds("mktts_first_audio_seconds", f"{since} PCM on the host.")
        self.first_byte_s = seconds("mktts_first_byte_seconds", f"{since} write of sound to the connection.")
        late = "Writes that came too late for a listener who plays from the first write on, without a prebuffer."
        self.underruns = counter("mktts_underruns", late)
        self.late_s = counter("mktts_late_seconds", "Total lateness of those writes.")
        self._service = service
        registry.register(self)

    def refuse(self, code: str) -> None:
        self._refused.labels(code).inc()

    def collect(self) -> Iterable[Metric]:
        """Yields the current state of the engines, read at every scrape."""
        stats = self._service.synthesizer.stats
        for name, (text, field) in _OF_ENGINES.items():
            family = GaugeMetricFamily(name, text, labels=("engine",))
            for engine, one in stats.items():
                family.add_metric((engine,), getattr(one, field))
            yield family
        ticks = HistogramMetricFamily("mktts_tick_seconds", "Device time of ticks, by engine.", labels=("engine",))
        for engine, one in stats.items():
            buckets = zip((*map(str, TICK_BOUNDS_S), "+Inf"), accumulate(list(one.ticks.counts)), strict=True)
            ticks.add_metric((engine,), list(buckets), one.ticks.sum_s)
        yield ticks


class ServedStream:
    """One stream of speech that is sent to one connection. Use it on the event loop's thread only. `close` must be
    called, and may be called repeatedly; it cancels the generation if that still runs.

    stream: generates the speech. chars: characters of text so far. word_times: whether the stream estimates the times
    of words. error: the ApiError that ended it, or None. state: its progress, and in the end its outcome."""

    def __init__(
        self, service: SpeechService, route: Route, stream: Stream | Session, chars: int, word_times: bool = False
    ) -> None:
        # An HTTP request has one stream, which gets the request's id.
        self.id = (route != "tts_ws" and current_id.get()) or uuid.uuid4().hex
        self.service, self.stream, self.chars = service, stream, chars
        self.state = StreamState(id=self.id, route=route, seed=stream.seed, words=[] if word_times else None)
        self.error: ApiError | None = None
        self.closed = False
        self._started_s, self._player, self._write_began_s = time.perf_counter(), Player(), math.inf

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yields chunks to write, each within `sending`. While the listener has enough left to play, several chunks are
        held back and joined into one, as a write costs about the same whatever its size. If the stream failed or the
        server ended it, yields what was held back and then raises ApiError."""
        state, held, ended = self.state, [], False
        while not ended:
            late = False
            try:
                spare_s = self._player.lead_s(time.perf_counter()) - KEPT_LEAD_S
                chunk = await self.stream.take(max(0.0, spare_s) if held else None)
                ended = chunk is None
                held += [chunk] if chunk else []
            except TimeoutError:
                late = True
            except Exception as error:
                ended = True
                if self.error is None:
                    self.error = from_error(error)
                    if self.error.status >= 500:
                        log.exception("stream %s failed", self.id)
            if state.words is not None:
                state.words = list(self.stream.words)
            frames = sum(one.frames for one in held)
            ahead = self._player.lead_s(time.perf_counter()) > KEPT_LEAD_S and frames < MAX_HELD_FRAMES
            if held and (late or ended or not ahead):
                if state.first_audio_ms is None:
                    state.first_audio_ms = round((time.perf_counter() - self._started_s) * 1_000, 3)
                joined = held[0] if len(held) == 1 else _joined(held)
                state.frames += frames
                state.audio_s += joined.duration_s
                self._write_began_s = math.inf
                yield joined
                if (now_s := time.perf_counter()) - self._write_began_s > _HELD_UP_S:
                    self._player.pause(now_s)
                held = []
        if self.error is not None:
            raise self.error

    def sending(self, duration_s: float) -> asyncio.Timeout:
        """A context for `async with` around the write of `duration_s` seconds of audio, which counts late writes. Time
        blocked by the client is not late; after `Limits.stall_s` the write raises TimeoutError."""
        self._write_began_s = began_s = time.perf_counter()
        meters = self.service.meters
        if self._player.dry_s is None:
            meters.first_byte_s.labels(self.state.route).observe(began_s - self._started_s)
        _, late_s = self._player.play(began_s, duration_s)
        if late_s > 0:
            meters.underruns.inc()
            meters.late_s.inc(late_s)
        return asyncio.timeout(self.service.limits.stall_s)

    def feed(self, text: str | None) -> None:
        """Adds text to a session; None ends the text. The stream fails if the text cannot be spoken. Time to first
        audio is measured from the first text that is not blank."""
        if self.stream.idle:  # it waited for text, so no audio is late until one frame's time from now
            self._player.pause(time.perf_counter() + 1 / FRAME_RATE_HZ)
        try:
            if text is None:
                self.stream.finish()
                return
            if self.chars == 0 and text.strip():
                self._started_s = time.perf_counter()
            self.chars += len(text)
            self.service.check_chars(self.chars)
            self.stream.feed(text)
        except MkttsError as error:
            self.fail(from_error(error))

    def fail(self, error: ApiError) -> None:
        """Ends the generation with an error that is reported to the client."""
        self.error = self.error or error
        self.close()

    def close(self) -> None:
        """Cancels the generation within one frame if it still runs, frees its slot, and logs the outcome."""
        if self.closed:
            return
        state, error = self.state, self.error
        self.closed, state.state = True, "ended"
        self.stream.cancel()
        state.finish_reason = "error" if error is not None else self.stream.finish_reason or "cancelled"
        state.error = error and error.detail(self.id)
        self.service.has_ended(self)
        heard = f"{state.frames} frames, first audio after {state.first_audio_ms} ms" if state.frames else "no audio"
        how = f"{state.finish_reason}, {heard}"
        if error is not None:  # only the message of busy is logged: others may quote the text
            how = f"{error.code}: {error}" if error.code == "busy" else f"{error.code}, {how}"
        log.info("stream %s: %s, %d characters, seed %d, %s", self.id, state.route, self.chars, state.seed, how)


def _joined(chunks: list[Chunk]) -> Chunk:
    """Joins consecutive chunks into one, which is ready when the last of them was."""
    ready_ms, *spent_ms = zip(*(astuple(chunk.timings) for chunk in chunks), strict=True)
    timings = Timings(ready_ms[-1], *map(sum, spent_ms))
    ready = [chunk.ready_pcm16 for chunk in chunks]
    pcm16 = None if None in ready else b"".join(ready)
    frames = sum(chunk.frames for chunk in chunks)
    words = tuple(chain.from_iterable(chunk.words for chunk in chunks))
    return Chunk(audio.joined([chunk.pcm for chunk in chunks]), chunks[0].start_s, frames, timings, pcm16, words)
