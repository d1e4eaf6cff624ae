"""Lanes of PyTorch operators: the oracle's codes whatever joins, skips, leaves and sits beside a stream, in one thread
and in two. Then the talker by itself, and codecs of many streams: each stream against the plain decoder, and against
itself in other company. On a CPU the pass of the CUDA codec runs with plain operators in place of its kernels."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from codec_kernel_stand_ins import STAND_INS
from lane_player import Player, differences, random_segments
from torch import Tensor

from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.plain import CodecLanes, FoldedStack, TorchLanes
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec.decoder import CodecDecoder, CodecState
from mktts.engine.lanes import Made
from mktts.engine.scheduler import Piece, Tick
from mktts.engine.stream import Segment
from mktts.errors import BackendUnavailable, CodecError, PromptError
from mktts.measure.parity.codec import snr_db
from mktts.measure.parity.kernel import RowStream
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.qwen3 import CHUNK_POSITIONS
from mktts.model.sampling import ChoiceRows, Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME

CPU = torch.device("cpu")


class Noted(TorchLanes):
    """Notes what every tick made."""

    def collect(self, launched) -> Made:
        made = super().collect(launched)
        self.all_made = [*getattr(self, "all_made", []), made]
        return made


def lanes_of(checkpoint: Checkpoint, threads: bool, dtype: torch.dtype = torch.float32) -> Noted:
    decoder = CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors())
    return Noted(checkpoint.config, checkpoint.tensors(), decoder, 9, 200, 1 << 28, dtype, threads=threads)


def played(
    opened: Checkpoint, threads: bool = False, dtype: torch.dtype = torch.float32, count: int = 24, **changes: object
) -> Player:
    """Streams that joined, skipped ticks, ended, were cancelled and had slots of others, with the oracle's codes."""
    table = opened.tensors()["talker.model.codec_embedding.weight"].float()
    segments = random_segments(opened.config, "cpu", count, 9, longest=20, ends_after=table)
    segments = [replace(segment, key=None, prefix=0, **changes) for segment in segments]
    # the first of two may end by itself, with a tick launched behind its end
    streams = [[segments[i + 1], segments[i]] for i in range(0, count, 2)]
    player = Player(lanes_of(opened, threads, dtype), streams, cancelled={3: 2, 8: 1}, sounds=False, seed=3)
    player.play()
    assert not differences(player, TorchBackend(opened.config, opened.tensors(), "cpu", dtype))
    return player


BF16 = {"dtype": torch.bfloat16, "count": 8, "sampling": Sampling().greedy()}


@pytest.mark.parametrize("name", ["random:tiny", "random:tiny-projected", "small", "random:tiny:margin"])
def test_codes_are_the_oracles_under_joins_skips_cancels_and_reuse(name: str) -> None:
    played(open_checkpoint(name), **(BF16 if name.endswith("margin") else {}))


def test_two_threads_make_what_one_makes() -> None:
    opened = open_checkpoint("random:tiny:margin:eos5")
    one, two = (played(opened, threads) for threads in (False, True))
    assert two.wasted > 0, "some end while their next tick is on its way"
    assert max(len(made.codes) for made in one.lanes.all_made) >= 6, "so many that the codec works beside the next tick"
    for first, second in zip(one.lanes.all_made, two.lanes.all_made, strict=True):
        assert np.array_equal(first.ended, second.ended) and second.took_s > 0
        assert np.array_equal(first.codes, second.codes) and np.array_equal(first.pcm, second.pcm)


def entered(lanes: TorchLanes, tiny: Checkpoint, slots: Sequence[int]) -> Tick:
    """A tick that begins a stream in each of the slots."""
    prompt = 0.5 * torch.randn(7, tiny.config.talker.hidden_size, generator=torch.Generator().manual_seed(1))
    for slot in slots:
        lanes.begin(slot, Segment(PromptRows(prompt), Sampling().greedy(), slot))
    pieces = tuple(Piece(slot, 0, len(prompt), True) for slot in slots)
    return Tick((len(slots), 7 * len(slots)), np.array(slots, np.int32), len(slots), pieces)


