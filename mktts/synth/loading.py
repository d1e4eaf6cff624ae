"""The models of a synthesizer: loaded from a checkpoint onto a device, and which of the two serves a stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from mktts.batch.admission import AdmissionSettings
from mktts.batch.model import LaneModel
from mktts.batch.settings import BatchSettings
from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import codec_for
from mktts.common import one_of, whole_number
from mktts.errors import BackendUnavailable, EngineError, OptionsError, SamplingError
from mktts.model.backend import Backend, default_dtype, device_named
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, SpokenRows
from mktts.model.sampling import Sampling
from mktts.speech.job import EngineName
from mktts.synth.one_by_one import StepModel

if TYPE_CHECKING:
    from mktts.batch.executor import Together
    from mktts.synth.upstream import UpstreamModel

    ServedBy = tuple[StepModel | UpstreamModel | LaneModel, EngineName]

BackendName = Literal["auto", "torch", "megakernel", "upstream"]
EngineChoice = Literal["auto", "single", "batch"]
_WIDE = 512  # hidden size from which a matrix-vector product gains from a second thread
_CPU_STREAMS, _CPU_BYTES = 32, 2 << 30


@dataclass(frozen=True)
class Loading:
    """Checked arguments of `Synthesizer.load`."""

    backend: str
    device: torch.device
    dtype: torch.dtype
    single: bool
    together: bool
    deterministic: bool | None
    batch: BatchSettings
    own_threads: bool = False  # nobody said how many threads an operator may use

    @classmethod
    def checked(
        cls,
        backend: str,
        device: str,
        dtype: torch.dtype | None,
        cpu_threads: int | None,
        engine: str,
        deterministic: bool | None,
        batch: BatchSettings | None,
    ) -> Loading:
        """Raises BackendUnavailable and OptionsError, see `Synthesizer.load`."""
        one_of("backend", backend, get_args(BackendName), BackendUnavailable)
        one_of("engine", engine, get_args(EngineChoice))
        where = device_named(device)
        dtype = default_dtype(where) if dtype is None else dtype
        one_of("dtype", dtype, (torch.bfloat16, torch.float32), BackendUnavailable)
        if cpu_threads is not None:
            whole_number("cpu_threads", cpu_threads, 1, error=BackendUnavailable)
        if deterministic and engine == "single":
            raise OptionsError("deterministic=True is a promise of the batch engine: leave engine='single' out")
        together = engine == "batch" or bool(deterministic)
        if together and backend not in ("auto", "torch"):
            raise BackendUnavailable(
                f"the batch engine, which engine='batch' and deterministic=True take, does not run on backend "
                f"{backend!r}: leave the backend out"
            )
        if not isinstance(batch, BatchSettings | None):
            raise OptionsError(f"batch must be BatchSettings or None, got {type(batch).__name__}")
        together = together or (engine == "auto" and backend == "auto")
        single = engine == "single" or (engine == "auto" and not deterministic)
        return cls(
            backend, where, dtype, single, together, deterministic, batch or BatchSettings(), cpu_threads is None
        )


def default_cpu_threads(checkpoint: Checkpoint) -> int | None:
    """1 for small models, None (torch's own choice) for the released sizes.

    A small model's operators take microseconds, and waking a second thread for each costs more than it saves: at 64
    wide, one frame on the worker took 8.6 ms with one thread and 25 ms with two.
    """
    return 1 if checkpoint.config.talker.hidden_size < _WIDE else None


def load_models(
    checkpoint: Checkpoint, wanted: Loading
) -> tuple[StepModel | UpstreamModel | None, Together | None, Callable[[], Together] | None]:
    """The model that makes one stream a step, the executor that makes many together, and what makes that one later.

    Where both engines are wanted, a GPU gets the second when it is needed: it takes most of the memory, and seconds.
    """
    if wanted.backend == "upstream":
        from mktts.synth.upstream import UpstreamModel, load_upstream

        # The builder only checks requests and counts tokens; on the CPU in the stored dtype its tables stay on disk.
        prompts = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cpu", torch.bfloat16)
        return UpstreamModel(load_upstream(checkpoint, wanted.dtype, wanted.device), prompts), None, None
    single = step_model(wanted.backend, checkpoint, wanted.device, wanted.dtype) if wanted.single else None
    together = later = None
    cuda = wanted.device.type == "cuda"
    if wanted.together and (single is None or not cuda):
        # Where the CPU is slower than speech for one stream, two copies of the weights would serve nobody.
        slow = single is not None and checkpoint.config.talker.hidden_size >= _WIDE
        together = None if slow else _together(checkpoint, wanted, single)
    elif wanted.together:
        later = partial(_together, checkpoint, wanted, single)
    if cuda:
        torch.cuda.empty_cache()  # packing weights takes what serving does not need: 300 MiB at 0.6B
    return single, together, later


def step_backend(name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Backend:
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


def step_model(name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> StepModel:
    """The model that makes one stream a step, on the backend of `step_backend`."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    backend = step_backend(name, checkpoint, device, dtype)
    return StepModel(
        prompts=PromptBuilder(config, {**tensors, **backend.embeddings}, checkpoint.tokenizer(), device, dtype),
        positions=config.talker.max_position_embeddings,
        backend=backend,
        codec=codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), device),
        overlaps=device.type == "cuda",
    )


