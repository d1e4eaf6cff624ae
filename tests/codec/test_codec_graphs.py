"""What the graphed codec does around its graphs, with eager passes in their place; and the states' one buffer.

The graphs themselves need a device: tests/codec/test_codec_cuda.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mktts.codec import graphs as codec_graph
from mktts.codec.decoder import CodecDecoder, CodecState, PendingPcm
from mktts.codec.graphs import GRAPH_FRAMES, GraphedCodec, codec_for, full_products, pieces
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import random_codes
from mktts.model.cuda_graph import Recorded
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS


def tensors(state: CodecState) -> list[torch.Tensor]:
    return [state.keys, state.values, *state.history, state.position]


def eager(decoder: CodecDecoder, codes: torch.Tensor, state: CodecState) -> torch.Tensor:
    """The eager decoder, called with the sizes that graphs have."""
    return torch.cat([decoder.decode(piece, state) for piece in codes.split(list(pieces(len(codes))))])


def passes_for_graphs(decoder: CodecDecoder) -> tuple[dict[int, Recorded], torch.Tensor, CodecState]:
    """As `capture`: static tensors, garbage in them, and replays that overwrite them."""
    codes, state = torch.full((max(GRAPH_FRAMES), NUM_CODEBOOKS), 7), decoder.start()

    def captured(frames: int) -> Recorded:
        pcm = decoder.decode(codes[:frames], state)
        return Recorded(lambda: pcm.copy_(decoder.advance(codes[:frames], state)), pcm)

    return {frames: captured(frames) for frames in GRAPH_FRAMES}, codes, state


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


@pytest.fixture
def graphed(codec, monkeypatch) -> GraphedCodec:
    monkeypatch.setattr(codec_graph, "capture", passes_for_graphs)
    return GraphedCodec(codec)


@given(frames=st.integers(1, 200))
def test_pieces_add_up_and_only_the_largest_repeats(frames):
    sizes = list(pieces(frames))
    assert sum(sizes) == frames and set(sizes) <= set(GRAPH_FRAMES)
    assert sizes == sorted(sizes, reverse=True)
    assert all(sizes.count(size) <= 1 for size in GRAPH_FRAMES if size != max(GRAPH_FRAMES))


def test_every_chunk_length_gives_the_samples_and_the_state_of_the_eager_decoder(codec, graphed):
    ours, theirs = graphed.start(), codec.start()
    for frames in (1, 2, 3, 4, 7, 8, 15, 21):
        codes = random_codes(frames, seed=frames)
        assert torch.equal(graphed.decode(codes, ours), eager(codec, codes, theirs))
        assert ours.frames == theirs.frames == int(ours.position)
    assert all(torch.equal(*pair) for pair in zip(tensors(ours), tensors(theirs), strict=True))


def test_streams_and_a_copied_state_do_not_mix(codec, graphed):
    states, references = [graphed.start(), graphed.start()], [codec.start(), codec.start()]
    for t in range(6):
        if t == 3:
            states.append(states[0].copy())
            references.append(references[0].copy())
        for stream, (state, reference) in enumerate(zip(states, references, strict=True)):
            codes = random_codes(1 + t, seed=10 * t + stream)
            assert torch.equal(graphed.decode(codes, state), eager(codec, codes, reference))


def test_submitted_work_is_decode_on_the_host(codec, graphed):
    for decoder in (codec, graphed):
        ours, theirs = decoder.start(), decoder.start()
        pending = [decoder.submit(random_codes(frames, seed=frames), ours) for frames in (1, 2, 9)]
        assert ours.frames == 12
        for frames, work in zip((1, 2, 9), pending, strict=True):
            expected = decoder.decode(random_codes(frames, seed=frames), theirs)
            assert work.ready() and work.result() is work.result()
            assert work.result().dtype == np.float32 and np.array_equal(work.result(), expected.numpy())


def test_a_late_result_waits_for_its_own_event_only():
    class Event:
        waited = 0

        def query(self):
            return self.waited > 0

        def synchronize(self):
            self.waited += 1

    event = Event()
    pcm = torch.tensor([0.5, -1.0])
    work = PendingPcm(pcm, event)
    assert not work.ready() and event.waited == 0
    samples = work.result()
    pcm.zero_()  # pinned memory that is used again
    assert work.ready() and work.result() is samples and samples.tolist() == [0.5, -1.0]
    assert event.waited == 1


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "match"),
    [
        ("cpu", torch.float32, "fast", "needs a CUDA device"),
        ("cuda", torch.bfloat16, "fast", "and a float32 state, got cuda and torch.bfloat16: use 'full'"),
        ("cpu", torch.float32, "int4", "must be one of"),
    ],
)
def test_a_precision_that_the_device_cannot_run_is_refused(tiny, device, dtype, precision, match):
    with pytest.raises(BackendUnavailable, match=match):
        codec_for(tiny.codec_config, tiny.codec_tensors(), device, dtype, precision)


def test_a_process_that_allows_tf32_is_kept_from_it_inside_only():
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    try:
        flags.fp32_precision = "tf32"
        with full_products():
            assert flags.fp32_precision == "ieee"
        assert flags.fp32_precision == "tf32"
    finally:
        flags.fp32_precision = before


def test_samples_belong_to_the_caller_and_whole_utterances_are_one_pass(codec, graphed):
    state, codes = graphed.start(), random_codes(30, 0)
    first = graphed.decode(codes[:2], state)
    kept = first.clone()
    graphed.decode(random_codes(2, seed=1), state)
    assert torch.equal(first, kept)
    assert torch.equal(graphed.decode_all(codes), codec.decode_all(codes))


def test_codes_and_states_are_refused_as_by_the_eager_decoder(tiny, codec, graphed):
    other = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), dtype=torch.float64).start()
    state = graphed.start()
    pair = random_codes(2, 0)
    wrong = [random_codes(0, 0), pair[0], pair.float(), pair - CODEBOOK_SIZE, [[0]]]
    for codes, target in [*((codes, state) for codes in wrong), (random_codes(1, 0), other)]:
        with pytest.raises(CodecError) as ours:
            graphed.decode(codes, target)
        for refuse in (codec.decode, codec.submit, graphed.submit):
            with pytest.raises(CodecError) as theirs:
                refuse(codes, target)
            assert str(ours.value) == str(theirs.value)
        assert target.frames == int(target.position) == 0


def test_without_a_cuda_device_the_plain_decoder_is_chosen_and_graphs_are_refused(tiny, codec):
    decoder = codec_for(tiny.codec_config, tiny.codec_tensors(), "cpu", torch.bfloat16)
    assert isinstance(decoder, CodecDecoder) and decoder.dtype == torch.bfloat16
    with pytest.raises(BackendUnavailable, match="on a CUDA device, this one is on cpu: use CodecDecoder"):
        GraphedCodec(codec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_states_tensors_fill_one_buffer_without_overlap(tiny, dtype):
    state = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), dtype=dtype).start()
    ends = []
    for tensor in tensors(state):
        start = tensor.data_ptr() - state.flat.data_ptr()
        assert tensor.untyped_storage().data_ptr() == state.flat.untyped_storage().data_ptr()
        assert tensor.is_contiguous() and start % 16 == 0  # bytes: what torch needs for its widest loads
        assert start >= (ends[-1] if ends else 0)
        ends.append(start + tensor.nbytes)
    assert ends[-1] == len(state.flat)
    assert state.bytes == sum(t.nbytes for t in tensors(state)) <= len(state.flat)
    assert state.bytes + 16 * len(ends) > len(state.flat)


def test_a_copied_state_has_a_buffer_of_its_own(codec):
    state = codec.start()
    codec.decode(random_codes(5, 0), state)
    copy = state.copy()
    assert copy.frames == 5 and torch.equal(copy.flat, state.flat)
    before = [t.clone() for t in tensors(copy)]
    codec.decode(random_codes(5, seed=1), state)
    assert copy.frames == 5 and all(torch.equal(*pair) for pair in zip(tensors(copy), before, strict=True))
    assert copy.flat.data_ptr() != state.flat.data_ptr()
    with torch.inference_mode():
        copy.flat.copy_(state.flat)
    assert all(torch.equal(*pair) for pair in zip(tensors(copy), tensors(state), strict=True))
    assert all(t.untyped_storage().data_ptr() == copy.flat.untyped_storage().data_ptr() for t in tensors(copy))
