"""Loads a checkpoint's model onto a device: the lanes that make one stream a tick, and those that make many."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from mktts.batch import BatchSettings
from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import codec_for
from mktts.common import checked_int, one_of
from mktts.engine.admission import Admission
from mktts.engine.capacity import machine_key
from mktts.engine.engine import Engine
from mktts.engine.lanes import SingleLanes
from mktts.engine.runner import Runner
from mktts.errors import BackendUnavailable, OptionsError
from mktts.model.backend import Backend, default_dtype, device_named
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, SpokenRows

BackendName = Literal["auto", "torch", "megakernel", "upstream"]
EngineChoice = Literal["auto", "single", "batch"]
_WIDE = 512  # hidden size from which a matrix-vector product gains from a second thread
_CPU_STREAMS, _CPU_BYTES = 32, 2 << 30


@dataclass
class Loading:
    """The arguments of `Synthesizer.load`, checked. single, together: which lanes are wanted. Raises BackendUnavailable
    and OptionsError."""

    backend: str
    device: Any
    dtype: torch.dtype | None
    cpu_threads: int | None
    engine: str
    deterministic: bool | None
    batch: BatchSettings | None

    def __post_init__(self) -> None:
        one_of("backend", self.backend, get_args(BackendName), BackendUnavailable)
        one_of("engine", self.engine, get_args(EngineChoice))
        self.device = device_named(self.device)
        self.dtype = default_dtype(self.device) if self.dtype is None else self.dtype
        one_of("dtype", self.dtype, (torch.bfloat16, torch.float32), BackendUnavailable)
        if self.cpu_threads is not None:
            checked_int("cpu_threads", self.cpu_threads, 1, error=BackendUnavailable)
        if self.deterministic and self.engine == "single":
            raise OptionsError("deterministic=True is a promise of the batch engine: leave engine='single' out")
        asked = self.engine == "batch" or bool(self.deterministic)
        if asked and self.backend not in ("auto", "torch"):
            raise BackendUnavailable(
                f"the batch engine, which engine='batch' and deterministic=True take, does not run on backend "
                f"{self.backend!r}: leave the backend out"
            )
        if not isinstance(self.batch, BatchSettings | None):
            raise OptionsError(f"batch must be BatchSettings or None, got {type(self.batch).__name__}")
        self.batch = self.batch or BatchSettings()
        self.together = asked or (self.engine == "auto" and self.backend == "auto")
        self.single = self.engine == "single" or (self.engine == "auto" and not self.deterministic)


def default_cpu_threads(checkpoint: Checkpoint) -> int | None:
    """1 for small models, None (torch's own choice) for the released sizes. At a hidden size of 64, where waking a
    second thread costs more than it saves, a frame on the worker took 8.6 ms with one thread and 25 ms with two."""
    return 1 if checkpoint.config.talker.hidden_size < _WIDE else None


def load_engine(checkpoint: Checkpoint, wanted: Loading, threads: int | None) -> Engine:
    """The engine with the lanes that are wanted. threads: for one operator on a CPU. Where both kinds are wanted, a GPU
    gets the lanes of many streams when they are needed: they take most of the memory, and seconds to make."""
    admission = Admission()
    made_for = (checkpoint.folder.resolve(), checkpoint.revision, wanted.dtype, wanted.backend, wanted.batch)
    key = "; ".join(map(str, (machine_key(wanted.device, threads), *made_for)))
    single = batch = later = None
    if wanted.backend == "upstream":
        single = _upstream_runner(checkpoint, wanted, admission)
    elif wanted.single:
        single = single_runner(wanted.backend, checkpoint, wanted.device, wanted.dtype, admission)
    cuda = wanted.device.type == "cuda"
    if wanted.together and (single is None or not cuda):
        # Where the CPU is slower than real time even for one stream, a second copy of the weights would help nobody.
        slow = single is not None and checkpoint.config.talker.hidden_size >= _WIDE
        batch = None if slow else batch_runner(checkpoint, wanted, single, admission)
    elif wanted.together:
        later = partial(batch_runner, checkpoint, wanted, single, admission)
    if cuda:
        torch.cuda.empty_cache()  # packing weights took memory that serving does not need: 300 MiB at 0.6B
    return Engine(
        single,
        batch,
        later,
        admission=admission,
        cpu_threads=threads,
        capacity_key=key,
        device=wanted.device,
        dtype=wanted.dtype,
    )


def step_backend(name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Backend:
    """The megakernel if it is named, or if no backend is and it can run; otherwise the oracle."""
    if name == "megakernel" or (name == "auto" and device.type == "cuda" and dtype == torch.bfloat16):
        from mktts.kernel.backend import MegakernelBackend

        try:
            return MegakernelBackend(checkpoint.config, checkpoint.tensors(), device, dtype)
        except BackendUnavailable as reason:
            if name == "megakernel":
                raise
            logging.getLogger(__name__).warning("the torch backend serves instead of the megakernel: %s", reason)
    return TorchBackend(checkpoint.config, checkpoint.tensors(), device, dtype)


def single_runner(
    name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, admission: Admission
) -> Runner:
    """The runner that makes one stream a tick, on the backend of `step_backend`."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    backend = step_backend(name, checkpoint, device, dtype)
    prompts = PromptBuilder(config, {**tensors, **backend.embeddings}, checkpoint.tokenizer(), device, dtype)
    lanes = SingleLanes(
        backend=backend,
        codec=codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), device),
        positions=config.talker.max_position_embeddings,
        decodes_beside=device.type == "cuda",
    )
    return Runner(lanes, prompts, admission)


