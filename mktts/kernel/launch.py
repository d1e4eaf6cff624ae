"""Launches the kernels of csrc/ through checked calls of the CUDA driver: a launch's parameters (csrc/state.cuh in
ctypes), exchange area and tags, and the reason of a failure."""

import ctypes
from dataclasses import asdict
from functools import cache

import torch
from torch import Tensor

from mktts.errors import BackendUnavailable, EngineError
from mktts.kernel.build import Card, build_for
from mktts.model.sampling import Choice

STATUS_WORDS = 16  # int32, at the start of a stream's pinned memory; the frames follow
MADE = 0  # status word: frames made so far
ENDED = 1  # status word: whether speech ended
STOP = 2  # status word, written by the host: make no further frames
FRAME_WORDS = 20  # int32: 16 codes, ns of talker with code 0, ns of predictor, whether a code had no finite logit; 0
# What a block whose wait timed out was waiting for, by the number in its status (csrc/exchange.cuh).
WAITS = {
    1: "exchange words", 3: "partial sums", 5: "weights", 6: "query, key and value words", 7: "the host's answer",
    8: "the end of an earlier copy of weights", 9: "the end of the last copies of weights",
}  # fmt: skip

_Arguments = ctypes.c_void_p * 1  # kept: an unreferenced array type would be work for the garbage collector
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...

_POINTERS = """
    talker_tape talker_head_tape projection_tape predictor_tape predictor_head_tape projection_bias
    talker_norms talker_qk talker_final predictor_norms predictor_qk predictor_final
    talker_cos talker_sin predictor_cos predictor_sin embeddings0 embeddings inputs0 inputs
    exchange status debug_logits debug_hidden trace
""".split()


class StreamParams(ctypes.Structure):
    """csrc/state.cuh, struct Stream. Sampling settings ending in 0 apply to code 0, and to the tokens of a text."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("rows", "hidden", "sum", "kv", "seen", "out")]
        + [(name, ctypes.c_int) for name in ("slots", "position", "frame", "top_k0", "top_k", "greedy0", "greedy")]
        + [(name, ctypes.c_float) for name in ("temperature0", "temperature", "top_p0", "top_p", "penalty")]
        + [(name, ctypes.c_uint) for name in ("seed_lo", "seed_hi", "token")]
    )


class Params(ctypes.Structure):
    """csrc/state.cuh, struct Params."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [("stream", StreamParams), ("timeout_ns", ctypes.c_ulonglong), ("tag", ctypes.c_uint)]
        + [("frames", ctypes.c_int), ("ends", ctypes.c_int * 4)]
        + [(name, ctypes.c_int) for name in ("suppress_from", "min_frames", "prefill")]
    )


class _LaunchAttribute(ctypes.Structure):
    """cuda.h, CUlaunchAttribute; `value` is the first 4 of the value's 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15)]


class _LaunchConfig(ctypes.Structure):
    """cuda.h, CUlaunchConfig."""

    _fields_ = (
        [(f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"]
        + [("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p)]
        + [("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint)]
    )


def fill_pointers(structure: ctypes.Structure, tensors: dict[str, Tensor | None]) -> None:
    """Sets the pointers named by `tensors` to their data; None sets a null pointer."""
    for name, tensor in tensors.items():
        setattr(structure, name, None if tensor is None else tensor.data_ptr())


def set_choice(stream: StreamParams, choice: Choice, book0: bool) -> None:
    """Sets the sampling settings of code 0 (and of a text's tokens) if `book0`, else those of codes 1 to 15."""
    given = asdict(choice)
    for name, value in {"greedy": not given.pop("do_sample"), **given}.items():
        setattr(stream, name + "0" * book0, value)


def params_of(fixed: Params, seed: int, kv: Tensor, **tensors: Tensor) -> Params:
    """The parameters common to all launches of a stream: `fixed`, its seed, cache and other tensors."""
    params = Params.from_buffer_copy(fixed)
    stream = params.stream
    fill_pointers(stream, {"kv": kv, **tensors})
    stream.slots, stream.seed_lo, stream.seed_hi = kv.shape[3], seed & 0xFFFFFFFF, seed >> 32
    return params


def pinned_words(frames: int) -> Tensor:
    """Pinned host memory that a launch of `frames` frames writes to: (words,) int32, zeros."""
    return torch.zeros(STATUS_WORDS + frames * FRAME_WORDS, dtype=torch.int32, pin_memory=True)


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailable(f"the CUDA driver is not installed here ({error}): pass backend='torch'") from None


def _call(name: str, *arguments: object) -> None:
    """Calls the driver to load a kernel. Raises BackendUnavailable if this driver or GPU cannot run it."""
    try:
        _check(name, getattr(_driver(), name)(*arguments))
    except EngineError as error:
        raise BackendUnavailable(f"the compiled kernel cannot be used here: {error}: pass backend='torch'") from None


def _check(name: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"{name} failed: {text.value.decode() if text.value else status}")


class Kernel:
    """A kernel from a cubin, or from PTX that the driver translates, loaded on torch's current device. Raises
    BackendUnavailable if this driver or GPU cannot load it."""

    def __init__(self, image: bytes, name: str) -> None:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes torch's CUDA context current
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._image = image  # the driver may read it later
        _call("cuModuleLoadData", ctypes.byref(self._module), image)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def launch_grid(
        self, grid: tuple[int, int], threads: int, parameters: ctypes.Structure, early: bool = False
    ) -> None:
        """Makes an ordinary launch on torch's current stream, which may be capturing; `parameters` are copied. early:
        blocks may start before the previous kernel ends (programmatic dependent launch: compute capability 9.0 on)."""
        attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        stream = torch.cuda.current_stream().cuda_stream
        config = _LaunchConfig(*grid, 1, threads, 1, 1, 0, stream, ctypes.pointer(attribute), int(early))
        arguments = _Arguments(ctypes.addressof(parameters))
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None)
        _check("cuLaunchKernelEx", status)


