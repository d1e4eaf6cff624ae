"""What the graphed codec does around its graphs: on the CPU with eager passes in their place, on a CUDA device with
graphs. And the states' one buffer."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec import graphs as codec_graph
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.fused import FusedCodec
from mktts.codec.graphs import GRAPH_FRAMES, GraphedCodec, codec_for, pieces
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import decode_streamed, random_codes, snr_db
from mktts.model.cuda_graph import Recorded
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS

TOLERANCE = 1e-5  # of full scale, fp32
CODES = random_codes(40, 0)
FULL = "random:tiny:custom_voice:full-codec"
LEAST_SNR_DB = 80.0


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


@pytest.mark.gpu
def test_every_schedule_on_cuda_gives_the_cpus_samples_and_graphs_follow_the_stream_they_are_called_on(tiny):
    decoder = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), "cuda")
    expected = CodecDecoder(tiny.codec_config, tiny.codec_tensors()).decode_all(CODES)
    for schedule in ([1] * 40, [1, 1, 2, 4, 8, 8, 16], [40]):
        pcm = decode_streamed(decoder, CODES.cuda(), schedule)
        torch.testing.assert_close(pcm.cpu(), expected, atol=TOLERANCE, rtol=0)
    expected, graphed = eager(decoder, CODES, decoder.start()), GraphedCodec(decoder)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pcm = graphed.decode(CODES, graphed.start())
    assert_same(decoder, pcm, expected)


# ---- of the fused codec, on a CUDA device, against plain operators in fp32


@pytest.fixture(scope="module", params=["random:tiny", FULL])  # narrow layers, with rests of tiles; the released ones
def checkpoint(request) -> Checkpoint:
    return open_checkpoint(request.param)


@pytest.fixture(scope="module")
def plain(checkpoint) -> CodecDecoder:
    return CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors(), "cuda")


@pytest.fixture(scope="module")
def fused(checkpoint) -> GraphedCodec:
    codec = codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), "cuda")
    assert codec.name == "fused"
    return codec


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 13])
def test_300_frames_are_those_of_fp32(plain, fused, chunk):
    codes = random_codes(300, seed=0)
    ours, theirs = fused.start(), plain.start()
    pcm = np.concatenate([fused.submit(piece, ours).result() for piece in codes.split(chunk)])
    expected = torch.cat([plain.decode(piece, theirs) for piece in codes.split(60)]).cpu()
    assert snr_db(pcm, expected) > LEAST_SNR_DB
    assert ours.frames == int(ours.views[-1]) == 300


@pytest.mark.gpu
def test_states_are_exchangeable_with_those_of_plain_operators(plain, fused):
    codes = random_codes(60, seed=3)
    state = fused.start()
    turns = enumerate(codes.split(4))
    mixed = [(fused if t % 2 else plain).submit(piece, state).result() for t, piece in turns]
    assert snr_db(np.concatenate(mixed), plain.decode_all(codes).cpu()) > LEAST_SNR_DB


@pytest.mark.gpu
def test_the_fused_codec_leaves_no_fp32_weights_on_the_device():
    full = open_checkpoint(FULL)
    codec_for(full.codec_config, full.codec_tensors(), "cuda")  # what a process keeps: handles, compiled kernels
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    _codec = FusedCodec(partial(CodecDecoder, full.codec_config, full.codec_tensors(), "cuda"))
    gc.collect()
    stored = sum(tensor.nbytes for tensor in full.codec_tensors().values())
    assert torch.cuda.memory_allocated() - before < 1.05 * stored


@pytest.mark.gpu
def test_codes_that_are_yet_to_be_written_are_read_behind_the_work_that_writes_them(fused):
    codes = random_codes(3, seed=9)
    there, later = codes.int().cuda(), torch.zeros(3, NUM_CODEBOOKS, dtype=torch.int32, pin_memory=True)
    ours, theirs = fused.start(), fused.start()
    for frame in range(3):
        torch.cuda._sleep(1_000_000_000)  # half a second: longer than a busy host takes to get here
        later[frame].copy_(there[frame], non_blocking=True)
        pending = fused.submit_unmade(later[frame : frame + 1], ours)
        assert not later[frame].any()
        expected = fused.submit(codes[frame : frame + 1], theirs).result()
        assert np.array_equal(pending.result(), expected)
    assert ours.frames == theirs.frames == 3 and torch.equal(ours.flat, theirs.flat)


@pytest.mark.gpu
def test_submitted_work_leaves_the_callers_stream_free(fused):
    """The caller's stream is busy with later work; the result is there all the same."""
    codes, state = random_codes(8, seed=4), fused.start()
    fused.submit(codes, state).result()
    work = fused.submit(codes, state)
    torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second, queued after the call
    done = torch.cuda.current_stream().record_event()
    work.result()
    assert not done.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_process_that_allows_tf32_decodes_without_it(plain, monkeypatch):
    flags, codes = torch.backends.cuda.matmul, random_codes(8, seed=5)
    expected = plain.decode_all(codes)
    monkeypatch.setattr(flags, "fp32_precision", "tf32")
    pcm = GraphedCodec(plain).submit(codes, plain.start()).result()
    assert flags.fp32_precision == "tf32"
    assert snr_db(pcm, expected.cpu()) > 100