def _upstream_runner(checkpoint: Checkpoint, wanted: Loading, admission: Admission) -> Runner:
    from mktts.engine.upstream import UpstreamLanes, UpstreamPrompt, load_upstream

    # The builder only checks requests and counts tokens; on the CPU in the stored dtype its tables stay on disk.
    prompts = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cpu", torch.bfloat16)
    positions = checkpoint.config.talker.max_position_embeddings
    lanes = UpstreamLanes(load_upstream(checkpoint, wanted.dtype, wanted.device), positions)
    build = partial(UpstreamPrompt, tokenizer=prompts.tokenizer)
    return Runner(lanes, prompts, admission, build, partial(build, text_ended=False))


def batch_runner(checkpoint: Checkpoint, wanted: Loading, single: Runner | None, admission: Admission) -> Runner:
    """The runner that makes many streams together. single: a runner to share with what can be shared."""
    config, tensors, settings = checkpoint.config, checkpoint.tensors(), wanted.batch
    shared: SingleLanes | None = None if single is None else single.lanes
    cuda = wanted.device.type == "cuda"
    if cuda:
        try:
            from mktts.batch.cuda.lanes import cuda_lanes
        except ModuleNotFoundError:
            raise BackendUnavailable(
                "engine='batch' needs triton on a CUDA device, which comes with torch's CUDA builds: install one of "
                "those, or take engine='single'"
            ) from None
        embeddings = None if shared is None else shared.backend.embeddings
        lanes = cuda_lanes(checkpoint, wanted.device, wanted.dtype, settings, wanted.deterministic, embeddings)
    else:
        from mktts.batch.plain import TorchLanes

        lanes = TorchLanes(
            config,
            tensors,
            CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors()) if shared is None else shared.codec,
            settings.max_streams or _CPU_STREAMS,
            settings.positions,
            settings.memory_bytes or _CPU_BYTES,
            wanted.dtype,
            # operators of one thread leave the other cores to the codec's thread
            threads=wanted.cpu_threads is None and default_cpu_threads(checkpoint) == 1 and torch.get_num_threads() > 1,
        )
    if single is not None:
        prompts = single.prompts
    else:
        embedded = {**tensors, **lanes.embeddings}
        prompts = PromptBuilder(config, embedded, checkpoint.tokenizer(), wanted.device, wanted.dtype)
    return Runner(lanes, prompts, admission, partial(prompts.of_checked, spoken=SpokenRows(prompts)) if cuda else None)
