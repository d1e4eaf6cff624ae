"""Many codec streams in lanes give what the decoder gives each of them frame by frame."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mktts.batch.plain.codec import CodecLanes
from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.errors import CapacityError, CodecError
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

CLOSE = 1e-5


def decoder_of(checkpoint) -> CodecDecoder:
    return CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors())


@pytest.fixture(scope="module")
def decoder(tiny) -> CodecDecoder:
    return decoder_of(tiny)


def codes_of(decoder: CodecDecoder, streams: int, frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = decoder.config.codebook_size
    return torch.randint(0, size, (streams, frames, NUM_CODEBOOKS), generator=generator)


def alone(decoder: CodecDecoder, codes: Tensor) -> Tensor:
    """(T, 16) -> (T, 1920), a frame a call."""
    state = decoder.start()
    return torch.stack([decoder.decode(frame[None], state) for frame in codes])


@pytest.mark.parametrize("name", ["random:tiny", "small"])
def test_streams_that_come_and_go_sound_as_alone(name):
    """Past the attention window, at different positions, in slots that others had before."""
    decoder, chance = decoder_of(open_checkpoint(name)), random.Random(0)
    frames = decoder.config.sliding_window + 3
    codes = codes_of(decoder, 5, frames)
    expected = [alone(decoder, one) for one in codes]
    assert min(float(pcm.abs().max()) for pcm in expected) > 0.02
    lanes, waiting = CodecLanes(decoder, max_slots=3), list(range(len(codes)))
    slots: dict[int, int] = {}
    made: dict[int, list[Tensor]] = {i: [] for i in waiting}
    while waiting or slots:
        while waiting and len(slots) < 3:
            slots[waiting[0]] = lanes.start()
            waiting.pop(0)
        going = [i for i in slots if chance.random() < 0.7]
        chance.shuffle(going)
        if not going:
            continue
        pcm = lanes.decode([slots[i] for i in going], torch.stack([codes[i, len(made[i])] for i in going]))
        assert pcm.shape == (len(going), SAMPLES_PER_FRAME) and pcm.dtype == torch.float32
        for i, frame in zip(going, pcm, strict=True):
            made[i].append(frame)
            if len(made[i]) == (9 if i == 1 else frames):  # one is cancelled
                lanes.free(slots.pop(i))
    assert lanes.open_slots == 0
    for i, pcm in made.items():
        assert (torch.stack(pcm) - expected[i][: len(pcm)]).abs().max() < CLOSE, i


def test_a_primed_state_goes_on_and_stays_as_it_was(decoder):
    codes = codes_of(decoder, 1, 20)[0]
    state = decoder.start()
    decoder.decode(codes[:15], state)
    kept = state.copy()
    lanes = CodecLanes(decoder, 2)
    slots = [lanes.start(state), lanes.start()]
    expected, fresh = alone(decoder, codes), alone(decoder, codes[15:])
    for frame in range(5):
        pcm = lanes.decode(slots, codes[15 + frame].expand(2, -1))
        assert (pcm[0] - expected[15 + frame]).abs().max() < CLOSE
        assert (pcm[1] - fresh[frame]).abs().max() < CLOSE
    assert torch.equal(state.flat, kept.flat)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="how other libraries order sums is not known")
def test_neighbours_change_no_bit(decoder):
    """Alone, and among more than one group of lanes takes."""
    codes = codes_of(decoder, 20, 4)
    company, single = CodecLanes(decoder, 20), CodecLanes(decoder, 1)
    slots, slot = [company.start() for _ in range(20)], single.start()
    for frame in range(4):
        going = list(range(20)) if frame % 2 else [19, 3, 0]
        pcm = company.decode([slots[i] for i in going], codes[going, frame])
        assert torch.equal(pcm[going.index(19)], single.decode([slot], codes[19:, frame])[0])


def test_what_cannot_be_decoded_is_named_and_changes_nothing(decoder):
    codes = codes_of(decoder, 2, 3)
    lanes = CodecLanes(decoder, 2)
    slots = [lanes.start(), lanes.start()]
    with pytest.raises(CapacityError, match="all 2 codec slots"):
        lanes.start()
    for wrong, bad in (
        ([slots[0], 9], codes[:, 0]),
        ([slots[0], slots[0]], codes[:, 0]),
        (slots, codes[:, 0].float()),
        (slots, codes[0, :1]),
        (slots, codes[:, 0] + 2_048),
        ([], codes[:0, 0]),
    ):
        with pytest.raises(CodecError):
            lanes.decode(wrong, bad)
    pcm = lanes.decode(slots, codes[:, 0].to(torch.int32))
    assert (pcm[1] - alone(decoder, codes[1])[0]).abs().max() < CLOSE
    lanes.free(slots[0])
    with pytest.raises(CodecError, match="not open"):
        lanes.decode(slots, codes[:, 1])
    with pytest.raises(CodecError, match="not open"):
        lanes.free(slots[0])


def test_a_state_of_another_decoder_is_refused(decoder):
    other = decoder_of(open_checkpoint("small"))
    with pytest.raises(CodecError, match="another decoder"):
        CodecLanes(decoder, 1).start(other.start())
