"""The one model of the process as all connections share it: who is let in, what is open, what has ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mktts.server.access.keys import NOBODY
from mktts.server.access.request_id import current_id
from mktts.server.limits import Limits
from mktts.server.meters import Meters
from mktts.server.problems import RETRY_AFTER_S, Problem, from_error
from mktts.server.schemas import Draws, Health, Manner, ModelInfo, Route, StreamState
from mktts.server.utterance import Utterance
from mktts.server.voices import DEFAULT, voice_aliases
from mktts.spec import SAMPLE_RATE_HZ, language_named
from mktts.speech.executor import Standing, Wishes
from mktts.speech.options import StreamOptions

if TYPE_CHECKING:
    from mktts.model.prompt import Layout
    from mktts.model.sampling import Sampling
    from mktts.model.tokenizer import TextTokenizer
    from mktts.model.voice import Voice
    from mktts.server.uploads.folder import VoiceFolder
    from mktts.speech.stream import Session
    from mktts.synth import Synthesizer
    from mktts.synth.apart import ApartSynthesizer

_DRAWS = tuple(Draws.model_fields)  # the names of Sampling.flat
_FAILING_AFTER = 3  # streams in a row: one may be the request's own fault, a broken device fails every one


class Studio:
    """Belongs to the event loop's thread; the synthesizer is the caller's to close.

    voices: saved voices of a base checkpoint by the name that requests call them. name: of the checkpoint, for
    GET /health; None takes its folder's. aliases: more names, each for one of the voices (`voice_aliases`).
    uploads: where voices that callers upload are kept; None keeps none.
    Raises ServerError for an alias of nothing.
    """

    def __init__(
        self,
        synthesizer: Synthesizer | ApartSynthesizer,
        limits: Limits | None = None,
        voices: Mapping[str, Voice] | None = None,
        name: str | None = None,
        aliases: Mapping[str, str] | None = None,
        uploads: VoiceFolder | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.stopping = False
        self.uploads = uploads
        if uploads is not None:
            uploads.on_gone = synthesizer.forget
        self._synthesizer = synthesizer
        synthesizer.admit(Wishes(self.limits.max_streams, self.limits.max_waiting, self.limits.wait_s))
        self._voices = {name.lower(): voice for name, voice in (voices or {}).items()}
        self.checkpoint = checkpoint = synthesizer.checkpoint
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
        self.meters = Meters(
            self.model.checkpoint, synthesizer.backend_name, str(synthesizer.device), self.model.random_weights
        )
        self.meters.watch(lambda: self.standing, lambda: self.streams_behind)
        self._open: dict[str, Utterance] = {}
        self._ended: OrderedDict[str, StreamState] = OrderedDict()
        self._failures = 0  # in a row
        self._tokenizer: TextTokenizer | None = None

    def speak(
        self,
        route: Route,
        text: str,
        manner: Manner,
        *,
        voice: Voice | None = None,
        layout: Layout | None = None,
        keys: Mapping[str, str] = MappingProxyType({}),
        owner: str = NOBODY,
    ) -> Utterance:
        """Starts to speak a known text. Raises Problem.

        voice: in place of the one that `manner` names. layout: of the prompt; None takes the checkpoint's. keys: what
        the caller calls `text`, `instruct` and `speaker`, for messages; as they are where left out. owner: whose
        uploaded voices may be named.
        """
        self.admit()
        self.check_chars(len(text), "text", keys)
        try:
            stream = self._synthesizer.stream(text, layout=layout, **self._settings(manner, voice, keys, owner))
        except Exception as error:
            raise from_error(error) from error
        id = None if route.endswith("_ws") else current_id()
        return self._keep(Utterance(route, stream, len(text), self._ended_one, id))

    def listen(self, route: Route, manner: Manner, owner: str = NOBODY) -> tuple[Utterance, Session]:
        """Opens an utterance whose text comes later. Raises Problem."""
        self.admit()
        try:
            session = self._synthesizer.open(**self._settings(manner, owner=owner))
        except Exception as error:
            raise from_error(error) from error
        return self._keep(Utterance(route, session, 0, self._ended_one)), session

    def check_chars(self, chars: int, what: str = "text", keys: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises Problem when an utterance would be longer than the limit."""
        if chars > self.limits.max_chars:
            key = keys.get(what, what)
            message = f"{key} may have {self.limits.max_chars} characters, got {chars}"
            raise Problem(422, f"{what}_too_long", message, key)

    def saved_voice(self, name: str, owner: str = NOBODY) -> Voice | None:
        """A saved voice by its name or by an alias of it, or one that `owner` has uploaded; None where `name` is
        none."""
        saved = self._voices.get(self.aliases.get(name.lower(), name.lower()))
        return saved if saved is not None or self.uploads is None else self.uploads.find(owner, name)

    def is_taken(self, name: str) -> bool:
        """Whether `name` is a voice of the server itself, so that nobody else's may have it."""
        return name.lower() in (*self.speakers, *self.aliases, DEFAULT)

    def count_tokens(self, text: str) -> int:
        """Of a text, in the checkpoint's tokens. The first call reads the tokenizer: too long for the event loop."""
        if self._tokenizer is None:
            self._tokenizer = self._synthesizer.checkpoint.tokenizer()
        return len(self._tokenizer.encode(text))

    def find(self, id: str) -> StreamState:
        """Raises Problem 404 for one that never was, or ended too many streams ago."""
        if id in self._open:
            return self._open[id].state
        if id in self._ended:
            return self._ended[id]
        raise Problem(404, "unknown_stream", "no stream has this id, or it ended too many streams ago", "id")

    def cancel_all(self, problem: Problem) -> None:
        for utterance in list(self._open.values()):
            utterance.fail(problem)

    @property
    def streams_open(self) -> int:
        return len(self._open)

    def speaks_for(self, request_id: str | None) -> bool:
        """Whether an utterance of that request, or of that WebSocket, is open."""
        return any(utterance.request_id == request_id for utterance in self._open.values())

    @property
    def standing(self) -> dict[str, Standing]:
        """How the engines stand at the moment, by their names."""
        return self._synthesizer.standing

    @property
    def streams_behind(self) -> int:
        """Open streams whose listeners wait for more to be made."""
        return sum(utterance.is_behind for utterance in self._open.values())

    @property
    def health(self) -> Health:
        synthesizer = self._synthesizer
        failing = self._failures >= _FAILING_AFTER or synthesizer.gone
        status: Literal["ok", "failing", "stopping"] = "failing" if failing else "ok"
        return Health(
            status="stopping" if self.stopping else status,
            model=self.model,
            backend=synthesizer.backend_name,
            device=str(synthesizer.device),
            dtype=str(synthesizer.dtype).removeprefix("torch."),
            sample_rate_hz=SAMPLE_RATE_HZ,
            speakers=self.speakers,
            languages=self.languages,
            takes_instructions=self.takes_instruct,
            streams_open=self.streams_open,
            streams_max=self.carries,
        )

    @property
    def carries(self) -> int:
        """Streams that are listened to in real time at once, about: see `Synthesizer.carries`."""
        return self._synthesizer.carries

    def admit(self) -> None:
        """Raises Problem where no further stream can be opened now. Whether there is a place for one the engine says:
        its chunks then begin, or raise."""
        if self.stopping:
            raise Problem(503, "stopping", "the server is stopping", retry_after_s=RETRY_AFTER_S)

    def _keep(self, utterance: Utterance) -> Utterance:
        self._open[utterance.id] = utterance
        utterance.on_first_byte = self.meters.first_byte_s.labels(utterance.route).observe
        utterance.on_underrun = self.meters.late
        self.meters.open_streams.set(len(self._open))
        return utterance

    def _ended_one(self, utterance: Utterance) -> None:
        del self._open[utterance.id]
        self._ended[utterance.id] = state = utterance.state
        if len(self._ended) > self.limits.kept_states:
            self._ended.popitem(last=False)
        self.meters.open_streams.set(len(self._open))
        if state.error is not None and state.error.code == "busy":
            self.meters.refused.labels("busy").inc()
            return
        self.meters.streams.labels(utterance.route, state.finish_reason).inc()
        self.meters.audio_s.inc(state.audio_s)
        if state.first_audio_ms is not None:
            self.meters.first_audio_s.labels(utterance.route).observe(state.first_audio_ms / 1_000)
        if state.error is not None and state.error.code == "engine_error":
            self._failures += 1
        elif state.frames:
            self._failures = 0

    def _settings(
        self,
        manner: Manner,
        voice: Voice | None = None,
        keys: Mapping[str, str] = MappingProxyType({}),
        owner: str = NOBODY,
    ) -> dict[str, Any]:
        """The keyword arguments of Synthesizer.stream and open. Raises Problem."""
        limits = self.limits
        if manner.instruct is not None:
            self._check_instruct(manner.instruct, keys)
        if manner.max_frames is not None and manner.max_frames > limits.max_frames:
            message = f"max_frames may be {limits.max_frames} ({limits.max_duration_s:g} s), got {manner.max_frames}"
            raise Problem(422, "duration_too_long", message, "max_frames")
        language = language_named(manner.language)
        if language not in self.languages:
            known = ", ".join(self.languages)
            raise Problem(422, "bad_prompt", f"language must be one of {known}; got {manner.language!r}", "language")
        speaker = None
        if voice is None:
            speaker, voice = self._who(manner.speaker, keys.get("speaker", "speaker"), owner)
        return {
            "language": language,
            "speaker": speaker,
            "voice": voice,
            "instruct": manner.instruct,
            "seed": manner.seed,
            "sampling": self._sampling(manner),
            "max_frames": manner.max_frames or limits.max_frames,
            "options": StreamOptions(trim_lead=manner.trim_lead, buffer_frames=limits.buffer_frames),
        }

    def _check_instruct(self, instruct: str, keys: Mapping[str, str]) -> None:
        self.check_chars(len(instruct), "instruct", keys)
        if not self.takes_instruct:
            key = keys.get("instruct", "instruct")
            message = (
                f"{key}: this {self.model.type} checkpoint ({self.model.size}) takes no instructions; leave it out"
            )
            raise Problem(422, "bad_prompt", message, key)

    def _who(self, wanted: str | None, key: str, owner: str) -> tuple[str | None, Voice | None]:
        """The built-in speaker or the saved voice of that name or alias; the default for None. Raises Problem."""
        name = (wanted or DEFAULT).lower()
        name = self.aliases.get(name, name)
        if name == DEFAULT and name not in self.speakers:
            if self.model.clones and not self.speakers:
                message = f"{key}: this server has no voice: send ref_audio, or start it with --voice NAME=FILE"
                raise Problem(422, "no_voice", message, key)
            name = self.default_speaker
        elif name not in self.speakers:
            if (uploaded := self.saved_voice(name, owner)) is not None:
                return None, uploaded
            known = ", ".join(self.speakers) or f"none: a {self.model.type} checkpoint has no built-in speakers"
            raise Problem(422, "unknown_speaker", f"{key} must be one of {known}; got {name!r}", key)
        voice = self._voices.get(name) if name else None
        return (None if voice is not None else name), voice

    def _sampling(self, manner: Manner) -> Sampling:
        sampling = self._synthesizer.sampling
        wishes = {name: getattr(manner, name) for name in _DRAWS}
        if not any(value is not None for value in wishes.values()):
            return sampling
        if wishes["predictor_greedy"] is None:
            wishes["predictor_greedy"] = wishes["greedy"]
        return sampling.with_flat(wishes)
