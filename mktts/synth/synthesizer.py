"""Text in, speech out: `Synthesizer` owns a checkpoint's model and opens streams on it."""

from __future__ import annotations

import logging
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, get_args

import numpy as np
import torch

from mktts.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, open_checkpoint
from mktts.codec.graphs import codec_for
from mktts.errors import BackendUnavailable, EngineError, OptionsError, PromptError
from mktts.model.backend import default_dtype, device_named
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Layout, PromptBuilder, Request
from mktts.model.sampling import Choice, Sampling, drawn_seed
from mktts.model.voice import Voice
from mktts.speech.guard import FinishReason, Guard
from mktts.speech.options import Chunk, Plan, StreamOptions, Timings
from mktts.speech.stream import Session, Stream
from mktts.speech.text import clean_text, segment_chars, split_text
from mktts.synth.engine import Engine
from mktts.synth.generation import StepModel

if TYPE_CHECKING:
    from mktts.model.backend import Backend
    from mktts.synth.upstream_model import UpstreamModel

__all__ = ["Chunk", "FinishReason", "Guard", "Session", "Stream", "StreamOptions", "Synthesizer", "Timings"]

BackendName = Literal["auto", "torch", "megakernel", "upstream"]
_WIDE = 512  # hidden size from which a matrix-vector product gains from a second thread


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


_OF_THE_REQUEST = {field.name for field in fields(Request)} - {"text"}
_OF_A_CHOICE = {field.name for field in fields(Choice)}


