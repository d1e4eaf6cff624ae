"""Text in, speech out: `Synthesizer` owns a checkpoint's engine and opens streams on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch

from mktts.batch import BatchSettings
from mktts.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, open_checkpoint
from mktts.common import checked_int
from mktts.engine.admission import AdmissionLimits, Capacity
from mktts.engine.many import SayRequest, SayResult, say_each, say_many, whole
from mktts.engine.options import Plan, StreamOptions
from mktts.engine.runner import EngineStats
from mktts.engine.scheduler import TICKS
from mktts.engine.script import FedScript, Script, cut
from mktts.engine.stream import EngineName, Session, Stream
from mktts.engine.words import WordTimes
from mktts.errors import OptionsError, PromptError
from mktts.model.prompt import Layout, PromptBuilder, Request
from mktts.model.sampling import Choice, Sampling, drawn_seed
from mktts.model.voice import Voice
from mktts.synth.loading import BackendName, EngineChoice, Loading, default_cpu_threads, load_engine
from mktts.text.front_end import FrontEnd, FrontEndFeed
from mktts.text.lexicon import Lexicon, LexiconFeed
from mktts.text.markup import MarkupFeed
from mktts.text.parts import TextFeed
from mktts.text.split import clean_text, segment_chars

if TYPE_CHECKING:
    from mktts.engine.engine import Engine
    from mktts.engine.lanes import Lanes
    from mktts.engine.remote import RemoteEngine


class StreamSettings(TypedDict, total=False):
    """The keyword arguments of `Synthesizer.stream`, `say` and `open`; each may be left out.

    language: "auto" or one of `ModelConfig.spoken_languages`. speaker: of a CustomVoice checkpoint; its first where
    left out. instruct: how to say it, or for VoiceDesign what the voice is like. voice: for a Base checkpoint, which
    cannot speak without one. voices: those that the text may name in brackets, beside the checkpoint's speakers.
    layout: None takes upstream's default of the checkpoint. sampling: None takes the checkpoint's settings. seed: None
    draws one, kept in `Stream.seed`. max_frames: of the whole utterance; None: each segment has MAX_SEGMENT_FRAMES and
    the guard. options: how frames become chunks. pronunciations: what is said for words, with precedence over the
    synthesizer's lexicon: see `mktts.text.lexicon.Lexicon`."""

    language: str
    speaker: str | None
    instruct: str | None
    voice: Voice | None
    voices: Mapping[str, Voice]
    layout: Layout | None
    sampling: Sampling | None
    seed: int | None
    max_frames: int | None
    options: StreamOptions | None
    pronunciations: Mapping[str, str] | None


_OPTIONS = StreamOptions()
_WAITING = 8  # for so many streams that are made together one more is open, to be ready when one of them ends
_OF_THE_REQUEST = {field.name for field in fields(Request)} - {"text"}
_OF_A_CHOICE = {field.name for field in fields(Choice)}
_MEASURED_TEXT = "The committee will meet again on Thursday, and everyone who signed the letter is invited."


