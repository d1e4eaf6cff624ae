"""The streaming codec decoder against upstream's own decoder, and against itself under every chunk schedule."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from codec_kernel_stand_ins import STAND_INS
from hypothesis import given, settings
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint
from mktts.checkpoint.random.make import small_files
from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import expected_codec_tensors
from mktts.codec import packed
from mktts.codec.decoder import CodecDecoder
from mktts.codec.fused import MAX_FUSED_FRAMES, FusedCodec
from mktts.codec.packed import few_rows_tile
from mktts.engine.upstream import import_upstream
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import decode_streamed, random_codes, snr_db
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, CodecConfig

TOLERANCE = 1e-5  # of full scale, fp32


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
    return decoder.to(dtype).eval()


@torch.inference_mode()
def upstream_pcm(decoder: torch.nn.Module, codes: torch.Tensor) -> torch.Tensor:
    return decoder(codes.t()[None])[0, 0]


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


@pytest.fixture(scope="module")
def codes(tiny) -> torch.Tensor:
    """More frames than the attention window holds."""
    return random_codes(2 * tiny.codec_config.sliding_window + 9, 0)


def test_in_float64_frame_by_frame_is_upstreams_one_pass(tiny, codes, monkeypatch):
    raw = json.loads((tiny.folder / "speech_tokenizer" / "config.json").read_text())
    decoder = upstream_decoder(raw, tiny.codec_tensors(), torch.float64)
    norm = type(decoder.pre_transformer.norm)

    def in_float64(self, x):  # upstream's own rounds to float32 on the way
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(norm, "forward", in_float64)
    expected = upstream_pcm(decoder, codes).float()
    assert 0.02 < expected.std() < 0.2 and expected.abs().max() < 0.9  # silence and clipping would hide errors
    codec = CodecDecoder(tiny.codec_config, tiny.codec_tensors(), dtype=torch.float64)
    torch.testing.assert_close(decode_streamed(codec, codes, [1]), expected, atol=1e-9, rtol=1e-6)  # PCM is float32


@settings(max_examples=15, deadline=None)
@given(schedule=st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_any_schedule_gives_the_samples_of_one_pass(codec, codes, schedule):
    whole = codec.decode_all(codes)
    torch.testing.assert_close(decode_streamed(codec, codes, schedule), whole, atol=TOLERANCE, rtol=0)


def test_samples_are_float32_clamped_to_full_scale_and_alike_for_every_type_of_integers(tiny, codec, codes):
    tensors = tiny.codec_tensors()
    name = f"decoder.{len(tiny.codec_config.upsample_rates) + 2}.conv.weight"
    loud = CodecDecoder(tiny.codec_config, tensors | {name: 100 * tensors[name]})
    pcm = loud.decode_all(codes[:10])
    assert pcm.dtype == torch.float32 and (pcm.min(), pcm.max()) == (-1, 1)
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(codec.decode_all(codes[:3].to(dtype)), codec.decode_all(codes[:3]))


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
def test_wrong_codes_are_refused_by_name_and_leave_the_state_alone(codec, codes, found):
    state = codec.start()
    with pytest.raises(CodecError, match=re.escape(found)):
        codec.decode(codes, state)
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
    expected = upstream_pcm(upstream_decoder(raw, tensors), codes)
    whole = codec.decode_all(codes)
    assert expected.std() > 0.01
    torch.testing.assert_close(decode_streamed(codec, codes, [1, 1, 2, 4, 8]), whole, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)


# ---- the fused pass with plain operators in place of its kernels, and how its products are packed and cut


@pytest.fixture(scope="module")
def fused(tiny) -> Iterator[FusedCodec]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "PIECE_VALUES", 16)  # so that histories are moved in several pieces
        yield FusedCodec(plain(tiny), STAND_INS)


def plain(checkpoint: Checkpoint) -> Callable[[], CodecDecoder]:
    return partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors())


def test_every_chunk_size_gives_the_plain_decoders_samples_and_state(codec, fused):
    ours, theirs = fused.start(), codec.start()
    for frames in (1, 1, 2, 3, 4, 8, 5, 8, 1):  # past the window
        codes = random_codes(frames, seed=frames)
        expected = codec.decode(codes, theirs)
        assert snr_db(fused.decode(codes, ours), expected) > 100
        assert ours.frames == theirs.frames == int(ours.views[-1])
        torch.testing.assert_close(*(s.flat.view(torch.float32) for s in (ours, theirs)), atol=1e-4, rtol=0)


def test_a_longer_pass_and_the_kernels_without_a_gpu_are_refused_by_name(tiny, fused):
    with pytest.raises(CodecError, match="at most 8 frames, got 9"):
        fused.decode(random_codes(MAX_FUSED_FRAMES + 1, seed=6), fused.start())
    with pytest.raises(BackendUnavailable, match="the fused codec needs"):
        FusedCodec(plain(tiny))


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
