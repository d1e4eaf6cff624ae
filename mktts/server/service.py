"""The one model of the process as all connections share it: admission, open streams and ended ones."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from mktts.engine.admission import AdmissionLimits
from mktts.engine.options import StreamOptions
from mktts.server.access import NO_OWNER
from mktts.server.api_errors import ApiError, from_error
from mktts.server.limits import Limits
from mktts.server.meters import Meters
from mktts.server.schemas import DEFAULT, Health, ModelInfo, Route, StreamState, VoiceParams
from mktts.server.served_stream import ServedStream
from mktts.server.voices import voice_aliases
from mktts.spec import SAMPLE_RATE_HZ, language_named

if TYPE_CHECKING:
    from mktts.model.prompt import Layout
    from mktts.model.voice import Voice
    from mktts.server.voices import VoiceFolder
    from mktts.synth import Synthesizer

_FAILING_AFTER = 3  # streams in a row: one may be the request's own fault, a broken device fails every one
_POLL_S = 0.02
_KEPT_WORDS = 32  # ended streams whose words are kept: a text may have thousands


class SpeechService:
    """Belongs to the event loop's thread; the caller closes the synthesizer.

    voices: saved voices of a base checkpoint by the name that requests call them.
    name: of the checkpoint, for GET /health; None takes its folder's.
    aliases: more names, each for one of the voices (`voice_aliases`).
    uploads: where voices that callers upload are kept; None keeps none.
    strict: what a request of OpenAI's shape asks for in vain is refused, not ignored, where it does not say which.
    Raises ServerError for an alias of nothing."""

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
        self.stopping = False
        self.uploads = uploads
        self.strict = strict
        if uploads is not None:
            uploads.on_gone = synthesizer.forget
        self.synthesizer = synthesizer
        synthesizer.set_limits(
            AdmissionLimits(limits.max_streams, limits.min_streams, limits.max_waiting, limits.wait_s)
        )
        self._voices = {name.lower(): voice for name, voice in (voices or {}).items()}
        self.checkpoint = checkpoint = synthesizer.checkpoint
        self.tokenizer = cache(checkpoint.tokenizer)  # its first call reads it: too long for the event loop
        config = checkpoint.config
        self.speakers = [*self._voices, *sorted(config.speakers)]
        self.default_speaker = next(iter(self._voices), config.default_speaker)
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
        served = {
            "model": self.model.checkpoint,
            "backend": synthesizer.backend_name,
            "device": str(synthesizer.device),
            "random_weights": str(checkpoint.is_random).lower(),
        }
        self.meters = Meters(served, lambda: synthesizer.stats, lambda: self.streams_max)
        self._open: dict[str, ServedStream] = {}
        self._ended: OrderedDict[str, StreamState] = OrderedDict()
        self._failures = 0  # in a row

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
        """Starts to speak. Raises ApiError. text: None where it comes later (`ServedStream.feed`). voice: in place of
        the one that `params` names. layout: of the prompt; None takes the checkpoint's. owner: whose uploaded voices
        may be named."""
        self.admit()
        try:
            settings = self._settings(params, voice, owner)
            if text is None:
                stream = self.synthesizer.open(**settings)
            else:
                self.check_chars(len(text))
                stream = self.synthesizer.stream(text, layout=layout, **settings)
        except Exception as error:
            raise from_error(error) from error
        timed = params.word_timestamps
        made = ServedStream(route, stream, len(text or ""), self.meters, self.check_chars, self._has_ended, timed)
        self._open[made.id] = made
        self.meters.open_streams.set(len(self._open))
        return made

    def admit(self) -> None:
        """Raises ApiError where no further stream can be opened now. Whether there is a place for one the engine says:
        its chunks then begin, or raise."""
        if self.stopping:
            raise ApiError(503, "stopping", "the server is stopping")

    def check_chars(self, chars: int, key: str = "text") -> None:
        """Raises ApiError when a text is longer than the limit."""
        if chars > self.limits.max_chars:
            message = f"{key} may have {self.limits.max_chars} characters, got {chars}"
            raise ApiError(422, f"{key}_too_long", message, key)

    def _settings(self, params: VoiceParams, voice: Voice | None, owner: str) -> dict[str, Any]:
        """The keyword arguments of Synthesizer.stream and open. Raises ApiError and SamplingError."""
        limits = self.limits
        if params.instruct is not None:
            self.check_chars(len(params.instruct), "instruct")
            if not self.takes_instruct:
                kind = f"{self.model.type} checkpoint ({self.model.size})"
                message = f"instruct: this {kind} takes no instructions; leave it out"
                raise ApiError(422, "bad_prompt", message, "instruct")
        if params.max_frames is not None and params.max_frames > limits.max_frames:
            message = f"max_frames may be {limits.max_frames} ({limits.max_duration_s:g} s), got {params.max_frames}"
            raise ApiError(422, "duration_too_long", message, "max_frames")
        language = language_named(params.language)
        if language not in self.languages:
            known = ", ".join(self.languages)
            raise ApiError(422, "bad_prompt", f"language must be one of {known}; got {params.language!r}", "language")
        speaker = None
        if voice is None:
            speaker, voice = self._speaker_or_voice(params.speaker, owner)
        return {
            "language": language,
            "speaker": speaker,
            "voice": voice,
            "voices": self._voices,
            "instruct": params.instruct,
            "seed": params.seed,
            "sampling": self.synthesizer.sampling.with_flat(params.sampling()),
            "max_frames": params.max_frames or limits.max_frames,
            "pronunciations": params.pronunciations,
            "options": StreamOptions(
                trim_lead=params.trim_lead,
                buffer_frames=limits.buffer_frames,
                markup=params.markup,
                word_times=params.word_timestamps,
            ),
        }

    def _speaker_or_voice(self, wanted: str | None, owner: str) -> tuple[str | None, Voice | None]:
        """The built-in speaker or the saved voice of that name or alias; the default for None. Raises ApiError."""
        name: str | None = (wanted or DEFAULT).lower()
        name = self.aliases.get(name, name)
        if name == DEFAULT and name not in self.speakers:
            name = self.default_speaker
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
        """A saved voice by its name or alias, or one that `owner` has uploaded; None where there is none."""
        saved = self._voices.get(self.aliases.get(name.lower(), name.lower()))
        return saved if saved is not None or self.uploads is None else self.uploads.find(owner, name)

    def find(self, id: str) -> StreamState:
        """Raises ApiError 404 for one that never was, or ended too many streams ago."""
        if id in self._open:
            return self._open[id].state
        if id in self._ended:
            return self._ended[id]
        raise ApiError(404, "unknown_stream", "no stream has this id, or it ended too many streams ago", "id")

    async def stop(self, at_once: Callable[[], bool] = lambda: False) -> None:
        """Refuses new streams, lets open ones finish for the time of grace, and cancels the rest. at_once: asked while
        it waits, whether it may end now."""
        self.stopping = True
        end_s = time.monotonic() + self.limits.grace_s
        while self._open and time.monotonic() < end_s and not at_once():
            await asyncio.sleep(_POLL_S)
        for stream in list(self._open.values()):
            stream.fail(ApiError(503, "stopping", "the server stopped"))
        await asyncio.sleep(_POLL_S)  # the last messages are sent before the connections are closed

    @property
    def streams_open(self) -> int:
        return len(self._open)

    @property
    def streams_max(self) -> int:
        """Listeners at once, as far as capacity and slots go."""
        slots = max((one.lanes for one in self.synthesizer.stats.values()), default=1)
        return int(min(self.synthesizer.capacity.streams, slots))

    @property
    def health(self) -> Health:
        synthesizer = self.synthesizer
        failing = self._failures >= _FAILING_AFTER or synthesizer.engine.gone
        return Health(
            status="stopping" if self.stopping else "failing" if failing else "ok",
            model=self.model,
            backend=synthesizer.backend_name,
            device=str(synthesizer.device),
            dtype=str(synthesizer.dtype).removeprefix("torch."),
            sample_rate_hz=SAMPLE_RATE_HZ,
            speakers=self.speakers,
            languages=self.languages,
            takes_instructions=self.takes_instruct,
            streams_open=self.streams_open,
            streams_max=self.streams_max,
            capacity=synthesizer.capacity.basis,
        )

    def _has_ended(self, stream: ServedStream) -> None:
        del self._open[stream.id]
        self._ended[stream.id] = state = stream.state
        for id in islice(reversed(self._ended), _KEPT_WORDS, _KEPT_WORDS + 1):
            self._ended[id] = self._ended[id].model_copy(update={"words": None})
        if len(self._ended) > self.limits.kept_states:
            self._ended.popitem(last=False)
        meters = self.meters
        meters.open_streams.set(len(self._open))
        if state.error is not None and state.error.code == "busy":
            meters.refuse("busy")
            return
        meters.streams.labels(stream.route, state.finish_reason).inc()
        meters.audio_s.inc(state.audio_s)
        if state.first_audio_ms is not None:
            meters.first_audio_s.labels(stream.route).observe(state.first_audio_ms / 1_000)
        if state.error is not None and state.error.code == "engine_error":
            self._failures += 1
        elif state.frames:
            self._failures = 0