def test_a_tick_of_one_lane_is_waited_for_and_one_of_more_runs_beside(tiny: Checkpoint) -> None:
    lanes, alone = lanes_of(tiny, True), lanes_of(tiny, False)
    for slots, beside in ((range(1), False), (range(1, 9), True)):
        made = lanes.collect(lanes.launch(entered(lanes, tiny, slots), [None] * len(slots)))
        assert lanes.overlaps == beside and made.pcm.shape == (len(slots), SAMPLES_PER_FRAME)
        tick, begun_s = entered(alone, tiny, slots), time.perf_counter()
        made = alone.collect(alone.launch(tick, [None] * len(slots)))
        assert not alone.overlaps and made.took_s <= time.perf_counter() - begun_s, "the codec's time counts once"
    assert lanes.settings.max_tick_s < alone.settings.max_tick_s, "a frame is heard two such ticks later"


@pytest.mark.parametrize(
    ("name", "begun", "ticked"),
    [("decode", 7, range(7)), ("_silence", 2, range(2)), ("_silence", 2, range(2, 4))],
    ids=["decodes", "they speak", "others speak"],
)
def test_a_codec_that_fails_ends_its_tick_and_the_next_one_goes_on(tiny, monkeypatch, name, begun, ticked):
    """Streams that could not enter are told once, with the next tick."""
    lanes = lanes_of(tiny, True)
    with monkeypatch.context() as patch:
        patch.setattr(lanes._codec, name, torch.zeros(2))  # no function, nor as long as a state is
        tick = entered(lanes, tiny, range(begun))
        tick = entered(lanes, tiny, ticked) if ticked[0] else tick
        launched = lanes.launch(tick, [None] * len(ticked))
        with pytest.raises((TypeError, RuntimeError), match="not callable|must match"):
            lanes.collect(launched)
    for slot in range(begun + ticked[0]):
        lanes.leave(slot)
    made = lanes.collect(lanes.launch(entered(lanes, tiny, range(8)), [None] * 8))
    assert np.abs(made.pcm).max(axis=1).all()


def talker_of(checkpoint: Checkpoint) -> TorchBackend:
    return TorchBackend(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, stacks=FoldedStack)


def begun(talker: TorchBackend, segment: RowStream) -> TorchStream:
    return talker.start(PromptRows(segment.embeds), segment.sampling, segment.seed)