_TIMEOUT_NS = 2_000_000_000
_TAG_LIMIT = 1 << 16  # exchange words carry 16 bits of the tag


class Launcher(Kernel):
    """A kernel whose blocks wait for each other, so that all must be resident at once. Cooperative launches follow each
    other on torch's current stream; utterances take turns. Raises BackendUnavailable if the kernel cannot be compiled
    or run, or if the device cannot hold all blocks at once."""

    def __init__(self, unit: str, name: str, defines: dict[str, int], device: torch.device, card: Card) -> None:
        """Compiles csrc/`unit` for `card`, unless it is cached, and loads its kernel `name`."""
        build = build_for(defines, card, unit)
        constants = build.constants
        self.layer_exchanges = constants["layer_exchanges"]  # by which one layer advances the tag
        self.blocks, self.threads, self.shared_bytes = defines["CTAS"], constants["threads"], constants["shared_bytes"]
        with torch.cuda.device(device):
            super().__init__(build.image, name)
            self._check_residence()
        words = -(-constants["exchange_bytes"] // 4)
        self._exchange = torch.zeros(words, dtype=torch.int32, device=device)
        self._status = torch.zeros(8, dtype=torch.int32, device=device)
        self._tag = 1
        self._index = self._exchange.device.index
        self._there = torch.cuda.device(self._exchange.device)  # kept, because creating it costs more than entering it

    def launch(self, params: Params, tags: int, done: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Launches without waiting and returns the event recorded after it; `params` may be changed after the return.
        tags: the most exchanges that the launch can make; tags never wrap within a launch. done: the event of an
        earlier launch, no longer waited for, to be reused; None creates a new one."""
        with self._there:
            if self._tag + tags >= _TAG_LIMIT:
                self._restart_tags()
            params.exchange, params.status = self._exchange.data_ptr(), self._status.data_ptr()
            params.tag, params.timeout_ns = self._tag, _TIMEOUT_NS
            self._tag += tags
            stream = torch.cuda.current_stream(self._index)
            arguments, handle = _Arguments(ctypes.addressof(params)), ctypes.c_void_p(stream.cuda_stream)
            start, blocks, threads = _driver().cuLaunchCooperativeKernel, self.blocks, self.threads
            status = start(self._function, blocks, 1, 1, threads, 1, 1, self.shared_bytes, handle, arguments)
            _check("cuLaunchCooperativeKernel", status)
            done = torch.cuda.Event() if done is None else done
            done.record(stream)
        return done

    def failure(self) -> EngineError:
        """Why the last launch gave up. Clears its incomplete exchanges, so that other streams can continue."""
        _, block, thread, wait, tag = self._status[:5].tolist()
        self._status.zero_()
        self._restart_tags()
        what = f"{WAITS.get(wait, wait)}, exchange {tag}; the stream is over, others can go on"
        return EngineError(f"the kernel stopped: block {block}, thread {thread} waited too long for {what}")

    def _check_residence(self) -> None:
        _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, self.shared_bytes)
        each, occupancy = ctypes.c_int(), "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        _call(occupancy, ctypes.byref(each), self._function, self.threads, ctypes.c_size_t(self.shared_bytes))
        present = each.value * torch.cuda.get_device_properties().multi_processor_count
        if present < self.blocks:
            holds = f"this GPU holds {present}: pass backend='torch'"
            raise BackendUnavailable(f"{self.blocks} blocks must be resident together and {holds}")

    def _restart_tags(self) -> None:
        self._exchange.zero_()
        self._tag = 1


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raises BackendUnavailable if the kernels cannot run: without CUDA, or in a dtype other than bfloat16."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailable(f"the megakernel needs a CUDA device, got {device}: pass backend='torch'")
    if dtype != torch.bfloat16:
        raise BackendUnavailable(f"the megakernel computes in bfloat16, got {dtype}: pass backend='torch'")
