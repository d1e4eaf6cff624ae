"""One codec frame of many streams at once on a CUDA device: the rows of all lanes in one product, states by slot. A
lane's samples and state depend on its codes and its state alone, bit for bit: every sum has one order."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mktts.batch.cuda.memory import RingStates
from mktts.batch.cuda.tiles import product_tile
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.fused import FusedLayers, Kernels
from mktts.codec.packed import Packed, Precision, ProductTile
from mktts.errors import CodecError
from mktts.kernel.triton_kernels import compiling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

LANES_AT_A_TIME = 512  # in one pass: with more, only its memory would grow (4.3 GB in full precision at full size)


class CudaCodec(FusedLayers):
    """Codec states by slot, and `decode`, which makes the next frame of many of them. One thread and one CUDA stream at
    a time. "full" precision has split operands everywhere, and fp32 keys and values; "fast" has fp16 operands in the
    waveform blocks, and fp16 keys, values and residual sums."""

    def __init__(
        self, plain: Callable[[], CodecDecoder], slots: int, precision: Precision, kernels: Kernels | None = None
    ) -> None:
        """plain: makes the fp32 decoder on the device, whose weights are packed; it is not kept. slots: with the last
        one, for padded lanes. kernels: as for `FusedLayers`."""
        decoder, fast = plain(), precision == "fast"
        self.name = "fused-fast" if fast else "fused"
        super().__init__(decoder, "the batched codec", kernels, torch.float16, fast)
        properties = torch.cuda.get_device_properties(self.device) if kernels is None else None
        self._shared_bytes = properties.shared_memory_per_block_optin if properties else 0
        cached = torch.float16 if fast else torch.float32
        self._states = RingStates(slots, decoder.layout, self._inputs, cached, self.device)
        self._moves: dict[int, Tensor] = {}

    @torch.inference_mode()
    def enter(self, slot: int, primed: CodecState | None) -> None:
        """`slot` begins with silence, or with a copy of `primed`, a state of the plain or the fused decoder, made on
        the current CUDA stream. Raises CodecError for a slot that does not exist or is for padding, and for a state of
        another decoder."""
        self._states.enter(slot, primed)

    @torch.inference_mode()
    def silence(self, slots: Tensor) -> None:
        """Sets many slots (n,) int64, on the device, to silence, as `enter` with None does for one."""
        self._states.silence(slots)

    @torch.inference_mode()
    def compile(self, counts: Iterable[int]) -> None:
        """Compiles the kernels of `decode` for these numbers of lanes, in parallel, and allocates its working memory.
        Runs nothing."""
        with compiling():
            for count in sorted(counts, reverse=True):
                nobody = torch.full((count,), self._states.nobody, dtype=torch.int32, device=self.device)
                self.decode(nobody.new_zeros(count, NUM_CODEBOOKS), nobody)

    @torch.inference_mode()
    def decode(self, codes: Tensor, lanes: Tensor) -> Tensor:
        """The next frame of each lane's slot: codes (B, 16) int32, lanes (B,) int32, the slots -> PCM (B, 1920) float32
        in [-1, 1], all on the device. Codes that are not in their codebook (end of speech) give meaningless sound.

        Only queues kernels, so that a CUDA graph can hold it, once it has decoded the same number of lanes. Raises
        CodecError for other shapes and dtypes."""
        if codes.shape != (len(lanes), NUM_CODEBOOKS) or {codes.dtype, lanes.dtype} != {torch.int32}:
            raise CodecError(
                f"codes must be (lanes, {NUM_CODEBOOKS}) int32 and lanes (lanes,) int32, got {tuple(codes.shape)} "
                f"{codes.dtype} and {tuple(lanes.shape)} {lanes.dtype}"
            )
        codes, lanes = codes.contiguous(), lanes.contiguous()
        pcm = torch.empty(len(lanes), SAMPLES_PER_FRAME, device=self.device)
        for start in range(0, len(lanes), LANES_AT_A_TIME):
            some = slice(start, start + LANES_AT_A_TIME)
            count = len(lanes[some])
            if count not in self._moves:
                self._moves[count] = self._states.moves(count)
            memory, inputs = self._work.inputs(count, self._inputs)
            self._pass(codes[some], pcm[some], lanes[some], self._states, memory, inputs, self._moves[count])
        return pcm

    def _tile(self, rows: int, weight: Packed, normed: bool) -> ProductTile:
        return product_tile(rows, *weight.high.shape, weight.channels, weight.low is not None, self._shared_bytes)
