"""The batched codec on a CUDA device: each stream against the plain decoder, and against itself in other company."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from mktts.batch.cuda.codec import CudaCodec
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.measure.parity.codec import snr_db
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
LEAST_SNR_DB = {"full": 80.0, "fast": 50.0}
FULL_CODEC = "random:tiny:custom_voice:full-codec"
LANES = 8
END = 2_150  # of speech: no entry of a book


def plain_of(checkpoint: Checkpoint) -> partial[CodecDecoder]:
    return partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), DEVICE)


@pytest.fixture(scope="module", params=["random:tiny", FULL_CODEC], ids=["tiny", "full-size"])
def plain(request) -> partial[CodecDecoder]:
    return plain_of(open_checkpoint(request.param))


@pytest.fixture(scope="module", params=LEAST_SNR_DB)
def codec(request, plain) -> CudaCodec:
    made = CudaCodec(plain, 300, request.param)
    assert made.name == {"full": "fused", "fast": "fused-fast"}[request.param]
    made.compile((1, LANES, 64, 256, 512))
    made.least_db, made.nobody = LEAST_SNR_DB[request.param], 299
    return made


def codes_of(streams: int, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2_048, (streams, frames, NUM_CODEBOOKS), generator=generator, dtype=torch.int32).to(DEVICE)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decoded(codec: CudaCodec, codes: Tensor, slots: list[int], lanes: int = LANES) -> Tensor:
    """The next frame of `slots`, codes (n, 16), in a pass of `lanes` lanes whose padded ones hold the end of speech."""
    frame = torch.full((lanes, NUM_CODEBOOKS), END, dtype=torch.int32, device=DEVICE)
    frame[: len(slots)] = codes
    return codec.decode(frame, int32(slots + [codec.nobody] * (lanes - len(slots))))[: len(slots)]


def test_streams_that_come_and_go_sound_as_alone(codec, plain):
    """Past the attention window, at different positions, in slots that others had before."""
    decoder, chance = plain(), random.Random(0)
    frames = decoder.config.sliding_window + 3
    codes = codes_of(5, frames)
    waiting, free, slots = list(range(len(codes))), [7, 0, 298], {}
    made: dict[int, list[Tensor]] = {i: [] for i in waiting}
    while waiting or slots:
        while waiting and free:
            slots[waiting[0]] = free.pop()
            codec.enter(slots[waiting.pop(0)], None)
        going = [i for i in slots if chance.random() < 0.7]
        chance.shuffle(going)
        if not going:
            continue
        frame = torch.stack([codes[i, len(made[i])] for i in going])
        for i, pcm in zip(going, decoded(codec, frame, [slots[i] for i in going]), strict=True):
            made[i].append(pcm)
            if len(made[i]) == frames:
                free.append(slots.pop(i))
    for i, pcm in made.items():
        expected = decoder.decode_all(codes[i])
        assert float(expected.abs().max()) > 0.02
        assert snr_db(torch.cat(pcm).cpu(), expected.cpu()) > codec.least_db, i


@pytest.mark.parametrize("heard", [5, 90])
def test_a_primed_state_goes_on_and_stays_as_it_was(codec, plain, heard):
    decoder, codes = plain(), codes_of(1, heard + 6, seed=1)[0]
    state = decoder.start()
    decoder.decode(codes[:heard], state)
    kept = state.copy()
    codec.enter(3, state)
    made = torch.cat([decoded(codec, codes[heard + t][None], [3])[0] for t in range(6)])
    assert torch.equal(state.flat, kept.flat)
    assert snr_db(made.cpu(), decoder.decode(codes[heard:], state).cpu()) > codec.least_db


@pytest.mark.parametrize("lanes", [1, 64, 256, 1024])
def test_neighbours_change_no_bit_of_samples_or_state(codec, plain, lanes):
    """Eight streams alone, eight lanes a pass, against the same ones spread over `lanes` lanes, some of them padded."""
    codes, others = codes_of(8, 3, seed=2), codes_of(lanes, 3, seed=3)
    count, chance = min(lanes, 8), random.Random(lanes)
    first, then = [10 + i for i in range(8)], [280 - 3 * i for i in range(count)]
    for slot in (*first, *then):
        codec.enter(slot, None)
    at = chance.sample(range(lanes), count)
    slots = [codec.nobody] * lanes
    used = iter([slot for slot in range(codec.nobody) if slot not in {*first, *then}])
    for lane in range(0, lanes, 2):
        slots[lane] = next(used, codec.nobody)
    for lane, slot in zip(at, then, strict=True):
        slots[lane] = slot
    for t in range(3):
        expected = decoded(codec, codes[:, t], first)
        frame = others[:, t].clone()
        frame[at] = codes[:count, t]
        assert torch.equal(codec.decode(frame, int32(slots))[at], expected[:count]), t
    states = codec._states
    rings = (ring[..., :3, :] for ring in (states.keys, states.values))  # places behind may hold older streams
    for tensor in (states.histories, states.positions, *rings):
        assert torch.equal(tensor[then], tensor[first[:count]])


def test_a_recorded_pass_gives_the_same_bits(codec):
    codes, lanes = codes_of(LANES, 4, seed=4), int32(list(range(LANES)))
    passes = []
    for recorded in (False, True):
        frame = codes[:, 0].clone()
        codec.decode(frame, lanes)
        graph = torch.cuda.CUDAGraph()
        if recorded:
            with torch.cuda.graph(graph):
                pcm = codec.decode(frame, lanes)
        for slot in range(LANES):
            codec.enter(slot, None)
        made = []
        for t in range(4):
            frame.copy_(codes[:, t])
            if recorded:
                graph.replay()
            else:
                pcm = codec.decode(frame, lanes)
            made.append(pcm.clone())
        passes.append(torch.stack(made))
    assert torch.equal(*passes)
    assert passes[0].shape == (4, LANES, SAMPLES_PER_FRAME) and passes[0].dtype == torch.float32


def test_padded_lanes_stay_finite_and_never_move_on(codec):
    frame = torch.full((LANES, NUM_CODEBOOKS), END, dtype=torch.int32, device=DEVICE)
    frame[1] = -1
    for _ in range(5):
        assert codec.decode(frame, int32([codec.nobody] * LANES)).abs().max() <= 1
    assert int(codec._states.positions[codec.nobody]) == 0


def test_kernels_can_be_compiled_before_the_first_pass(plain):
    codec = CudaCodec(plain, 9, "fast")
    codec.compile([8])
    codec.nobody, codes = 8, codes_of(1, 1, seed=5)[0]
    assert not bool(codec._states.histories.any())
    expected = plain().decode_all(codes).cpu()
    assert snr_db(decoded(codec, codes, [0])[0].cpu(), expected) > LEAST_SNR_DB["fast"]
