"""Random ticks of the batch engine at the tiny shape, each precision of the codec beside each kind of products.

PYTHONPATH=.:tests python tests/batch/strain.py eager|graphs: exits with 0 and says how many frames it made;
cuda/test_sanitized.py has NVIDIA's compute-sanitizer watch it. Recording a graph takes PyTorch's caching allocator;
"eager" runs without it, so that memory that is used behind its end, or after it was given back, is nobody's.
"""

import sys
from functools import partial

import torch
from lane_player import Player, random_segments

from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.cuda.lanes import CudaLanes
from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder, PrimedStates
from mktts.engine.scheduler import TickSettings
from mktts.kernel.triton_kernels import compiling

SETTINGS = TickSettings(((4, 0), (4, 64), (16, 0), (16, 64)), max_lanes=16, max_rows=64, few_lanes=4)
SLOTS, STREAMS, FRAMES = 6, 9, 4
KINDS = (("random:tiny", True, "full"), ("random:tiny-projected", False, "fast"))  # deterministic, precision


def strained(source: str, deterministic: bool, precision: str, graphs: bool) -> int:
    """Frames that were made. Streams come and go, are cancelled, cut, launched ahead, and share prefixes."""
    checkpoint, device = open_checkpoint(source), torch.device("cuda")
    decoder = partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), device)
    codec = CudaCodec(decoder, SLOTS + 1, precision)
    lanes = CudaLanes(
        checkpoint.config, checkpoint.tensors(), device, torch.bfloat16, slots=SLOTS, positions=128, pages=40,
        codec=codec, primed=lambda: PrimedStates(decoder()), settings=SETTINGS, graphs=graphs,
        deterministic=deterministic,
    )  # fmt: skip
    with torch.cuda.stream(lanes._stream), compiling():  # one by one they would take minutes
        for size in sorted(lanes._buckets, reverse=True):
            lanes._buckets[size].run()
    segments = random_segments(checkpoint.config, device, 2 * STREAMS, FRAMES)
    streams = [segments[i : i + 1 + i % 2] for i in range(STREAMS)]
    player = Player(lanes, streams, cancelled={2: 1, 5: 2}, sounds=False)
    player.play()
    torch.cuda.synchronize()
    return sum(len(frames) for of_stream in player.made.values() for frames in of_stream)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    print("made", sum(strained(*kind, graphs=sys.argv[1:] == ["graphs"]) for kind in KINDS), "frames")
