"""The batched frame's error to fp32 is no larger than bf16 PyTorch's, in ticks of many streams, on a CUDA device."""

from typing import Any

import pytest
import torch
from lane_player import CountingCodec, Player, exact_buckets, pages_for
from torch import Tensor

from mktts.checkpoint import open_checkpoint
from mktts.measure.parity.kernel import Observed, forced_frames, oracles_of, random_streams
from mktts.spec import NUM_CODEBOOKS

pytestmark = pytest.mark.gpu
SIZES, CONTEXTS, FRAMES, COMPARED = (8, 64), (16, 63, 700), 5, 2  # COMPARED: of each context
DEVICE = torch.device("cuda")


class FrameInside:
    """What the newest tick of lanes did inside: methods of their frames are wrapped from outside."""

    def __init__(self, lanes: Any) -> None:
        from mktts.kernel.triton_kernels import compiling

        self._logits: list[Tensor] = [torch.empty(0)] * NUM_CODEBOOKS  # (lanes, vocabulary) each
        self._hidden: list[Tensor] = [torch.empty(0)] * lanes.config.talker.num_hidden_layers  # (lanes, H) each
        frames = [lanes._buckets[size] for size in sorted(lanes._buckets, reverse=True)]
        with torch.cuda.stream(lanes._stream), compiling():  # one by one they would take minutes
            for frame in frames:
                frame.run()
        for frame in frames:
            self._watch(frame)

    def _watch(self, frame: Any) -> None:
        draw, layer = frame._draw, frame._layer

        def watched_draw(logits: Tensor, book: int) -> None:
            self._logits[book] = logits.to(torch.float32, copy=True)
            draw(logits, book)

        def watched_layer(stack: Any, index: int, x: Tensor, *more: Any) -> None:
            layer(stack, index, x, *more)
            if stack is frame._weights.talker:
                self._hidden[index] = x[: frame.lane_count].to(torch.float32, copy=True)

        frame._draw, frame._layer = watched_draw, watched_layer

    def observed(self, lane: int, codes: Tensor, first: bool) -> Observed:
        """first: its frame came from the prompt, so it has no hidden states of its own."""
        hidden = None if first else torch.stack([of_layer[lane] for of_layer in self._hidden])
        return Observed(codes, [of_head[lane].clone() for of_head in self._logits], hidden)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny-projected"])
def test_errors_are_those_of_bf16_with_and_without_one_order_of_sums(source, deterministic):
    from mktts.batch.cuda.lanes import CudaLanes

    checkpoint = open_checkpoint(source)
    oracles = oracles_of(checkpoint, "cuda")
    compared = [one for rows in CONTEXTS for one in random_streams(oracles[1], rows, COMPARED, FRAMES)]
    others = random_streams(oracles[1], 2, max(SIZES) - len(compared), FRAMES)
    lanes = CudaLanes(
        checkpoint.config, checkpoint.tensors(), DEVICE, torch.bfloat16, slots=max(SIZES),
        positions=max(one.positions for one in compared), pages=pages_for([*others, *compared]),
        settings=exact_buckets(SIZES), graphs=False, deterministic=deterministic,
        codec=CountingCodec(max(SIZES) + 1, DEVICE),
    )  # fmt: skip
    inside, loads = FrameInside(lanes), {}
    for size in SIZES:
        streams = [*others[: size - len(compared)], *compared]
        first, seen = size - len(compared), {number: [] for number in range(size)}

        def watch(lane: int, number: int, frame: int, codes: Tensor, first=first, seen=seen) -> None:
            if number >= first:
                seen[number].append(inside.observed(lane, codes, frame == 0))

        one_each = [[stream] for stream in streams]
        Player(lanes, one_each, sounds=False, seed=size, size=size, plain=True, each=watch).play()
        loads[size] = [(streams[number], seen[number]) for number in range(first, size)]
    found = forced_frames(loads, oracles)
    assert found["forced"]["passed"] and found["divergence"]["passed"], found
