"""The codec decoder on a CUDA device: the CPU's samples, any schedule, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from mktts.codec import CodecDecoder
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = 1e-5  # of full scale, fp32


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, CODEBOOK_SIZE, (40, NUM_CODEBOOKS), generator=generator)


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors(), "cuda")


def test_every_schedule_gives_the_cpus_samples(tiny, codec, codes):
    expected = CodecDecoder(tiny.codec_config, tiny.codec_tensors()).decode_all(codes)
    torch.testing.assert_close(codec.decode_all(codes).cpu(), expected, atol=TOLERANCE, rtol=0)
    for schedule in ([1] * 40, [1, 1, 2, 4, 8, 8, 16], [40]):
        state = codec.start()
        pcm = torch.cat([codec.decode(piece.cuda(), state) for piece in codes.split(schedule)])
        torch.testing.assert_close(pcm.cpu(), expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_a_frame_can_be_captured_in_a_cuda_graph(codec, codes):
    expected, state = codec.decode_all(codes), codec.start()
    frame = codes[:1].cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch asks for: warm up apart, and on a state of its own
        codec.advance(frame, codec.start())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pcm = codec.advance(frame, state)
    for t in range(len(codes)):
        frame.copy_(codes[t : t + 1])
        graph.replay()
        wanted = expected[t * SAMPLES_PER_FRAME : (t + 1) * SAMPLES_PER_FRAME]
        torch.testing.assert_close(pcm, wanted, atol=TOLERANCE, rtol=0)
    assert int(state.position) == len(codes)