class Synthesizer:
    """One model and its worker thread; any number of streams may be open at once.

    Load one per process and share it between threads and tasks. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: StepModel | UpstreamModel,
        sampling: Sampling | None = None,
        checkpoint: Checkpoint | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cpu_threads: int | None = None,
    ) -> None:
        """Puts a made model behind the interface; `load` is the usual way in."""
        self.checkpoint = checkpoint
        self.backend_name = model.name
        self.device = torch.device(device)
        self.dtype = dtype
        self.sampling = sampling or Sampling()
        longest = checkpoint.longest_text_chars() if checkpoint else None
        self._whole_chars = segment_chars(longest, fed=False)
        self._fed_chars = segment_chars(longest, fed=True)
        self._model: StepModel | UpstreamModel | None = model
        self._engine = Engine(cpu_threads=cpu_threads)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint | str | Path = DEFAULT_CHECKPOINT,
        *,
        backend: BackendName = "auto",
        device: str = "auto",
        dtype: torch.dtype | None = None,
        cpu_threads: int | None = None,
    ) -> Synthesizer:
        """Loads a checkpoint (see `mktts.checkpoint.open.open_checkpoint`) onto a device.

        backend: "torch", "upstream" (qwen-tts's own generate, needs requirements.txt), "megakernel", or "auto": the
            fastest one that can run here.
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA where there is a device.
        dtype: of the talker and code predictor; None takes bfloat16 on CUDA, as the weights are stored, and float32
            on the CPU. The codec always computes in float32.
        cpu_threads: that one operator may use; None takes `default_cpu_threads`.

        Raises CheckpointError, and BackendUnavailable naming what is missing.
        """
        backend = _backend(backend)
        where = device_named(device)
        dtype = default_dtype(where) if dtype is None else dtype
        if dtype not in (torch.bfloat16, torch.float32):
            raise BackendUnavailable(f"dtype must be torch.bfloat16, torch.float32 or None, got {dtype!r}")
        if cpu_threads is not None and cpu_threads < 1:
            raise BackendUnavailable(f"cpu_threads must be at least 1 or None, got {cpu_threads}")
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint)
        threads = cpu_threads or default_cpu_threads(checkpoint)
        if backend == "upstream":
            model = _upstream_model(checkpoint, where, dtype)
        else:
            model = _step_model(backend, checkpoint, where, dtype)
        return cls(model, checkpoint.sampling(), checkpoint, where, dtype, threads)

    def stream(self, text: str, **settings: Unpack[StreamSettings]) -> Stream:
        """Starts to speak `text` and returns at once; the stream is an iterator and an async iterator of chunks.

        settings: see `StreamSettings`. Raises TextError, PromptError, SamplingError or OptionsError here; what fails
        later is raised by the stream.
        """
        started_s = time.perf_counter()
        request, plan = self._checked(clean_text(text), settings)
        pieces = split_text(request.text, plan.options.max_chars_per_segment or self._whole_chars)
        work = self._open_model().speak([replace(request, text=piece) for piece in pieces], plan, started_s)
        return Stream(self._engine, self._engine.open(work, plan.options.buffer_frames), plan.seed)

    def astream(self, text: str, **settings: Unpack[StreamSettings]) -> Stream:
        """`stream`, named for `async for chunk in synth.astream(...)`: the same object serves both."""
        return self.stream(text, **settings)

    def say(self, text: str, **settings: Unpack[StreamSettings]) -> np.ndarray:
        """All PCM of `stream(text, ...)`: (S,) float32 in [-1, 1] at SAMPLE_RATE_HZ."""
        with self.stream(text, **settings) as stream:
            return stream.read()

    def open(self, **settings: Unpack[StreamSettings]) -> Session:
        """A stream whose text comes later, through `Session.feed` and `finish`. Settings and errors as for `stream`.

        Fed text is spoken in the streaming layout, so layout="whole" raises PromptError.
        """
        if settings.get("layout") == "whole":
            raise PromptError("text that arrives later needs the streaming layout, got layout='whole'")
        request, plan = self._checked("", {**settings, "layout": settings.get("layout") or "streaming"})
        max_chars = plan.options.max_chars_per_segment or self._fed_chars
        work, script = self._open_model().listen(request, max_chars, plan)
        return Session(self._engine, self._engine.open(work, plan.options.buffer_frames), plan.seed, script)

    def warm_up(self) -> None:
        """Runs one short utterance, so that the first request finds everything allocated and compiled.

        One chunk of every size of the default schedule is made.
        """
        options = StreamOptions(guard=Guard.off())
        self.say("Ready.", **self._any_voice(), max_frames=sum(options.schedule), seed=0, options=options)

    def close(self) -> None:
        """Ends every open stream as cancelled and the worker thread, and lets go of the model. Idempotent."""
        self._engine.close()
        self._model = None

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
        return self._open_model().check(request), plan

    def _open_model(self) -> StepModel | UpstreamModel:
        if self._model is None:
            raise EngineError("the synthesizer is closed: load another one")
        return self._model

    def _any_voice(self) -> StreamSettings:
        """Whatever this type of checkpoint cannot speak without."""
        config = self._open_model().prompts.config
        if config.model_type == "base":
            silent = torch.zeros(config.talker.hidden_size)
            return {"voice": Voice(embedding=silent, codes=None, transcript=None, model_size=config.model_size)}
        return {}


def default_cpu_threads(checkpoint: Checkpoint) -> int | None:
    """1 for small models, None (torch's own choice) for the released sizes.

    A small model's operators take microseconds, and waking a second thread for each costs more than it saves: at 64
    wide, one frame on the worker took 8.6 ms with one thread and 25 ms with two.
    """
    return 1 if checkpoint.config.talker.hidden_size < _WIDE else None


def _backend(name: str) -> str:
    if name not in get_args(BackendName):
        raise BackendUnavailable(f"backend must be one of {get_args(BackendName)}, got {name!r}")
    return name


def _step_backend(name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Backend:
    """The megakernel where it was asked for, or where it can run and no other was; the oracle otherwise."""
    if name == "megakernel" or (name == "auto" and device.type == "cuda" and dtype == torch.bfloat16):
        from mktts.kernel.backend import MegakernelBackend

        try:
            return MegakernelBackend(checkpoint.config, checkpoint.tensors(), device, dtype)
        except BackendUnavailable as reason:
            if name == "megakernel":
                raise
            logging.getLogger(__name__).warning("the torch backend serves instead of the megakernel: %s", reason)
    return TorchBackend(checkpoint.config, checkpoint.tensors(), device, dtype)


def _step_model(name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> StepModel:
    config, tensors = checkpoint.config, checkpoint.tensors()
    backend = _step_backend(name, checkpoint, device, dtype)
    model = StepModel(
        backend=backend,
        prompts=PromptBuilder(config, {**tensors, **backend.embeddings}, checkpoint.tokenizer(), device, dtype),
        codec=codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), device),
        positions=config.talker.max_position_embeddings,
        overlaps=device.type == "cuda",
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # packing weights takes what serving does not need: 300 MiB at 0.6B
    return model


def _upstream_model(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> UpstreamModel:
    from mktts.synth.upstream import load_upstream
    from mktts.synth.upstream_model import UpstreamModel

    # The builder only checks requests and counts tokens here; on the CPU in the stored dtype its tables stay on disk.
    prompts = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cpu", torch.bfloat16)
    return UpstreamModel(load_upstream(checkpoint, dtype, device), prompts)
