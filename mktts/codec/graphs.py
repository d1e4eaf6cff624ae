"""The streaming codec decoder as captured CUDA graphs: one launch from the host for a chunk instead of hundreds."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from mktts.codec.decoder import CodecDecoder, CodecState, PendingPcm, StreamingCodec
from mktts.common import announced
from mktts.errors import BackendUnavailable
from mktts.model.cuda_graph import Recorded, record
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, CodecConfig

GRAPH_FRAMES = (1, 2, 4, 8)  # frames per graph; must include 1


class GraphedCodec:
    """A decoder on CUDA whose `submit` replays graphs of another decoder's kernels, with the same samples and states.

    A call copies its stream's state to the graphs' state and back (2 x 5.2 MB at full size, microseconds), so any
    number of streams can interleave. All work runs on the decoder's own CUDA stream, after the work queued on the
    caller's stream at the time of the call. One thread at a time."""

    def __init__(self, decoder: StreamingCodec) -> None:
        """Wraps `decoder`, which must not change afterwards. Raises BackendUnavailable if it is not on CUDA."""
        self.name, self.config, self.device = decoder.name, decoder.config, decoder.device
        self._decoder = decoder
        with announced("mktts: loading the codec's kernels (a new one is compiled, once)"):
            self._graphs, self._codes, self._state = capture(decoder)
        # Used by this decoder only. Tests replace the graphs by eager passes on the CPU, which has no CUDA streams.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def start(self) -> CodecState:
        """As `StreamingCodec.start`; the wrapped decoder and this one can exchange states."""
        return self._decoder.start()

    @torch.inference_mode()
    def submit(self, codes: Tensor, state: CodecState) -> PendingPcm:
        """As `StreamingCodec.submit`, with the same errors, in pieces of GRAPH_FRAMES, without waiting. The work runs
        concurrently with later work of the caller's stream: to overlap it with the next frame, submit it before
        launching that frame. Until the result is available, pass `state` and `codes` to this decoder only."""
        self._decoder.check(codes, state)
        with self._after_caller(state.flat, codes):
            if self._stream is not None and not codes.is_cuda:  # pinned, so that the copy is asynchronous
                codes = torch.empty(codes.shape, dtype=torch.int64, pin_memory=True).copy_(codes)
            return self._pending(codes, state)

    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """As `submit`, but waits for the result: PCM (T * 1920,) float32 on the host."""
        return torch.from_numpy(self.submit(codes, state).result())

    @torch.inference_mode()
    def submit_unmade(self, codes: Tensor, state: CodecState) -> PendingPcm:
        """As `submit`, for `codes` (T, 16) int32 in pinned memory that work already queued on the caller's stream will
        write. They are read after that work, must stay valid until the result is available, and are not checked."""
        with self._after_caller(state.flat):
            return self._pending(codes.to(self.device, non_blocking=True), state)

    @contextmanager
    def _after_caller(self, *used: Tensor) -> Iterator[None]:
        """Queues the enclosed work after that of the caller's stream. used: tensors that the work reads or writes."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in used:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # if the caller frees it, its memory is kept until the work is done
        with torch.cuda.stream(self._stream):
            yield

    def _pending(self, codes: Tensor, state: CodecState) -> PendingPcm:
        """Queues the whole work; the PCM goes to pinned memory, which torch caches, so only the first use is slow."""
        on_device = self._stream is not None
        pcm = torch.empty(len(codes) * SAMPLES_PER_FRAME, dtype=torch.float32, pin_memory=on_device)
        self._state.flat.copy_(state.flat)
        start = 0
        for frames in pieces(len(codes)):
            self._codes[:frames].copy_(codes[start : start + frames], non_blocking=True)
            graph = self._graphs[frames]
            graph.replay()
            pcm[start * SAMPLES_PER_FRAME :][: len(graph.result)].copy_(graph.result, non_blocking=True)
            start += frames
        state.flat.copy_(self._state.flat)
        state.frames += len(codes)
        return PendingPcm(pcm, self._stream.record_event() if on_device else None)


def codec_for(
    config: CodecConfig, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> CodecDecoder | GraphedCodec:
    """Returns the fastest decoder for `device`, in fp32: on CUDA, graphs of fused kernels, or of PyTorch operators if
    those cannot run. Arguments as for `CodecDecoder`."""
    plain = partial(CodecDecoder, config, tensors, device)
    if torch.device(device).type != "cuda":
        return plain()
    from mktts.codec.fused import FusedCodec

    try:
        return GraphedCodec(FusedCodec(plain))
    except BackendUnavailable as reason:  # triton is missing or cannot compile
        logging.getLogger(__name__).warning("the codec takes plain operators: %s", reason)
    return GraphedCodec(plain())


def pieces(frames: int) -> Iterator[int]:
    """Splits `frames` (>= 1) into sizes from GRAPH_FRAMES, largest first: 15 gives 8, 4, 2, 1."""
    for size in sorted(GRAPH_FRAMES, reverse=True):
        yield from [size] * (frames // size)
        frames %= size


@torch.inference_mode()
def capture(decoder: StreamingCodec) -> tuple[dict[int, Recorded[Tensor]], Tensor, CodecState]:
    """Records a graph for each of GRAPH_FRAMES. Returns them (results: PCM (frames * 1920,)), the codes (8, 16) whose
    first rows they read, and the state they advance. Raises BackendUnavailable unless `decoder` is on a CUDA device."""
    if decoder.device.type != "cuda" or not torch.cuda.is_available():
        here = f"this one is on {decoder.device}: use CodecDecoder itself"
        raise BackendUnavailable(f"CUDA graphs need a decoder on a CUDA device, {here}")
    graphs: dict[int, Recorded[Tensor]] = {}
    with torch.cuda.device(decoder.device), full_products():
        decoder.compile(GRAPH_FRAMES)
        codes = torch.zeros(max(GRAPH_FRAMES), NUM_CODEBOOKS, dtype=torch.int64, device=decoder.device)
        state, side = decoder.start(), torch.cuda.Stream()
        # The graphs share one memory pool: they never run concurrently, and PCM is copied out before the next replay.
        # The largest is recorded first, so that the others fit into its memory.
        pool = torch.cuda.graph_pool_handle()
        for frames in sorted(GRAPH_FRAMES, reverse=True):
            graphs[frames] = record(partial(decoder.advance, codes[:frames], state), pool, side)
        torch.cuda.synchronize()
    return graphs, codes, state


@contextmanager
def full_products() -> Iterator[None]:
    """Keeps cuBLAS from using tf32. The flag is global, but recorded kernels keep its value at capture."""
    flags = torch.backends.cuda.matmul
    before, flags.fp32_precision = flags.fp32_precision, "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before
