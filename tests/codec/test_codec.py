"""The streaming codec decoder against upstream's own decoder, and against itself under every chunk schedule. What the
graphed codec does around its graphs: on the CPU with eager passes in their place, on a CUDA device with graphs."""

import copy
import gc
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from codec_kernel_stand_ins import STAND_INS
from hypothesis import given, settings
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint.random.make import small_files
from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import expected_codec_tensors
from mktts.codec import graphs as codec_graph
from mktts.codec import packed
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.codec.fused import MAX_FUSED_FRAMES, FusedCodec
from mktts.codec.graphs import GRAPH_FRAMES, GraphedCodec, codec_for, pieces
from mktts.codec.packed import few_rows_tile
from mktts.engine.upstream import import_upstream
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import decode_streamed, random_codes, snr_db
from mktts.model.cuda_graph import Recorded
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, CodecConfig

TOLERANCE = 1e-5  # of full scale, fp32
CODES = random_codes(40, 0)  # more than twice the frames that the attention window of the tiny codec holds
FULL = "random:tiny:custom_voice:full-codec"
LEAST_SNR_DB = 80.0


def upstream_decoder(raw: dict, tensors: dict, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """qwen-tts's own decoder class with the same tensors."""
    import_upstream()
    from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as upstream
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config

    config = Qwen3TTSTokenizerV2Config(**copy.deepcopy(raw)).decoder_config
    with torch.device("meta"):
        decoder = upstream.Qwen3TTSTokenizerV2Decoder._from_config(config)
    decoder.load_state_dict(tensors, assign=True)
    rope = decoder.pre_transformer.rotary_emb  # not in the state dict, so still on the meta device
    rope.inv_freq, _ = rope.rope_init_fn(config, torch.device("cpu"))
    return decoder.to(dtype).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def decoder(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


def test_in_float64_frame_by_frame_is_upstreams_one_pass(tiny, monkeypatch):
    raw = json.loads((tiny.folder / "speech_tokenizer" / "config.json").read_text())
    decoder = upstream_decoder(raw, tiny.codec_tensors(), torch.float64)
    norm = type(decoder.pre_transformer.norm)

    def in_float64(self, x):  # upstream's own rounds to float32 on the way
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(norm, "forward", in_float64)
    expected = decoder(CODES.t()[None])[0, 0].float()
    assert 0.02 < expected.std() < 0.2 and expected.abs().max() < 0.9  # silence and clipping would hide errors
    codec = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), dtype=torch.float64)
    torch.testing.assert_close(decode_streamed(codec, CODES, [1]), expected, atol=1e-9, rtol=1e-6)  # PCM is float32


