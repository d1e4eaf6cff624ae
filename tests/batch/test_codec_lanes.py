"""Codecs of many streams: each stream against the plain decoder, and against itself in other company.

On a CPU the pass of the CUDA codec runs with plain operators in place of its kernels.
"""

import random
from functools import partial

import pytest
import torch
from codec_kernel_stand_ins import STAND_INS
from torch import Tensor

from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.plain import CodecLanes
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity.codec import snr_db
from mktts.spec import NUM_CODEBOOKS

LEAST_SNR_DB = {
    ("cuda", "full"): 80.0,
    ("cuda", "fast"): 50.0,
    ("cpu", "full"): 100.0,
    ("cpu", "fast"): 50.0,
    ("cpu", "plain"): 100.0,
}
SLOTS = 300
TINY, FULL_CODEC = "random:tiny", "random:tiny:custom_voice:full-codec"
LANES = 8
END = 2_150  # of speech: no entry of a book


def codecs(cpu: bool) -> list:
    cases = [(name, "cuda", precision) for name in (TINY, FULL_CODEC) for precision in ("full", "fast")]
    here = [(TINY, "cpu", precision) for precision in ("full", "fast", "plain")] + [("small", "cpu", "plain")]
    return [*(here if cpu else []), *(pytest.param(case, marks=pytest.mark.gpu) for case in cases)]


def plain_of(checkpoint: Checkpoint, device: str) -> partial[CodecDecoder]:
    return partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), torch.device(device))


@pytest.fixture(scope="module")
def codec(request) -> CudaCodec | CodecLanes:
    name, device, precision = request.param
    plain = plain_of(open_checkpoint(name), device)
    if precision == "plain":
        made = CodecLanes(plain(), SLOTS)
    else:
        made = CudaCodec(plain, SLOTS, precision, STAND_INS if device == "cpu" else None)
    if device == "cuda":
        made.compile((1, LANES, 64, 256, 512))
        assert not bool(made._states.histories.any()), "nothing has run"
    made.plain, made.least_db, made.nobody = plain, LEAST_SNR_DB[device, precision], SLOTS - 1
    return made


anywhere = pytest.mark.parametrize("codec", codecs(cpu=True), indirect=True, ids="-".join)
on_a_gpu = pytest.mark.parametrize("codec", codecs(cpu=False), indirect=True, ids="-".join)


def codes_of(codec: CudaCodec, streams: int, frames: int, seed: int = 0) -> Tensor:
    shape, generator = (streams, frames, NUM_CODEBOOKS), torch.Generator().manual_seed(seed)
    if isinstance(codec, CodecLanes):
        return torch.randint(0, codec._decoder.config.codebook_size, shape, generator=generator)
    codes = torch.randint(0, codec.config.codebook_size, shape, generator=generator, dtype=torch.int32)
    return codes.to(codec.device)


def int32(codec: CudaCodec, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=codec.device)


def enter(codec: CudaCodec | CodecLanes, slot: int, state: CodecState | None) -> None:
    if isinstance(codec, CodecLanes):
        codec.decode(torch.zeros(0, NUM_CODEBOOKS, dtype=torch.int64), [], [(slot, state)])
    else:
        codec.enter(slot, state)


def decoded(codec: CudaCodec, codes: Tensor, slots: list[int], lanes: int = LANES) -> Tensor:
    """The next frame of `slots`, codes (n, 16), in a pass of `lanes` lanes whose padded ones hold the end of speech."""
    if isinstance(codec, CodecLanes):
        return torch.from_numpy(codec.decode(codes, slots)[0])
    frame = torch.full((lanes, NUM_CODEBOOKS), END, dtype=torch.int32, device=codec.device)
    frame[: len(slots)] = codes
    return codec.decode(frame, int32(codec, slots + [codec.nobody] * (lanes - len(slots))))[: len(slots)]