class Synthesizer(contextlib.AbstractContextManager["Synthesizer"]):
    """One model and its worker thread; any number of streams may be open at once. Load one per process and share it
    between threads and tasks. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        prompts: PromptBuilder,
        checkpoint: Checkpoint | None = None,
        lexicon: Lexicon | None = None,
    ) -> None:
        """Usually called by `load`. prompts: checks requests. lexicon: what is said for words. `front_end`: the reader
        that the checkpoint asks for, or None."""
        self.engine = engine
        self.checkpoint = checkpoint
        self.backend_name = engine.backend_name
        self.device = torch.device(engine.device)
        self.dtype = engine.dtype
        self.sampling = checkpoint.sampling() if checkpoint else Sampling()
        longest = checkpoint.longest_text_chars() if checkpoint else None
        self._whole_chars = segment_chars(longest, fed=False)
        self._fed_chars = segment_chars(longest, fed=True)
        reads = checkpoint and checkpoint.text_front_end()
        self.front_end = FrontEnd(checkpoint.config.spoken_languages) if reads else None
        self.lexicon = lexicon or Lexicon()
        self._prompts = prompts

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint | str | Path = DEFAULT_CHECKPOINT,
        *,
        backend: BackendName = "auto",
        device: str = "auto",
        dtype: torch.dtype | None = None,
        cpu_threads: int | None = None,
        engine: EngineChoice = "auto",
        deterministic: bool | None = None,
        batch: BatchSettings | None = None,
        lexicon: Mapping[str, str] | str | Path | None = None,
    ) -> Synthesizer:
        """Loads a checkpoint (see `mktts.checkpoint.open.open_checkpoint`) onto a device.

        backend: "torch", "upstream" (qwen-tts's own generate, needs requirements.txt), "megakernel", or "auto": the
            fastest one that can run here.
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA where there is a device.
        dtype: of the talker and code predictor; None takes bfloat16 on CUDA, as the weights are stored, and float32
            on the CPU. The codec computes in float32, but for many streams on CUDA as `BatchSettings` says.
        cpu_threads: that one operator may use; None takes `default_cpu_threads`. With more than that, the last bits of
            a small model's results depend on its neighbours, as MKL cuts sums by rows and threads.
        engine: "single" makes one stream a step, the quickest for one listener; "batch" makes many together; "auto"
            makes one or two streams singly and further ones together; streams that wait for text or for their reader
            do not count, and a stream whose text is fed gets its engine with its first text. "auto" keeps to "single"
            where a backend is named, and on a CPU for models that are slower than real time there. On CUDA it makes the
            batch engine when the third stream opens, beside those that are open; until it is there streams take turns.
            "batch" measures once how many listeners this machine serves in time: see `capacity`.
        deterministic: with the batch engine, a stream's codes do not depend on its neighbours, on the number of lanes,
            on how its prompt was cut over ticks, or on whether its prefix was kept; on one device, in one dtype and
            version. None: where that costs little. True takes the batch engine for every stream.
        batch: how many streams may be open, and the memory that they take.
        lexicon: what is said for words, as a mapping or a file of lines `word<TAB>said as`: see
            `mktts.text.lexicon.Lexicon`.

        Raises CheckpointError, OptionsError, and BackendUnavailable, which names what is missing."""
        wanted = Loading(backend, device, dtype, cpu_threads, engine, deterministic, batch)
        words = Lexicon.of(lexicon)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint)
        made = load_engine(checkpoint, wanted, cpu_threads or default_cpu_threads(checkpoint))
        prompts = next(iter(made.runners.values())).prompts
        synthesizer = cls(made, prompts, checkpoint, words)
        try:
            synthesizer.measure_capacity(only_kept=engine != "batch")
        except BaseException:
            synthesizer.close()
            raise
        return synthesizer

    @classmethod
    def load_apart(
        cls, checkpoint: Checkpoint, name: str, revision: str | None, settings: dict[str, Any]
    ) -> Synthesizer:
        """For a server: as `load`, with the engine in a process of its own; samples go through 16 bits, and codes stay
        in that process. name, revision: of the checkpoint, as for `open_checkpoint`. settings: of `load`."""
        from mktts.engine.remote import RemoteEngine

        # It only checks requests: on the CPU in the stored dtype its tables stay on disk.
        tensors, tokenizer = checkpoint.tensors(), checkpoint.tokenizer()
        prompts = PromptBuilder(checkpoint.config, tensors, tokenizer, "cpu", torch.bfloat16)
        lexicon = Lexicon.of(settings.get("lexicon"))
        engine = RemoteEngine(name, revision, settings | {"lexicon": None})
        return cls(engine, prompts, checkpoint, lexicon)

    def stream(self, text: str, **settings: Unpack[StreamSettings]) -> Stream:
        """Starts to speak `text` and returns at once; the stream is an iterator and an async iterator of chunks.
        settings: see `StreamSettings`. Raises TextError, PromptError, SamplingError or OptionsError; what fails later
        is raised by the stream."""
        return self._stream(text, settings, paced=True)

    astream = stream  # named for `async for chunk in synth.astream(...)`: the same object serves both

    def say(self, text: str, **settings: Unpack[StreamSettings]) -> np.ndarray:
        """All PCM of `stream(text, ...)`: (S,) float32 in [-1, 1] at SAMPLE_RATE_HZ."""
        return whole(self._stream(text, settings))

    def say_many(
        self, texts: Iterable[str], *, at_once: int | None = None, **settings: Unpack[StreamSettings]
    ) -> Iterator[np.ndarray]:
        """Yields the PCM of `say` for each text, in order. An error is raised after the PCM of the texts before; it, or
        leaving the iterator, ends the streams that are open.

        at_once: streams that are open; None: as many as are made together. Every text gets the seed of the settings, or
        one of its own. Raises OptionsError at the call for an `at_once` below 1."""
        if at_once is not None:
            checked_int("at_once", at_once, at_least=1)
        return say_many(self._stream, texts, settings, at_once or self._made_together)

    def say_each(self, ask: Callable[[], SayRequest | None], *, at_once: int | None = None) -> Iterator[SayResult]:
        """As `say_many`, for texts with settings of their own: yields each as soon as it is over; an error belongs to
        its text alone. A text with more frames than its `StreamOptions.buffer_frames` never ends, since nobody reads it
        before it is over.

        ask: returns the next request, or None if there is none for now: see `mktts.engine.many.say_each`. at_once:
        None: a few more than are made together."""
        if at_once is not None:
            checked_int("at_once", at_once, at_least=1)
        return say_each(self._stream, ask, at_once or self._made_together + self._made_together // _WAITING)

    def open(self, **settings: Unpack[StreamSettings]) -> Session:
        """Opens a stream whose text comes later, through `Session.feed` and `finish`. Settings and errors as for
        `stream`; layout="whole" raises PromptError."""
        if settings.get("layout") == "whole":
            raise PromptError("text that arrives later needs the streaming layout, got layout='whole'")
        request, plan = self._checked("", {**settings, "layout": settings.get("layout") or "streaming"})
        max_chars = plan.options.max_chars_per_segment or self._fed_chars
        script = partial(FedScript, request, max_chars=max_chars)
        return Session(self.engine, self.engine.reserve(plan), script, *self._readers(request, plan, settings))

    def _stream(self, text: str, settings: StreamSettings, paced: bool = False) -> Stream:
        started_s = time.perf_counter()
        request, plan = self._checked(clean_text(text), settings, paced)
        feed, words = self._readers(request, plan, settings)
        max_chars = plan.options.max_chars_per_segment or self._whole_chars
        parts = cut(request, feed.take(request.text, final=True), max_chars)
        if words is not None:
            words.feed(request.text)
            words.finish()
        utterance = self.engine.reserve(plan)
        self.engine.begin(utterance, partial(Script, parts, started_s=started_s))
        return Stream(self.engine, utterance, words)

    def spoken(self, word: str, language: str, lexicon: Lexicon | None = None) -> str:
        """A word of a text as it will be heard, whatever its neighbours. lexicon: in place of the synthesizer's."""
        said = (lexicon or self.lexicon).say(word)
        return said if self.front_end is None else self.front_end.word(said, language.lower())

    def _readers(self, request: Request, plan: Plan, settings: StreamSettings) -> tuple[TextFeed, WordTimes | None]:
        """What a stream's text goes through, and what finds the times of its words, if they are wanted."""
        said, language, words = settings.get("pronunciations"), request.language, None
        lexicon = self.lexicon if said is None else Lexicon(said, self.lexicon)
        named = partial(self._named, request, settings.get("voices") or {})
        readers: list[Callable[[], Any]] = [MarkupFeed] if plan.options.markup == "strip" else []
        if plan.options.word_times:
            words = WordTimes(TextFeed(named, readers), partial(self.spoken, language=language, lexicon=lexicon))
        if lexicon.tables:
            readers.append(partial(LexiconFeed, lexicon))
        if self.front_end is not None:
            readers.append(partial(FrontEndFeed, self.front_end.languages, language))
        return TextFeed(named, readers), words

    def _named(self, request: Request, voices: Mapping[str, Voice], name: str) -> Request | None:
        """`request`, without text, with the voice or speaker of that name; None if there is none."""
        name = name.lower()
        voice = {saved.lower(): voice for saved, voice in voices.items()}.get(name)
        if voice is None and name not in self._prompts.config.speakers:
            return None
        return self._prompts.check(replace(request, text="", speaker=None if voice else name, voice=voice))

    @property
    def _made_together(self) -> int:
        """How many streams are made together."""
        return 1 if self.lanes is None else self.lanes.slots

    @property
    def lanes(self) -> Lanes | None:
        """The lanes that make many streams together; None if there are none, or not yet."""
        batch = self.engine.runners.get("batch")
        return None if batch is None else batch.lanes

    @property
    def ticks(self) -> np.ndarray:
        """The newest ticks of the batch engine, one record a tick of `mktts.engine.scheduler.TICKS`, oldest first."""
        batch = self.engine.runners.get("batch")
        return np.array([] if batch is None else list(batch.log), TICKS)

    def set_limits(self, limits: AdmissionLimits) -> None:
        """For a server: limits the streams that are open at once. A batch engine that was put off is made now, which
        takes seconds."""
        self.engine.set_limits(limits)

    @property
    def stats(self) -> dict[EngineName, EngineStats]:
        """The state of each engine now."""
        return self.engine.stats

    @property
    def capacity(self) -> Capacity:
        """The number of listeners that are admitted at once, inf for no limit, and its basis."""
        return self.engine.capacity

    def measure_capacity(self, *, renew: bool = False, only_kept: bool = False) -> Capacity:
        """Sets `capacity` to that of this machine: what was measured before, or else a new measurement of some seconds,
        which is kept in the cache folder by machine, model and settings. renew: measures anew. only_kept: does not
        measure. Streams that are open count as a load."""
        return self.engine.measure_capacity(self._any_request(_MEASURED_TEXT), renew, only_kept)

    def warm_up(self) -> None:
        """Runs one short utterance on each engine, so that the first request finds everything allocated and compiled.
        Raises EngineError after `close`."""
        self.engine.warm_up(self._any_request("Ready."))

    def forget(self, voice: Voice) -> None:
        """Drops what caches hold of `voice`: prompt rows, keys and values of prefixes, codec states; soon, in the
        worker's thread. Open streams go on. Raises EngineError after `close`."""
        self.engine.forget(voice)

    def close(self) -> None:
        """Ends every open stream as cancelled, ends the worker thread, and frees the model. Idempotent."""
        self.engine.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = self.checkpoint.folder.name if self.checkpoint else "no checkpoint"
        state = ", closed" if self.engine.closed else ""
        return f"<Synthesizer: {name}, {self.backend_name} on {self.device}, {str(self.dtype)[6:]}{state}>"

    def _checked(self, text: str, settings: StreamSettings, paced: bool = True) -> tuple[Request, Plan]:
        """What to say and how to generate it, checked. text: cleaned."""
        for name in settings.keys() - StreamSettings.__annotations__.keys():
            where = f": it belongs to sampling=Sampling(talker=Choice({name}=...))" if name in _OF_A_CHOICE else ""
            known = ", ".join(StreamSettings.__annotations__)
            raise OptionsError(f"a stream has no setting {name!r}{where or f'; expected one of {known}'}")
        request = Request(text, **{name: settings[name] for name in settings.keys() & _OF_THE_REQUEST})
        if request.instruct:
            request = replace(request, instruct=clean_text(request.instruct, "instruct"))
        seed, sampling, options = (settings.get(name) for name in ("seed", "sampling", "options"))
        plan = Plan(
            self.sampling if sampling is None else sampling,
            drawn_seed() if seed is None else seed,
            settings.get("max_frames"),
            _OPTIONS if options is None else options,
            paced,
        )
        return self._prompts.check(request), plan

    def _any_request(self, text: str) -> Request:
        """A request that this type of checkpoint can speak."""
        config, voice = self._prompts.config, None
        if config.type.clones:
            silent = torch.zeros(config.talker.hidden_size)
            voice = Voice(embedding=silent, codes=None, transcript=None, model_size=config.model_size)
        return self._prompts.check(Request(text, voice=voice))