def row(segment: RowStream, frame: int) -> Tensor | None:
    return segment.text[(frame - 1) % len(segment.text)] if frame else None


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="how other libraries order sums is not known")
@pytest.mark.parametrize("packed", [False, True], ids=["as it is", "packed"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_neighbours_change_no_bit(name, packed, monkeypatch):
    """All sixteen rows of logits of every frame are the same alone and in any company, to the last bit."""
    seen: list[Tensor] = []
    choose_of = ChoiceRows.choose

    def watched(rows: ChoiceRows, logits: Tensor, noise: Tensor | None) -> Tensor:
        seen.append(logits.clone())
        return choose_of(rows, logits, noise)

    monkeypatch.setattr(ChoiceRows, "choose", watched)
    monkeypatch.setattr("mktts.model.qwen3._LARGE", 0 if packed else 1 << 40)
    checkpoint = open_checkpoint(name if name == "small" else f"random:{name}")
    segments = random_segments(checkpoint.config, CPU, 9, 4, longest=17)
    talker = talker_of(checkpoint)
    assert talker.talker.layers[0].down.weight.is_mkldnn == talker.heads[3].weight.is_mkldnn == packed
    company = [begun(talker, segment) for segment in segments]
    frames = [0] * 9
    found: dict[int, list[Tensor]] = {0: [], 3: [], 8: []}
    for going in ([8, 5, 4, 1, 0], list(range(9)), [7, 8, 0], [0, 3, 6, 8]):  # prompts ride along twice
        seen.clear()
        talker.tick([company[i] for i in going], [row(segments[i], frames[i]) for i in going])
        for i in going:
            frames[i] += 1
        for i in found.keys() & set(going):
            found[i] += [logits[going.index(i)] for logits in seen]
    for i, logits in found.items():
        seen.clear()
        alone = begun(talker, segments[i])
        for frame in range(frames[i]):
            talker.tick([alone], [row(segments[i], frame)])
        assert len(logits) == len(seen) == NUM_CODEBOOKS * frames[i] >= 2 * NUM_CODEBOOKS
        assert all(torch.equal(one, rows[0]) for one, rows in zip(logits, seen, strict=True)), i


@pytest.mark.parametrize("poison", ["prompt", "row"])
def test_a_lane_of_nan_is_named_and_harms_no_other(tiny, poison):
    segments, talker, found = random_segments(tiny.config, CPU, 3, 4, longest=17), talker_of(tiny), []
    for level in (1, torch.nan):
        streams = [begun(talker, segment) for segment in segments]
        streams[1].prompt = streams[1].prompt * (level if poison == "prompt" else 1)
        for frame in range(4):
            rows = [row(segment, frame) for segment in segments]
            rows[1] = rows[1] * level if frame == 2 and poison == "row" else rows[1]
            found.append(talker.tick(streams, rows))
    fine, poisoned = torch.stack(found[:4]), torch.stack(found[4:])
    assert torch.equal(fine[:, ::2], poisoned[:, ::2]) and bool((fine >= 0).all())
    assert (poisoned[:, 1, 0] < 0).tolist() == [poison == "prompt"] * 2 + [True] * 2


def test_memory_grows_with_a_stream_and_goes_with_it(tiny):
    talker, width = talker_of(tiny), tiny.config.talker.hidden_size
    prompt = torch.randn(CHUNK_POSITIONS, width)
    stream, whole = (talker.start(PromptRows(prompt), Sampling(), 0, frames) for frames in (None, 9))
    sizes = [stream.cache.memory.nbytes]
    for text in (None, torch.zeros(width)):
        (codes,) = talker.tick([stream], [text])
        assert torch.equal(codes, talker.step(whole, text).codes)
        sizes.append(stream.cache.memory.nbytes)
    assert torch.equal(*(one.cache.memory[..., : CHUNK_POSITIONS + 1, :] for one in (stream, whole)))
    chunk = CHUNK_POSITIONS * 2 * tiny.config.talker.kv_bytes_per_position  # in fp32
    assert sizes == [0, chunk, 2 * chunk]
    lanes = lanes_of(tiny, False)
    lanes.begin(1, Segment(PromptRows(torch.randn(4, width)), Sampling(), 0))
    assert list(lanes._streams) == [1]
    lanes.leave(1)
    assert not lanes._streams


def test_what_cannot_begin_or_run_is_named_and_changes_nothing(tiny):
    (segment,), talker = random_segments(tiny.config, CPU, 1, 4), talker_of(tiny)
    with pytest.raises(PromptError):
        talker.start(PromptRows(segment.embeds[:1]), Sampling(), 0)
    made = []
    for refused in (True, False):
        stream = begun(talker, segment)
        for frame in range(2):
            if refused:
                with pytest.raises(PromptError, match="first tick"):
                    talker.tick([stream], [row(segment, 1 - frame)])
            made.append(talker.tick([stream], [row(segment, frame)]))
    assert torch.equal(torch.stack(made[:2]), torch.stack(made[2:]))


LEAST_SNR_DB = {"cuda": {"full": 80.0, "fast": 50.0}, "cpu": {"full": 100.0, "fast": 50.0, "plain": 100.0}}
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
    made.plain, made.least_db, made.nobody = plain, LEAST_SNR_DB[device][precision], SLOTS - 1
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
