"""Text in, speech out: `Synthesizer` owns a checkpoint's model and opens streams on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch

from mktts.batch.settings import BatchSettings
from mktts.batch.tick import TICKS
from mktts.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, open_checkpoint
from mktts.common import whole_number
from mktts.errors import BusyError, OptionsError, PromptError
from mktts.model.prompt import Layout, Request
from mktts.model.sampling import Choice, Sampling, drawn_seed
from mktts.model.voice import Voice
from mktts.speech.executor import Standing, Wishes
from mktts.speech.front import FrontEnd
from mktts.speech.guard import FinishReason, Guard
from mktts.speech.job import Away, EngineName
from mktts.speech.options import SCHEDULE, Chunk, Plan, StreamOptions, Timings
from mktts.speech.stream import Session, Stream
from mktts.speech.text import clean_text, segment_chars, split_text
from mktts.synth.engine import Engine
from mktts.synth.loading import BackendName, EngineChoice, Loading, Models, default_cpu_threads, load_models
from mktts.synth.many import Asked, Said, say_each, say_many
from mktts.synth.one_by_one import OneByOne, StepModel

if TYPE_CHECKING:
    from mktts.batch.executor import Together
    from mktts.batch.lanes import Lanes
    from mktts.synth.loading import ServedBy
    from mktts.synth.upstream import UpstreamModel

__all__ = [
    "BatchSettings",
    "Chunk",
    "FinishReason",
    "Guard",
    "Session",
    "Stream",
    "StreamOptions",
    "Synthesizer",
    "Timings",
]


class StreamSettings(TypedDict, total=False):
    """The keyword arguments of `Synthesizer.stream`, `say` and `open`; each may be left out.

    language: "auto" or one of `ModelConfig.spoken_languages`. speaker: of a CustomVoice checkpoint; its first where
    left out. instruct: how to say it, or for VoiceDesign what the voice is like. voice: for a Base checkpoint, which
    cannot speak without one. layout: None takes upstream's default of the checkpoint. sampling: None takes the
    checkpoint's settings. seed: None draws one, kept in `Stream.seed`. max_frames: of the whole utterance;
    None leaves each segment MAX_SEGMENT_FRAMES and the guard. options: how frames become chunks.
    """

    language: str
    speaker: str | None
    instruct: str | None
    voice: Voice | None
    layout: Layout | None
    sampling: Sampling | None
    seed: int | None
    max_frames: int | None
    options: StreamOptions | None


_CALIBRATION = {False: (3, 12), True: (32, 192)}  # streams at once, on a CPU and on a CUDA device
_CALIBRATION_FRAMES = 16
_WAITING = 8  # of so many streams that are made together, one more is open: who leaves is followed at once
_OF_THE_REQUEST = {field.name for field in fields(Request)} - {"text"}
_OF_A_CHOICE = {field.name for field in fields(Choice)}


class Synthesizer:
    """One model and its worker thread; any number of streams may be open at once.

    Load one per process and share it between threads and tasks. Use it as a context manager, or call `close`.
    gone, on_gone: of a synthesizer in a process of its own (`mktts.synth.apart`), which may die; this one does not.
    """

    gone = False
    on_gone: Callable[[], None] | None = None

    def __init__(
        self,
        model: StepModel | UpstreamModel | None,
        sampling: Sampling | None = None,
        checkpoint: Checkpoint | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cpu_threads: int | None = None,
        together: Together | None = None,
        later: Callable[[], Together] | None = None,
    ) -> None:
        """Puts made models behind the interface; `load` is the usual way in. One of `model` and `together` may be None.

        later: makes `together` when it is needed. `front_end` is what the checkpoint has its text read by, or None.
        """
        self.checkpoint = checkpoint
        self.backend_name = (model or together.model).name
        self.device = torch.device(device)
        self.dtype = dtype
        self.sampling = sampling or Sampling()
        longest = checkpoint.longest_text_chars() if checkpoint else None
        self._whole_chars = segment_chars(longest, fed=False)
        self._fed_chars = segment_chars(longest, fed=True)
        name = checkpoint.text_front_end() if checkpoint else None
        self.front_end = None if name is None else FrontEnd.ready(name, checkpoint.config.spoken_languages)
        self._models = Models(model, together, later)
        executors = [*([] if model is None else [OneByOne()]), *([] if together is None else [together])]
        self._engine = Engine(executors, cpu_threads=cpu_threads)
        self._models.on_made = self._engine.add

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
    ) -> Synthesizer:
        """Loads a checkpoint (see `mktts.checkpoint.open.open_checkpoint`) onto a device.

        backend: "torch", "upstream" (qwen-tts's own generate, needs requirements.txt), "megakernel", or "auto": the
            fastest one that can run here.
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA where there is a device.
        dtype: of the talker and code predictor; None takes bfloat16 on CUDA, as the weights are stored, and float32
            on the CPU. The codec computes in float32, unless BatchSettings(codec="fast") says otherwise.
        cpu_threads: that one operator may use; None takes `default_cpu_threads`.
        engine: "single" makes one stream a step, the quickest for one listener; "batch" makes many together; "auto"
            serves one or two streams singly and further ones together; streams that wait for text or for their reader
            do not count, and a stream whose text is fed is given its engine with the first of it. "auto" keeps to
            "single" where a backend is named, and on a CPU for models that are slower than speech there. On CUDA it
            makes the batch engine when the third stream opens, beside those that are open; until it is there streams
            take turns.
        deterministic: with the batch engine, a stream's codes do not depend on its neighbours, on the number of lanes,
            on how its prompt was cut over ticks, or on whether its prefix was kept; on one device, in one dtype and
            version. None: where that costs little. True takes the batch engine for every stream.
        batch: how many may be open, and the memory that they take.

        Raises CheckpointError, OptionsError, and BackendUnavailable naming what is missing.
        """
        wanted = Loading.checked(backend, device, dtype, cpu_threads, engine, deterministic, batch)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint)
        threads = cpu_threads or default_cpu_threads(checkpoint)
        models = load_models(checkpoint, wanted)
        return cls(models[0], checkpoint.sampling(), checkpoint, wanted.device, wanted.dtype, threads, *models[1:])

    def stream(self, text: str, **settings: Unpack[StreamSettings]) -> Stream:
        """Starts to speak `text` and returns at once; the stream is an iterator and an async iterator of chunks.

        settings: see `StreamSettings`. Raises TextError, PromptError, SamplingError or OptionsError here; what fails
        later is raised by the stream.
        """
        return self._stream(text, settings)

    def astream(self, text: str, **settings: Unpack[StreamSettings]) -> Stream:
        """`stream`, named for `async for chunk in synth.astream(...)`: the same object serves both."""
        return self.stream(text, **settings)

    def say(self, text: str, **settings: Unpack[StreamSettings]) -> np.ndarray:
        """All PCM of `stream(text, ...)`: (S,) float32 in [-1, 1] at SAMPLE_RATE_HZ."""
        with self._stream(text, settings, paced=False) as stream:
            return stream.read()

    def say_many(
        self,
        texts: Iterable[str],
        *,
        on_done: Callable[[int], None] | None = None,
        at_once: int | None = None,
        **settings: Unpack[StreamSettings],
    ) -> Iterator[np.ndarray]:
        """The PCM of `say` for each text, in order; with the batch engine as many as fit are made at once.

        on_done: called with the number of texts so far, after each. at_once: streams that are open; None: as many as
        the engine has room for. Every text gets the seed of the settings, or one of its own. Errors as of `stream`,
        behind the PCM of the texts before; they, and leaving the iterator, end the streams that are open.
        Raises OptionsError here for an `at_once` below 1.
        """
        if at_once is not None:
            whole_number("at_once", at_once, at_least=1)
        return say_many(self._stream_unpaced, texts, settings, on_done, at_once or self._models.room)

    def say_each(self, ask: Callable[[], Asked | None], *, at_once: int | None = None) -> Iterator[Said]:
        """As `say_many`, for texts with settings of their own: each as soon as it is over, and its error is its alone.

        ask: gives the next one, or None where there is none for now: see `mktts.synth.many.say_each`. One whose
        `StreamOptions.buffer_frames` are fewer than it has never ends, because nobody reads it before it is over.
        at_once: None takes a few more than the engine has room for, which then wait for a place.
        """
        if at_once is not None:
            whole_number("at_once", at_once, at_least=1)
        room = self._models.room
        return say_each(self._stream_unpaced, ask, at_once or room + room // _WAITING)

    def open(self, **settings: Unpack[StreamSettings]) -> Session:
        """A stream whose text comes later, through `Session.feed` and `finish`. Settings and errors as for `stream`.

        Fed text is spoken in the streaming layout, so layout="whole" raises PromptError.
        """
        return self._listen(settings)

    def open_away(self, text: str | None, away: tuple[Away, int], settings: StreamSettings) -> Stream:
        """`stream`, or for no text `open`, whose chunks go `away`: see `mktts.synth.apart`. The stream is to be kept
        until it is over."""
        if text is None:
            return self._listen(settings, away)
        return self._stream(text, settings, away=away)

    def _listen(self, settings: StreamSettings, away: tuple[Away, int] | None = None) -> Session:
        if settings.get("layout") == "whole":
            raise PromptError("text that arrives later needs the streaming layout, got layout='whole'")
        request, plan = self._checked("", {**settings, "layout": settings.get("layout") or "streaming"})
        max_chars = plan.options.max_chars_per_segment or self._fed_chars
        self._models.check(plan.sampling)

        def make() -> tuple[Any, Any, EngineName]:
            model, engine = self._pick(plan.sampling)
            return *model.listen(request, max_chars, plan), engine

        feed = self.front_end and self.front_end.feed(request.language)
        job = self._engine.expect(plan.options.buffer_frames, away=away)
        return Session(self._engine, job, plan.seed, make, feed)

    def _pick(self, sampling: Sampling) -> ServedBy:
        return self._models.pick(self._engine.due_streams, self._engine.open_on("single"), sampling)

    def _stream(
        self,
        text: str,
        settings: StreamSettings,
        paced: bool = True,
        served_by: ServedBy | None = None,
        away: tuple[Away, int] | None = None,
    ) -> Stream:
        started_s = time.perf_counter()
        request, plan = self._checked(clean_text(text), settings)
        spoken = request.text if self.front_end is None else self.front_end.read(request.text, request.language)
        pieces = split_text(spoken, plan.options.max_chars_per_segment or self._whole_chars)
        model, engine = served_by or self._pick(plan.sampling)
        work = model.speak([replace(request, text=piece) for piece in pieces], plan, started_s)
        job = self._engine.expect(plan.options.buffer_frames, paced, away)
        self._engine.begin(job, work, engine)
        return Stream(self._engine, job, plan.seed)

    def _stream_unpaced(self, text: str, settings: StreamSettings) -> Stream:
        return self._stream(text, settings, paced=False)

    @property
    def serves_many(self) -> bool:
        """Whether many streams are made together, or will be once enough are open: see `mktts.speech.serving`."""
        return self._models.many

    @property
    def lanes(self) -> Lanes | None:
        """What makes many streams together; None where the engine for that is not there, or not yet."""
        together = self._models.together
        return None if together is None else together.model.lanes

    @property
    def ticks(self) -> np.ndarray:
        """What the batch engine did last, one record a tick of dtype `mktts.batch.tick.TICKS`, oldest first."""
        together = self._models.together
        return np.zeros(0, TICKS) if together is None else together.log.table()

    def admit(self, wishes: Wishes) -> None:
        """For a server: from now on a stream that finds no place in time ends by BusyError, on either engine; and where
        a batch engine is to come it is made now, which takes seconds. Raises EngineError after `close`."""
        self._models.prepare()
        self._engine.admit(wishes)

    @property
    def standing(self) -> dict[EngineName, Standing]:
        """How each engine stands at the moment."""
        return self._engine.standing

    @property
    def carries(self) -> int:
        """Listeners that are served in real time at once, as far as is known: learnt from what was made so far."""
        standing = self.standing
        return max((one.carries for one in standing.values()), default=1)

    def calibrate(self) -> None:
        """A second of streams as a server has them, so that `carries` is of this machine. Call it after `warm_up`."""
        for served_by in self._models.each():
            for streams in (1,) if served_by[1] == "single" else _CALIBRATION[self.device.type == "cuda"]:
                self._crowd(streams, _CALIBRATION_FRAMES, served_by, paced=True)

    def warm_up(self) -> None:
        """Runs one short utterance on each engine, so that the first request finds everything allocated and compiled.

        One chunk of every size of the default schedule is made.
        """
        for served_by in self._models.each():
            self._crowd(1, sum(SCHEDULE), served_by, paced=False)

    def _crowd(
        self,
        streams: int,
        frames: int,
        served_by: ServedBy,
        paced: bool,
    ) -> None:
        options = StreamOptions(guard=Guard.off())
        settings: StreamSettings = {"max_frames": frames, "options": options, **self._any_voice()}
        crowd = [self._stream("Ready.", {**settings, "seed": seed}, paced, served_by) for seed in range(streams)]
        for stream in crowd:
            with stream, contextlib.suppress(BusyError):  # it carries fewer
                stream.read()

    def forget(self, voice: Voice) -> None:
        """Lets go of what caches hold of `voice`: prompt rows, keys and values of prefixes, codec states.

        Streams that are open go on; the work is done soon, in the worker's thread. Raises EngineError after `close`.
        """
        for model, _ in self._models.each():
            self._engine.ask(partial(model.forget, voice))

    def close(self) -> None:
        """Ends every open stream as cancelled and the worker thread, and lets go of the model. Idempotent."""
        self._engine.close()
        self._models.let_go()

    def __enter__(self) -> Synthesizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = self.checkpoint.folder.name if self.checkpoint else "no checkpoint"
        state = ", closed" if self._engine.closed else ""
        return f"<Synthesizer: {name}, {self.backend_name} on {self.device}, {str(self.dtype)[6:]}{state}>"

    def _checked(self, text: str, settings: StreamSettings) -> tuple[Request, Plan]:
        """What to say and how to generate it. `text`: cleaned."""
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
            StreamOptions() if options is None else options,
        )
        return self._models.any().check(request), plan

    def _any_voice(self) -> StreamSettings:
        """Whatever this type of checkpoint cannot speak without."""
        config = self._models.any().prompts.config
        if config.type.clones:
            silent = torch.zeros(config.talker.hidden_size)
            return {"voice": Voice(embedding=silent, codes=None, transcript=None, model_size=config.model_size)}
        return {}
