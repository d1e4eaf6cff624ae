"""The streaming codec decoder as captured CUDA graphs: one launch from the host instead of hundreds a chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder
from mktts.codec.pending import Lane, Pending
from mktts.codec.state import CodecState
from mktts.common import announced
from mktts.errors import BackendUnavailable
from mktts.model.cuda_graph import captures
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, CodecConfig

GRAPH_FRAMES = (1, 2, 4, 8)  # frames of one graph; one of them must be 1

# How the graphs compute. Their states are fp32, and exchangeable.
#   fp32       plain operators, fp32
#   tf32       plain operators, products on tf32 matrix units
#   fused      fused kernels, products of operands split in two fp16 numbers: nearly fp32
#   fused-fp16 fused kernels, products of the waveform blocks on plain fp16
Variant = Literal["fp32", "tf32", "fused", "fused-fp16"]
CUDA_VARIANT: Variant = "fused"  # what `codec_for` uses on CUDA
# Signal-to-noise ratio to the fp32 decode of at least 300 frames, full size, random weights, H200; None: not measured.
SNR_DB: dict[Variant, float | None] = {"fp32": float("inf"), "tf32": 52.0, "fused": 88.0, "fused-fp16": 57.0}


class Captured(NamedTuple):
    """A recorded pass over static tensors: `replay()` fills `pcm` (frames * 1920,) from the codes and the state."""

    replay: Callable[[], None]
    pcm: Tensor


class GraphedCodec:
    """A CodecDecoder on CUDA whose `decode` replays graphs: the same kernels, so the same samples and states.

    The graphs are captured at construction, and read and write static tensors: codes, one state, PCM. A call copies
    its stream's state there and back (2 x 5.2 MB at full size, microseconds on the device), so any number of streams
    can interleave. All work runs on a CUDA stream of the decoder's own, after the work that the caller's stream held
    at the call. One thread at a time, as the static tensors are shared.
    """

    def __init__(self, decoder: CodecDecoder, tf32: bool = False) -> None:
        """Wraps `decoder`, which must not change afterwards. Raises BackendUnavailable where it is not on CUDA.

        `tf32`: the plain products of the graphs, fp32 otherwise, run on tf32 matrix units.
        """
        self.config = decoder.config
        self.device = decoder.device
        self.dtype = decoder.dtype
        self._decoder = decoder
        with announced("mktts: compiling the codec's kernels, once"):
            self._graphs, self._codes, self._state = capture(decoder, tf32)
        self._lane = Lane(decoder.device)

    def start(self) -> CodecState:
        """As `CodecDecoder.start`; states of the wrapped decoder and of this one are exchangeable."""
        return self._decoder.start()

    @torch.inference_mode()
    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """As `CodecDecoder.decode`, errors too. The PCM is the caller's: no later call changes it.

        T frames are decoded in pieces of GRAPH_FRAMES, the largest first.
        """
        self._decoder.check(codes, state)
        pcm = torch.empty(len(codes) * SAMPLES_PER_FRAME, device=self.device)
        with self._lane.after_caller(state.flat, codes, pcm):
            self._replay(codes, state, pcm)
        self._lane.caller_waits()
        return pcm

    @torch.inference_mode()
    def submit(self, codes: Tensor, state: CodecState) -> Pending:
        """`decode` to the host, without waiting: `result()` of what is returned is the PCM (T * 1920,) float32.

        The work runs behind what the caller's stream holds now, beside what it is given later: to overlap with the
        next frame, submit before launching that. Until the result is there, `state` and `codes` on the device may be
        passed to this decoder only, which keeps its calls in order.
        """
        self._decoder.check(codes, state)
        pcm = self._lane.host_memory(len(codes) * SAMPLES_PER_FRAME)
        with self._lane.after_caller(state.flat, codes):
            self._replay(codes, state, pcm)
            return self._lane.pending(pcm)

    def _replay(self, codes: Tensor, state: CodecState, pcm: Tensor) -> None:
        """Queues the whole work: `codes` of host or device -> `pcm` (T * 1920,), on the device or pinned."""
        codes = self._lane.staged(codes)
        self._state.flat.copy_(state.flat)
        start = 0
        for frames in pieces(len(codes)):
            self._codes[:frames].copy_(codes[start : start + frames], non_blocking=True)
            graph = self._graphs[frames]
            graph.replay()
            pcm[start * SAMPLES_PER_FRAME :][: len(graph.pcm)].copy_(graph.pcm, non_blocking=True)
            start += frames
        state.flat.copy_(self._state.flat)
        state.frames += len(codes)

    def decode_all(self, codes: Tensor) -> Tensor:
        """As `CodecDecoder.decode_all`, and by it: one pass over all frames, which no graph has the size of."""
        return self._decoder.decode_all(codes)


def codec_for(
    config: CodecConfig,
    tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: Variant | None = None,
) -> CodecDecoder | GraphedCodec:
    """The fastest decoder for `device`: with graphs on CUDA. Other arguments as for `CodecDecoder`.

    `variant`: how graphs compute; None means CUDA_VARIANT where that can run, else "fp32" ("fp32" means plain
    operators of `dtype`). Raises BackendUnavailable for a variant that this device, dtype or machine cannot run.
    """
    cuda = torch.device(device).type == "cuda"
    if variant not in (None, *get_args(Variant)):
        raise BackendUnavailable(f"codec variant must be one of {get_args(Variant)}, got {variant!r}")
    if variant not in (None, "fp32") and (not cuda or dtype != torch.float32):
        raise BackendUnavailable(
            f"codec variant {variant!r} needs a CUDA device and a float32 state, got {device} and {dtype}: use 'fp32'"
        )
    chosen = variant or (CUDA_VARIANT if dtype == torch.float32 else "fp32")
    if cuda and chosen.startswith("fused"):
        from mktts.codec.fused import FusedCodec

        try:
            return GraphedCodec(FusedCodec(config, tensors, device, half=chosen == "fused-fp16"))
        except BackendUnavailable as reason:  # no triton here
            if variant is not None:
                raise
            logging.getLogger(__name__).warning("the codec takes plain operators: %s", reason)
            chosen = "fp32"
    decoder = CodecDecoder(config, tensors, device, dtype)
    return GraphedCodec(decoder, tf32=chosen == "tf32") if cuda else decoder


def pieces(frames: int) -> Iterator[int]:
    """GRAPH_FRAMES that add up to `frames` (>= 1), the largest first: 15 gives 8, 4, 2, 1."""
    for size in sorted(GRAPH_FRAMES, reverse=True):
        yield from [size] * (frames // size)
        frames %= size


@torch.inference_mode()
def capture(decoder: CodecDecoder, tf32: bool = False) -> tuple[dict[int, Captured], Tensor, CodecState]:
    """One graph for each of GRAPH_FRAMES, the codes (8, 16) whose first rows they read, and the state they advance.

    Raises BackendUnavailable where there is no CUDA device or the decoder is not on one.
    """
    if decoder.device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailable(
            f"CUDA graphs need a decoder on a CUDA device, this one is on {decoder.device}: use CodecDecoder itself"
        )
    graphs: dict[int, Captured] = {}
    with captures(), torch.cuda.device(decoder.device), matrix_units(tf32):
        codes = torch.zeros(max(GRAPH_FRAMES), NUM_CODEBOOKS, dtype=torch.int64, device=decoder.device)
        state = decoder.start()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The graphs share one pool of working memory: they never run at the same time, and PCM is copied out before
        # the next replay. The largest goes first, so that the others fit into what it took.
        pool = torch.cuda.graph_pool_handle()
        for frames in sorted(GRAPH_FRAMES, reverse=True):
            with torch.cuda.stream(side):  # what must not happen inside a capture: handles, workspaces, module loading
                decoder.advance(codes[:frames], state)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may go on using the device, for instance another synthesizer's worker.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                pcm = decoder.advance(codes[:frames], state)
            graphs[frames] = Captured(graph.replay, pcm)
        torch.cuda.synchronize()
    return graphs, codes, state


@contextmanager
def matrix_units(tf32: bool) -> Iterator[None]:
    """Lets cuBLAS use tf32, or not. The flag is the process's, but recorded kernels keep what it was at capture."""
    flags = torch.backends.cuda.matmul
    before, flags.fp32_precision = flags.fp32_precision, "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before


@torch.inference_mode()
def to_host(pcm: Tensor) -> np.ndarray:
    """`pcm` (S,) of any device as float32 on the host, in memory of its own.

    From CUDA it goes through pinned memory and waits for this one copy: not for work queued later, and without the
    driver's own staging of pageable memory.
    """
    if pcm.device.type != "cuda":
        return pcm.float().cpu().numpy()
    pinned = torch.empty(pcm.shape, dtype=torch.float32, pin_memory=True)  # torch keeps these: cheap after the first
    with torch.cuda.device(pcm.device):
        pinned.copy_(pcm.float(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
    return pinned.numpy().copy()  # a chunk may be kept for long: pinned memory should go back
