"""The codec decoder on a CUDA device: the CPU's samples, any schedule, and as captured CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import GRAPH_FRAMES, GraphedCodec, codec_for, pieces
from mktts.errors import CodecError
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = 1e-5  # of full scale, fp32
GRAPH_TOLERANCE = 1e-6  # of full scale: a graph holds the kernels of the eager pass of its size


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, CODEBOOK_SIZE, (40, NUM_CODEBOOKS), generator=generator)


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors(), "cuda")


@pytest.fixture(scope="module")
def graphed(codec) -> GraphedCodec:
    return GraphedCodec(codec)


def eager(decoder: CodecDecoder, codes: torch.Tensor, state) -> torch.Tensor:
    """The eager decoder, called with the sizes that graphs have."""
    return torch.cat([decoder.decode(piece, state) for piece in codes.split(list(pieces(len(codes))))])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=GRAPH_TOLERANCE, rtol=0)


def test_every_schedule_gives_the_cpus_samples(tiny, codec, codes):
    expected = CodecDecoder(tiny.codec_config, tiny.codec_tensors()).decode_all(codes)
    torch.testing.assert_close(codec.decode_all(codes).cpu(), expected, atol=TOLERANCE, rtol=0)
    for schedule in ([1] * 40, [1, 1, 2, 4, 8, 8, 16], [40]):
        state = codec.start()
        pcm = torch.cat([codec.decode(piece.cuda(), state) for piece in codes.split(schedule)])
        torch.testing.assert_close(pcm.cpu(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "schedule", [[1] * 40, [2] * 20, [4] * 10, [8] * 5, [1, 1, 2, 4, 8, 8, 16], [3, 7, 15, 15], [40]]
)
def test_graphs_give_the_eager_decoders_samples_and_state(codec, graphed, codes, schedule):
    ours, theirs = graphed.start(), codec.start()
    for t, piece in enumerate(codes.split(schedule)):
        piece = piece.cuda() if t % 2 else piece
        pcm = graphed.decode(piece, ours)
        assert pcm.device.type == "cuda" and pcm.dtype == torch.float32
        assert_same(pcm, eager(codec, piece, theirs))
    assert ours.frames == int(ours.position) == len(codes)
    ours_and_theirs = zip(
        (ours.keys, ours.values, *ours.history), (theirs.keys, theirs.values, *theirs.history), strict=True
    )
    for actual, expected in ours_and_theirs:
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_streams_on_the_same_graphs_and_a_copied_state_do_not_mix(codec, graphed, codes):
    states, references = [graphed.start(), graphed.start()], [codec.start(), codec.start()]
    for t, frames in enumerate((1, 2, 3, 8, 4, 5)):
        if t == 3:
            states.append(states[0].copy())
            references.append(references[0].copy())
        for stream, (state, reference) in enumerate(zip(states, references, strict=True)):
            piece = codes.roll(stream, 1)[t : t + frames]
            assert_same(graphed.decode(piece, state), eager(codec, piece, reference))


def test_no_later_call_changes_samples_of_graphs(graphed, codes):
    state = graphed.start()
    kept = [(pcm, pcm.clone()) for pcm in (graphed.decode(codes[:size], state) for size in (*GRAPH_FRAMES, 15))]
    graphed.decode(codes, state)
    assert all(torch.equal(*pair) for pair in kept)


def test_graphs_follow_the_stream_they_are_called_on(codec, graphed, codes):
    expected = eager(codec, codes, codec.start())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pcm = graphed.decode(codes, graphed.start()).cpu().numpy()
    np.testing.assert_allclose(pcm, expected.cpu().numpy(), atol=GRAPH_TOLERANCE, rtol=0)


def test_graphs_refuse_codes_of_the_device_and_states_of_another(tiny, graphed, codes):
    on_cpu = CodecDecoder(tiny.codec_config, tiny.codec_tensors()).start()
    state = graphed.start()
    with pytest.raises(CodecError, match="control ids"):
        graphed.decode(codes[:1].cuda() + CODEBOOK_SIZE, state)
    with pytest.raises(CodecError, match="another decoder"):
        graphed.decode(codes[:1], on_cpu)
    assert state.frames == int(state.position) == 0


def test_bf16_can_be_captured(tiny, codes):
    graphed = codec_for(tiny.codec_config, tiny.codec_tensors(), "cuda", torch.bfloat16)
    codec = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), "cuda", torch.bfloat16)
    assert isinstance(graphed, GraphedCodec)
    assert_same(graphed.decode(codes, graphed.start()), eager(codec, codes, codec.start()))


def test_samples_reach_the_host_unchanged_and_stay(graphed, codes):
    state = graphed.start()
    expected = graphed.decode(codes[:8], state.copy()).cpu().numpy()
    on_host = graphed.submit(codes[:8], state).result()
    for piece in codes[8:].split(8):  # the same pinned memory again
        graphed.submit(piece, state).result()
    assert on_host.dtype == np.float32 and np.array_equal(on_host, expected)


def test_a_synthesizer_on_cuda_uses_graphs_and_speaks_the_eager_decoders_samples(tiny, codec):
    from mktts.speech.guard import Guard
    from mktts.speech.options import StreamOptions
    from mktts.synth import Synthesizer

    options = StreamOptions(guard=Guard.off())
    with Synthesizer.load(tiny, device="cuda", backend="torch") as synthesizer:
        assert isinstance(synthesizer._models.any().codec, GraphedCodec)
        synthesizer.warm_up()
        speaker = next(iter(tiny.config.speakers))
        with synthesizer.stream("Words.", speaker=speaker, seed=0, max_frames=31, options=options) as stream:
            pcm = np.concatenate([chunk.pcm for chunk in stream])
        expected = codec.decode_all(torch.as_tensor(stream.codes)).cpu().numpy()
    np.testing.assert_allclose(pcm, expected, atol=TOLERANCE, rtol=0)