@settings(max_examples=15, deadline=None)
@given(schedule=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_any_schedule_gives_the_samples_of_one_pass(decoder, schedule):
    whole = decoder.decode_all(CODES)
    torch.testing.assert_close(decode_streamed(decoder, CODES, schedule), whole, atol=TOLERANCE, rtol=0)


def test_samples_are_float32_clamped_to_full_scale_and_alike_for_every_type_of_integers(tiny, decoder):
    tensors = tiny.codec_tensors()
    name = f"decoder.{len(tiny.codec_config.upsample_rates) + 2}.conv.weight"
    loud = CodecDecoder(tiny.codec_config, tensors | {name: 100 * tensors[name]})
    pcm = loud.decode_all(CODES[:10])
    assert pcm.dtype == torch.float32 and (pcm.min(), pcm.max()) == (-1, 1)
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(decoder.decode_all(CODES[:3].to(dtype)), decoder.decode_all(CODES[:3]))


@pytest.mark.parametrize(
    "codes, found",
    [
        *((torch.zeros(shape).long(), f"T >= 1, 16), got {shape}") for shape in ((0, 16), (16,), (2, 15), (1, 2, 16))),
        *((torch.zeros(2, NUM_CODEBOOKS, dtype=dtype), f"got {dtype}") for dtype in (torch.float32, torch.bool)),
        ([[0] * NUM_CODEBOOKS], "got list"),
        *((torch.full((2, NUM_CODEBOOKS), code), f"found {code}..{code}") for code in (-1, CODEBOOK_SIZE)),
        (torch.zeros(2, NUM_CODEBOOKS, dtype=torch.int64, device="meta"), "got meta"),
    ],
)
def test_wrong_codes_are_refused_by_name_and_leave_the_state_alone(decoder, codes, found):
    state = decoder.start()
    with pytest.raises(CodecError, match=re.escape(found)):
        decoder.decode(codes, state)
    assert state.frames == int(state.views[-1]) == 0


def test_full_size_decoder_equals_upstream_and_itself_under_the_default_schedule(tmp_path):
    files = small_files("0.6b", "base", full_codec=True)
    raw = files["speech_tokenizer/config.json"]
    (tmp_path / "speech_tokenizer").mkdir()
    (tmp_path / "speech_tokenizer" / "config.json").write_text(json.dumps(raw))
    layout = {name: spec for name, spec in expected_codec_tensors(raw).items() if name.startswith("decoder.")}
    tensors = {n.removeprefix("decoder."): t for n, t in random_tensors(layout, 0, torch.float32).items()}
    codec, codes = CodecDecoder(CodecConfig.load(tmp_path), tensors), random_codes(20, 0)
    assert codec.start().flat.nbytes == 4 * 1_298_496 + 8  # spec: 5.19 MB of values, and the position
    expected = upstream_decoder(raw, tensors)(codes.t()[None])[0, 0]
    whole = codec.decode_all(codes)
    assert expected.std() > 0.01
    torch.testing.assert_close(decode_streamed(codec, codes, [1, 1, 2, 4, 8]), whole, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)


# ---- the fused pass with plain operators in place of its kernels, and how its products are packed and cut


@pytest.fixture
def fused_on_cpu(tiny, monkeypatch) -> FusedCodec:
    monkeypatch.setattr(packed, "PIECE_VALUES", 16)  # so that histories are moved in several pieces
    return FusedCodec(partial(CodecDecoder, tiny.codec_config, tiny.codec_tensors()), STAND_INS)


def test_every_chunk_size_gives_the_plain_decoders_samples_and_state(decoder, fused_on_cpu):
    ours, theirs = fused_on_cpu.start(), decoder.start()
    for frames in (1, 1, 2, 3, 4, 8, 5, 8, 1):  # past the window
        codes = random_codes(frames, seed=frames)
        expected = decoder.decode(codes, theirs)
        assert snr_db(fused_on_cpu.decode(codes, ours), expected) > 100
        assert ours.frames == theirs.frames == int(ours.views[-1])
        torch.testing.assert_close(*(s.flat.view(torch.float32) for s in (ours, theirs)), atol=1e-4, rtol=0)


def test_a_longer_pass_and_kernels_without_a_gpu_are_refused_by_name_and_there_the_plain_decoder_is_chosen(
    tiny, fused_on_cpu
):
    with pytest.raises(CodecError, match="at most 8 frames, got 9"):
        fused_on_cpu.decode(random_codes(MAX_FUSED_FRAMES + 1, seed=6), fused_on_cpu.start())
    with pytest.raises(BackendUnavailable, match="the fused codec needs"):
        FusedCodec(partial(CodecDecoder, tiny.codec_config, tiny.codec_tensors()))
    chosen = codec_for(tiny.codec_config, tiny.codec_tensors(), "cpu")
    assert isinstance(chosen, CodecDecoder) and chosen.dtype == torch.float32
    with pytest.raises(BackendUnavailable, match="on a CUDA device, this one is on cpu: use CodecDecoder"):
        GraphedCodec(chosen)


@given(
    rows=st.integers(1, 20_000),
    outs=st.integers(1, 400).map(lambda n: 4 * n),
    channels=st.sampled_from([4, 16, 24, 96, 192, 512, 1024]),
    taps=st.sampled_from([1, 2, 3, 7]),
    splittable=st.booleans(),
)
def test_the_parts_of_a_product_cover_its_depth_once(rows, outs, channels, taps, splittable):
    depth = taps * channels
    tile = few_rows_tile(rows, outs, depth, channels, splittable)
    assert tile.part * (tile.parts(depth) - 1) < depth  # no program is idle
    assert tile.part % tile.depth == 0  # a program's last step reaches into no other program's part
    assert splittable or not tile.part
    assert min(tile.rows, tile.outs, tile.depth) >= 16  # what the matrix units take
    assert channels % tile.depth == 0 or tile.depth == 16


# ---- graphs, and the one buffer of a state


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
