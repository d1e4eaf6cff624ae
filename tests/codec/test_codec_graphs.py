"""What the graphed codec does around its graphs: on the CPU with eager passes in their place, on a CUDA device with
graphs. And the states' one buffer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.codec import graphs as codec_graph
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.graphs import GRAPH_FRAMES, GraphedCodec, codec_for, pieces
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import random_codes
from mktts.model.cuda_graph import Recorded
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS

TOLERANCE = 1e-5  # of full scale, fp32
CODES = random_codes(40, 0)


def eager(decoder: CodecDecoder, codes: torch.Tensor, state: CodecState) -> torch.Tensor:
    """The eager decoder, called with the sizes that graphs have."""
    return torch.cat([decoder.decode(piece, state) for piece in codes.split(list(pieces(len(codes))))]).cpu()


def passes_for_graphs(decoder: CodecDecoder) -> tuple[dict[int, Recorded], torch.Tensor, CodecState]:
    """As `capture`: static tensors, garbage in them, and replays that overwrite them."""
    codes, state = torch.full((max(GRAPH_FRAMES), NUM_CODEBOOKS), 7), decoder.start()

    def captured(frames: int) -> Recorded:
        pcm = decoder.decode(codes[:frames], state)
        return Recorded(lambda: pcm.copy_(decoder.advance(codes[:frames], state)), pcm)

    return {frames: captured(frames) for frames in GRAPH_FRAMES}, codes, state


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def codec(request, tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors(), request.param)


@pytest.fixture(scope="module")
def graphed(codec) -> GraphedCodec:
    with pytest.MonkeyPatch.context() as patch:
        if codec.device.type == "cpu":
            patch.setattr(codec_graph, "capture", passes_for_graphs)
        return GraphedCodec(codec)


def assert_same(codec: CodecDecoder, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Bit by bit on the CPU, where both are the same operators; a graph holds the kernels of an eager pass."""
    tolerance = 0 if codec.device.type == "cpu" else tolerance
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@given(frames=st.integers(1, 200))
def test_pieces_add_up_and_only_the_largest_repeats(frames):
    sizes = list(pieces(frames))
    assert sum(sizes) == frames and set(sizes) <= set(GRAPH_FRAMES)
    assert sizes == sorted(sizes, reverse=True)
    assert all(sizes.count(size) <= 1 for size in GRAPH_FRAMES if size != max(GRAPH_FRAMES))


@pytest.mark.parametrize(
    "schedule", [[1] * 40, [2] * 20, [4] * 10, [8] * 5, [1, 1, 2, 4, 8, 8, 16], [1, 2, 3, 4, 7, 8, 15], [40]]
)
def test_graphs_give_the_eager_decoders_samples_and_state(codec, graphed, schedule):
    ours, theirs = graphed.start(), codec.start()
    for t, piece in enumerate(CODES.split(schedule)):
        pcm = graphed.decode(piece.to(codec.device) if t % 2 else piece, ours)
        assert_same(codec, pcm, eager(codec, piece, theirs))
    assert ours.frames == theirs.frames == int(ours.views[-1]) == len(CODES)
    for actual, expected in zip(ours.views[:-1], theirs.views[:-1], strict=True):
        assert_same(codec, actual, expected, TOLERANCE)


def test_streams_on_the_same_graphs_and_a_copied_state_do_not_mix(codec, graphed):
    states, references = [graphed.start(), graphed.start()], [codec.start(), codec.start()]
    for t, frames in enumerate((1, 2, 3, 8, 4, 5)):
        if t == 3:
            states.append(states[0].copy())
            references.append(references[0].copy())
        for stream, (state, reference) in enumerate(zip(states, references, strict=True)):
            codes = CODES.roll(stream, 1)[t : t + frames]
            assert_same(codec, graphed.decode(codes, state), eager(codec, codes, reference))


def test_results_may_wait_and_stay(codec, graphed):
    for decoder in (graphed,) if codec.device.type == "cuda" else (codec, graphed):
        ours, theirs = decoder.start(), decoder.start()
        pending = [decoder.submit(codes, ours) for codes in CODES.split((1, 2, 9, 28))]
        assert ours.frames == 40
        results = [work.result() for work in pending]
        for codes in CODES.split(8):  # the same pinned memory again
            decoder.submit(codes, ours).result()
        for codes, work, result in zip(CODES.split((1, 2, 9, 28)), pending, results, strict=True):
            assert work.result() is result and result.dtype == np.float32
            assert np.array_equal(result, decoder.submit(codes, theirs).result())


def test_codes_and_states_are_refused_as_by_the_eager_decoder(tiny, codec, graphed):
    other = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), dtype=torch.float64).start()
    state, pair = graphed.start(), random_codes(2, 0)
    wrong = [random_codes(0, 0), pair[0], pair.float(), pair - CODEBOOK_SIZE, [[0]]]
    wrong.append(pair.to(codec.device) + CODEBOOK_SIZE)
    for codes, target in [*((codes, state) for codes in wrong), (random_codes(1, 0), other)]:
        with pytest.raises(CodecError) as ours:
            graphed.submit(codes, target)
        with pytest.raises(CodecError) as theirs:
            codec.submit(codes, target)
        assert str(ours.value) == str(theirs.value)
        assert target.frames == int(target.views[-1]) == 0


def test_without_a_cuda_device_the_plain_decoder_is_chosen_and_graphs_are_refused(tiny):
    decoder = codec_for(tiny.codec_config, tiny.codec_tensors(), "cpu")
    assert isinstance(decoder, CodecDecoder) and decoder.dtype == torch.float32
    with pytest.raises(BackendUnavailable, match="on a CUDA device, this one is on cpu: use CodecDecoder"):
        GraphedCodec(decoder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_states_tensors_fill_one_buffer_without_overlap(tiny, dtype):
    state = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), dtype=dtype).start()
    ends = []
    for tensor in state.views:
        start = tensor.data_ptr() - state.flat.data_ptr()
        assert tensor.untyped_storage().data_ptr() == state.flat.untyped_storage().data_ptr()
        assert tensor.is_contiguous() and start % 32 == 0  # bytes: what copies are multiples of
        assert start >= (ends[-1] if ends else 0)
        ends.append(start + tensor.nbytes)
    assert ends[-1] == len(state.flat)
    assert 0 <= len(state.flat) - sum(tensor.nbytes for tensor in state.views) < 32 * len(ends)


@pytest.fixture(scope="module")
def on_cuda(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors(), "cuda")


@pytest.mark.gpu
def test_every_schedule_gives_the_cpus_samples(tiny, on_cuda):
    expected = CodecDecoder(tiny.codec_config, tiny.codec_tensors()).decode_all(CODES)
    torch.testing.assert_close(on_cuda.decode_all(CODES).cpu(), expected, atol=TOLERANCE, rtol=0)
    for schedule in ([1] * 40, [1, 1, 2, 4, 8, 8, 16], [40]):
        state = on_cuda.start()
        pcm = torch.cat([on_cuda.decode(piece.cuda(), state) for piece in CODES.split(schedule)])
        torch.testing.assert_close(pcm.cpu(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.gpu
def test_graphs_follow_the_stream_they_are_called_on(on_cuda):
    expected, graphed = eager(on_cuda, CODES, on_cuda.start()), GraphedCodec(on_cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pcm = graphed.decode(CODES, graphed.start())
    assert_same(on_cuda, pcm, expected)