@anywhere
def test_streams_that_come_and_go_sound_as_alone(codec):
    """Past the attention window, at different positions, in slots that others had before."""
    decoder, chance = codec.plain(), random.Random(0)
    frames = decoder.config.sliding_window + 3
    codes = codes_of(codec, 5, frames)
    waiting, free, slots = list(range(len(codes))), [7, 0, 298], {}
    made: dict[int, list[Tensor]] = {i: [] for i in waiting}
    while waiting or slots:
        while waiting and free:
            slots[waiting[0]] = free.pop()
            enter(codec, slots[waiting.pop(0)], None)
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


@anywhere
@pytest.mark.parametrize("heard", [5, 12, 90])
def test_a_primed_state_goes_on_and_stays_as_it_was(codec, heard):
    decoder, codes = codec.plain(), codes_of(codec, 1, heard + 6, seed=1)[0]
    state = decoder.start()
    decoder.decode(codes[:heard], state)
    kept = state.copy()
    enter(codec, 3, state)
    made = torch.cat([decoded(codec, codes[heard + t][None], [3])[0] for t in range(6)])
    assert torch.equal(state.flat, kept.flat)
    assert snr_db(made.cpu(), decoder.decode(codes[heard:], state).cpu()) > codec.least_db


@on_a_gpu
@pytest.mark.parametrize("lanes", [1, 64, 256, 1024])
def test_neighbours_change_no_bit_of_samples_or_state(codec, lanes):
    """Eight streams alone, eight lanes a pass, against the same ones spread over `lanes` lanes, some of them padded."""
    codes, others = codes_of(codec, 8, 3, seed=2), codes_of(codec, lanes, 3, seed=3)
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
        assert torch.equal(codec.decode(frame, int32(codec, slots))[at], expected[:count]), t
    states = codec._states
    rings = (ring[..., :3, :] for ring in (states.keys, states.values))  # places behind may hold older streams
    for tensor in (states.histories, states.positions, *rings):
        assert torch.equal(tensor[then], tensor[first[:count]])


@on_a_gpu
def test_padded_lanes_stay_finite_and_never_move_on(codec):
    frame = torch.full((LANES, NUM_CODEBOOKS), END, dtype=torch.int32, device=codec.device)
    frame[1] = -1
    for _ in range(5):
        assert codec.decode(frame, int32(codec, [codec.nobody] * LANES)).abs().max() <= 1
    assert int(codec._states.positions[codec.nobody]) == 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="how other libraries order sums is not known")
def test_neighbours_change_no_bit_on_a_cpu(tiny):
    """Alone, and among more than one group of lanes takes."""
    company, single = (CodecLanes(plain_of(tiny, "cpu")(), slots) for slots in (20, 1))
    codes = codes_of(single, 20, 4)
    enter(single, 0, None)
    for slot in range(20):
        enter(company, slot, None)
    for frame in range(4):
        going = list(range(20)) if frame % 2 else [19, 3, 0]
        pcm, alone = decoded(company, codes[going, frame], going), decoded(single, codes[19:, frame], [0])
        assert torch.equal(pcm[going.index(19)], alone[0])


def test_other_codes_lanes_slots_and_states_are_refused(tiny):
    codec = CudaCodec(plain_of(tiny, "cpu"), 4, "full", STAND_INS)
    lanes, codes = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
    for wrong in ((codes.long(), lanes), (codes, lanes.long()), (codes[:1], lanes), (codes[:, :4], lanes)):
        with pytest.raises(CodecError, match="int32"):
            codec.decode(*wrong)
    for slot in (-1, 3, 4):  # the last one is nobody's
        with pytest.raises(CodecError, match="slots are 0 to 2"):
            codec.enter(slot, None)
    with pytest.raises(CodecError, match="another decoder"):
        codec.enter(0, plain_of(open_checkpoint("small"), "cpu")().start())
    with pytest.raises(BackendUnavailable, match="the batched codec needs"):
        CudaCodec(plain_of(tiny, "cpu"), 4, "full")