def _together(checkpoint: Checkpoint, wanted: Loading, single: StepModel | None) -> Together:
    from mktts.batch.executor import Together

    config, tensors, settings = checkpoint.config, checkpoint.tensors(), wanted.batch
    if wanted.device.type == "cuda":
        from mktts.batch.cuda.loading import cuda_lanes

        embeddings = None if single is None else single.backend.embeddings
        lanes = cuda_lanes(checkpoint, wanted.device, wanted.dtype, settings, wanted.deterministic, embeddings)
        admission = AdmissionSettings()
    else:
        from mktts.batch.plain.lanes import TorchLanes

        lanes = TorchLanes(
            config,
            tensors,
            CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors()) if single is None else single.codec,
            settings.max_streams or _CPU_STREAMS,
            settings.positions,
            settings.memory_bytes or _CPU_BYTES,
            wanted.dtype,
            # operators of one thread each leave the other cores to it
            threads=wanted.own_threads and default_cpu_threads(checkpoint) == 1 and torch.get_num_threads() > 1,
        )
        admission = AdmissionSettings.cpu()
    prompts = (
        single.prompts
        if single
        else PromptBuilder(config, {**tensors, **lanes.embeddings}, checkpoint.tokenizer(), wanted.device, wanted.dtype)
    )
    spoken = SpokenRows(prompts) if wanted.device.type == "cuda" else None
    model = LaneModel(prompts=prompts, positions=lanes.pages.rows_per_slot, lanes=lanes, spoken=spoken)
    return Together(model, admission)


# Streams that are served singly where both engines are there: on an H200 two frames of the megakernel take 2.9 ms and
# three 4.3; one frame of many together takes 4.0 to 4.5.
SINGLE_STREAMS = 2
# And those that rest beside them, for want of text or of a reader: all may go on at once, and take turns then. Half of
# the listeners whom the megakernel carries on an H200.
OPEN_SINGLY = 8


class Models:
    """`single`, `together`, or both. The second may come later: made beside the first when more streams are open than
    are served singly; until then those take turns."""

    def __init__(
        self,
        single: StepModel | UpstreamModel | None,
        together: Together | None = None,
        later: Callable[[], Together] | None = None,
    ) -> None:
        self.many = together is not None or later is not None  # many streams are made together, or will be
        self.together = together  # the executor of the batch engine
        self._single, self._later = single, later
        self._singly = SINGLE_STREAMS  # that are due at once and served so
        self.on_made: Callable[[Together], None] = lambda executor: None

    @property
    def room(self) -> int:
        """Streams that are made at once."""
        return 1 if self.together is None else self.together.model.lanes.slots

    def any(self) -> StepModel | UpstreamModel | LaneModel:
        """One of them, to check requests with. Raises EngineError after `let_go`."""
        if self._single is not None:
            return self._single
        if self.together is None:
            raise EngineError("the synthesizer is closed: load another one")
        return self.together.model

    def prepare(self) -> None:
        """For a server: makes the second model now, where one is to come; and where streams of both would share a CPU,
        all of them are made together, so that one of the two knows how many are carried."""
        self._make()
        if self.together is not None and self._single is not None and not self._single.overlaps:
            self._singly = 0

    def check(self, sampling: Sampling) -> None:
        """Raises EngineError after `let_go`, and SamplingError for rng="torch" where there is no single engine."""
        if self.any() is not self._single and sampling.rng == "torch":
            raise SamplingError(
                "the batch engine draws with rng='philox': for rng='torch' take backend='torch', engine='single'"
            )

    def pick(self, due: int, singly: int, sampling: Sampling) -> ServedBy:
        """Who serves a stream that begins. due: others that wait neither for text nor for their reader, on either
        engine. singly: open on the single one, whether they wait or not. Raises as `check`."""
        self.check(sampling)
        model = self.any()
        if model is not self._single:
            return model, "batch"
        if (due < self._singly and singly < OPEN_SINGLY) or sampling.rng == "torch":
            return model, "single"
        if self.together is None:
            if self._later is not None:  # a program that ends meanwhile waits: compilers that are cut off abort it
                threading.Thread(target=self._make, name="mktts-batch-loading", daemon=False).start()
            return model, "single"
        return self.together.model, "batch"

    def each(self) -> list[ServedBy]:
        """All of them, by the name of the engine. Raises EngineError after `let_go`."""
        self.any()
        together = None if self.together is None else self.together.model
        named: list[tuple[Any, EngineName]] = [(self._single, "single"), (together, "batch")]
        return [(model, name) for model, name in named if model is not None]

    def let_go(self) -> None:
        """Frees the models, as far as nobody else holds them."""
        self._single = self.together = self._later = None

    def _make(self) -> None:
        """Makes the second model, once."""
        later, self._later = self._later, None
        if later is None:
            return
        try:
            with torch.inference_mode():
                executor = later()
            self.on_made(executor)
        except Exception as reason:
            logging.getLogger(__name__).warning("streams go on taking turns, the batch engine cannot run: %s", reason)
        else:
            if self._single is not None:
                self.together = executor
