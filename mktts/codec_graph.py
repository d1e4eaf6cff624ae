"""The streaming codec decoder as captured CUDA graphs: one launch from the host instead of hundreds a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mktts.codec import CodecDecoder
from mktts.codec_state import CodecState
from mktts.cuda_graph import CAPTURE
from mktts.errors import BackendUnavailable
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, CodecConfig

GRAPH_FRAMES = (1, 2, 4, 8)  # frames of one graph; one of them must be 1


class Captured(NamedTuple):
    """A recorded pass over static tensors: `replay()` fills `pcm` (frames * 1920,) from the codes and the state."""

    replay: Callable[[], None]
    pcm: Tensor


class GraphedCodec:
    """A CodecDecoder on CUDA whose `decode` replays graphs: the same kernels, so the same samples and states.

    The graphs are captured at construction, in under a second, and read and write static tensors: codes, one state,
    PCM. `decode` copies a stream's state there and back (2 x 5.2 MB at full size, microseconds on the device), so any
    number of streams can interleave. One thread and one CUDA stream at a time, as the static tensors are shared.
    """

    def __init__(self, decoder: CodecDecoder) -> None:
        """Wraps `decoder`, which must not change afterwards. Raises BackendUnavailable where it is not on CUDA."""
        self.config = decoder.config
        self.device = decoder.device
        self.dtype = decoder.dtype
        self._decoder = decoder
        self._graphs, self._codes, self._state = capture(decoder)

    def start(self) -> CodecState:
        """As `CodecDecoder.start`; states of the wrapped decoder and of this one are exchangeable."""
        return self._decoder.start()

    @torch.inference_mode()
    def decode(self, codes: Tensor, state: CodecState) -> Tensor:
        """As `CodecDecoder.decode`, errors too. The PCM is the caller's: no later call changes it.

        T frames are decoded in pieces of GRAPH_FRAMES, the largest first.
        """
        codes = self._decoder.checked(codes, state)
        pcm = torch.empty(len(codes) * SAMPLES_PER_FRAME, device=self.device)
        self._state.flat.copy_(state.flat)
        start = 0
        for frames in pieces(len(codes)):
            self._codes[:frames].copy_(codes[start : start + frames])
            graph = self._graphs[frames]
            graph.replay()
            pcm[start * SAMPLES_PER_FRAME :][: len(graph.pcm)].copy_(graph.pcm)
            start += frames
        state.flat.copy_(self._state.flat)
        state.frames += len(codes)
        return pcm

    def decode_all(self, codes: Tensor) -> Tensor:
        """As `CodecDecoder.decode_all`, and by it: one pass over all frames, which no graph has the size of."""
        return self._decoder.decode_all(codes)

    def decode_chunked(self, codes: Tensor, chunk_frames: int = 300, left_context_frames: int = 25) -> Tensor:
        """As `CodecDecoder.decode_chunked`, and by it."""
        return self._decoder.decode_chunked(codes, chunk_frames, left_context_frames)


def codec_for(
    config: CodecConfig,
    tensors: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CodecDecoder | GraphedCodec:
    """The fastest decoder for `device`: with graphs on CUDA. Arguments as for `CodecDecoder`."""
    decoder = CodecDecoder(config, tensors, device, dtype)
    return GraphedCodec(decoder) if decoder.device.type == "cuda" else decoder


def pieces(frames: int) -> Iterator[int]:
    """GRAPH_FRAMES that add up to `frames` (>= 1), the largest first: 15 gives 8, 4, 2, 1."""
    for size in sorted(GRAPH_FRAMES, reverse=True):
        yield from [size] * (frames // size)
        frames %= size


@torch.inference_mode()
def capture(decoder: CodecDecoder) -> tuple[dict[int, Captured], Tensor, CodecState]:
    """One graph for each of GRAPH_FRAMES, the codes (8, 16) whose first rows they read, and the state they advance.

    Raises BackendUnavailable where there is no CUDA device or the decoder is not on one.
    """
    if decoder.device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailable(
            f"CUDA graphs need a decoder on a CUDA device, this one is on {decoder.device}: use CodecDecoder itself"
        )
    graphs: dict[int, Captured] = {}
    with CAPTURE, torch.cuda.device(decoder.device):
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
