"""The batch engine under NVIDIA's compute-sanitizer: no kernel reads or writes what is not its own. `make sanitize`.
PYTHONPATH=.:tests python tests/batch/cuda/test_sanitized.py eager|graphs: random ticks at the tiny shape, with each
precision of the codec and each kind of products; says how many frames it made. Recording a graph takes PyTorch's
caching allocator; "eager" runs without it: memory used behind its end, or after it was given back, is nobody's."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lane_player import Player, random_segments

from mktts.batch.cuda.codec import CudaCodec
from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder, PrimedStates
from mktts.common import python_path
from mktts.engine.scheduler import TickSettings

pytestmark = pytest.mark.gpu
SETTINGS = TickSettings(((4, 0), (4, 64), (16, 0), (16, 64)), max_lanes=16, max_rows=64, few_lanes=4)
SLOTS, STREAMS, FRAMES = 6, 9, 4
KINDS = (("random:tiny", True, "full"), ("random:tiny-projected", False, "fast"))  # deterministic, precision
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
# Calls that PyTorch and Triton make to ask for something, and that may fail, are no errors of a kernel.
WATCHED = [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
NEEDS_IT = pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit")


def strained(source: str, deterministic: bool, precision: str, graphs: bool) -> int:
    """Frames that were made. Streams come and go, are cancelled, cut, launched ahead, and share prefixes."""
    from mktts.batch.cuda.lanes import CudaLanes
    from mktts.kernel.triton_kernels import compiling

    checkpoint, device = open_checkpoint(source), torch.device("cuda")
    decoder = partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), device)
    lanes = CudaLanes(
        checkpoint.config, checkpoint.tensors(), device, torch.bfloat16, slots=SLOTS, positions=128, pages=40,
        codec=CudaCodec(decoder, SLOTS + 1, precision), primed=lambda: PrimedStates(decoder()), settings=SETTINGS,
        graphs=graphs, deterministic=deterministic,
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


@pytest.mark.parametrize("before", [[], pytest.param(WATCHED, marks=NEEDS_IT)], ids=["alone", "sanitizer"])
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_random_ticks_run_to_their_end_and_the_sanitizer_has_nothing_to_say(mode, before):
    path = os.pathsep.join((python_path()["PYTHONPATH"], str(Path(__file__).parents[2])))  # and what tests share
    environment = {**os.environ, "PYTHONPATH": path}
    if before and mode == "eager":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [*before, sys.executable, __file__, mode]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580)
    assert done.returncode == 0 and "made " in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    print("made", sum(strained(*kind, graphs=sys.argv[1:] == ["graphs"]) for kind in KINDS), "frames")
