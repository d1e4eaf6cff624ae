"""Many streams in lanes give the oracle's codes, whatever joins, skips, leaves and sits beside them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mktts.batch.plain.stack import CHUNK_POSITIONS
from mktts.batch.plain.talker import LaneNoise, TorchTalker
from mktts.checkpoint import open_checkpoint
from mktts.errors import CapacityError, PromptError, SamplingError
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Choice, ChoiceRows, RestrictedRows, Sampling, choose, gumbel, restrict
from mktts.spec import NUM_CODEBOOKS, SUPPRESSED_TAIL

GREEDY = Choice(do_sample=False)
CHOICES = [
    GREEDY,
    Choice(temperature=3.0, top_k=10),
    Choice(temperature=3.0, top_k=20, top_p=0.8),
    Choice(temperature=2.0, top_k=0),
    Choice(top_k=0, top_p=0.5),
]
CPU = torch.device("cpu")


class Streams:
    """Prompts, text rows and settings of some streams, and the oracle's codes for them."""

    def __init__(self, checkpoint, count: int, frames: int, dtype: torch.dtype = torch.float32) -> None:
        self.checkpoint, self.dtype, self.frames = checkpoint, dtype, frames
        torch.manual_seed(0)
        width, spread = checkpoint.config.talker.hidden_size, 0.5
        self.prompts = [spread * torch.randn(2 + 5 * i % 17, width) for i in range(count)]
        self.texts = [spread * torch.randn(frames, width) for _ in range(count)]
        self.settings = [
            Sampling(CHOICES[i % 5], CHOICES[i // 2 % 5], repetition_penalty=(1.0, 1.05, 1.7)[i % 3])
            for i in range(count)
        ]
        self.seeds = [1_000 + i + (7 << 33) for i in range(count)]
        self.oracle = TorchBackend(checkpoint.config, checkpoint.tensors(), "cpu", dtype)

    def lanes(self, **settings) -> TorchTalker:
        return TorchTalker(self.checkpoint.config, self.checkpoint.tensors(), "cpu", self.dtype, **settings)

    def expected(self, i: int) -> list[Tensor | None]:
        """Up to and with the end of speech, which is None."""
        state = self.oracle.start(PromptRows(self.prompts[i]), self.settings[i], self.seeds[i], self.frames)
        made: list[Tensor | None] = []
        while len(made) < self.frames and not state.ended:
            made.append(self.oracle.step(state, self.row(i, len(made))).codes)
        return made

    def start(self, lanes: TorchTalker, i: int) -> int:
        return lanes.start(self.prompts[i], self.settings[i], self.seeds[i], self.frames)

    def row(self, i: int, frame: int) -> Tensor | None:
        return self.texts[i][frame - 1] if frame else None


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return len(found) == len(expected) and all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(found, expected, strict=True)
    )


def served(streams: Streams, lanes: TorchTalker, cancelled: dict[int, int], seed: int = 0) -> dict[int, list]:
    """What each stream gets where they join at random, skip ticks, and leave: at their end, or when cancelled."""
    chance, waiting = random.Random(seed), list(range(len(streams.prompts)))
    slots: dict[int, int] = {}
    made: dict[int, list] = {i: [] for i in waiting}
    while waiting or slots:
        while waiting and len(slots) < lanes.max_slots and chance.random() < 0.6:
            slots[waiting[0]] = streams.start(lanes, waiting[0])
            waiting.pop(0)
        going = [i for i in slots if chance.random() < 0.7]
        chance.shuffle(going)
        rows = [streams.row(i, len(made[i])) for i in going]
        for i, codes in zip(going, lanes.tick([slots[i] for i in going], rows), strict=True):
            made[i].append(codes)
            if codes is None or len(made[i]) in (streams.frames, cancelled.get(i)):
                lanes.free(slots.pop(i))
    return made


@pytest.mark.parametrize("name", ["tiny", "tiny:margin", "tiny-projected", "small"])
def test_codes_are_the_oracles_under_joins_skips_cancels_and_reuse(name):
    streams = Streams(open_checkpoint(name if name == "small" else f"random:{name}"), count=8, frames=6)
    lanes = streams.lanes(max_slots=4)
    cancelled = {2: 1, 5: 3}
    made = served(streams, lanes, cancelled)
    assert lanes.open_slots == 0
    for i, found in made.items():
        assert same(found, streams.expected(i)[: cancelled.get(i)]), (i, streams.settings[i])


def test_a_lane_ends_where_the_oracle_does():
    checkpoint = open_checkpoint("random:tiny:margin:eos5")
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cpu", torch.float32)
    prompt = builder.build(Request("Some words.", speaker="ryan"))
    streams = Streams(checkpoint, count=1, frames=9)
    lanes, made = streams.lanes(), []
    slots = [lanes.start(prompt.embeds, Sampling().greedy(), 0, 9) for _ in range(2)]
    while not made or made[-1][0] is not None:
        made.append(lanes.tick(slots, [prompt.row(len(made) - 1) if made else None] * 2))
    assert len(made) == 6 and made[-1] == [None, None]
    with pytest.raises(CapacityError, match="ended after 5"):
        lanes.tick(slots[:1], [prompt.pad])


def test_bfloat16_gives_the_oracles_greedy_codes(tiny_margin):
    streams = Streams(tiny_margin, count=3, frames=4, dtype=torch.bfloat16)
    streams.settings = [Sampling().greedy()] * 3
    lanes = streams.lanes()
    made = served(streams, lanes, {})
    assert all(same(made[i], streams.expected(i)) for i in made)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="how other libraries order sums is not known")
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_neighbours_change_no_bit(name, monkeypatch):
    """All sixteen rows of logits of every frame are the same alone and in any company, to the last bit."""
    seen: list[Tensor] = []
    choose_of = ChoiceRows.choose

    def watched(rows: ChoiceRows, logits: Tensor, noise: Tensor | None) -> Tensor:
        seen.append(logits.clone())
        return choose_of(rows, logits, noise)

    monkeypatch.setattr(ChoiceRows, "choose", watched)
    streams = Streams(open_checkpoint(name if name == "small" else f"random:{name}"), count=9, frames=4)
    alone, company = streams.lanes(max_slots=1), streams.lanes(max_slots=9)
    slots, frames = [streams.start(company, i) for i in range(9)], [0] * 9
    found: dict[int, list[Tensor]] = {0: [], 3: [], 8: []}
    for going in ([8, 5, 4, 1, 0], list(range(9)), [7, 8, 0], [0, 3, 6, 8]):  # prompts ride along twice
        seen.clear()
        company.tick([slots[i] for i in going], [streams.row(i, frames[i]) for i in going])
        order = sorted(going, key=lambda i: frames[i] == 0)
        for i in going:
            frames[i] += 1
        for i in found.keys() & set(going):
            found[i] += [logits[order.index(i)] for logits in seen]
    for i, logits in found.items():
        seen.clear()
        slot = streams.start(alone, i)
        for frame in range(frames[i]):
            alone.tick([slot], [streams.row(i, frame)])
        alone.free(slot)
        assert len(logits) == len(seen) == NUM_CODEBOOKS * frames[i] >= 2 * NUM_CODEBOOKS
        assert all(torch.equal(one, rows[0]) for one, rows in zip(logits, seen, strict=True)), i


def test_a_slot_forgets_who_had_it(tiny):
    streams = Streams(tiny, count=1, frames=5)
    streams.settings = [replace(Sampling().greedy(), repetition_penalty=50.0)]
    lanes = streams.lanes(max_slots=1)
    expected = streams.expected(0)
    for _ in range(2):
        slot = streams.start(lanes, 0)
        assert same([lanes.tick([slot], [streams.row(0, frame)])[0] for frame in range(5)], expected)
        lanes.free(slot)


def test_a_lane_of_nan_harms_no_other(tiny):
    streams = Streams(tiny, count=3, frames=4)
    expected = [streams.expected(i) for i in (0, 2)]
    streams.prompts[1] = torch.full_like(streams.prompts[1], torch.nan)
    lanes = streams.lanes()
    slots = [streams.start(lanes, i) for i in range(3)]
    made = [lanes.tick(slots, [streams.row(i, frame) for i in range(3)]) for frame in range(4)]
    for place, want in zip((0, 2), expected, strict=True):
        assert same([frame[place] for frame in made], want)


def test_noise_is_philoxs(tiny):
    seeds, frames, eos = [5, 2**40 + 3, 2**64 - 1], [0, 7, 2_000], tiny.config.codec_ids.eos
    vocabularies = tiny.config.talker.vocab_size, tiny.config.predictor.vocab_size
    code0, later = LaneNoise(tiny.config).draw(seeds, frames, CPU)
    for lane, (seed, frame) in enumerate(zip(seeds, frames, strict=True)):
        expected = torch.from_numpy(gumbel(seed, frame, range(1), vocabularies[0])[0])
        usable = torch.tensor([*range(vocabularies[0] - SUPPRESSED_TAIL), eos])
        assert torch.equal(code0[lane, usable], expected[usable])
        expected = torch.from_numpy(gumbel(seed, frame, range(1, NUM_CODEBOOKS), vocabularies[1]))
        assert torch.equal(later[lane], expected)


@pytest.mark.parametrize("mixed", [True, False])
def test_given_logits_every_lane_chooses_as_the_oracle(mixed):
    """Bit for bit, with ties everywhere: rounded logits, and noise that is often equal."""
    choices = [*CHOICES, Choice(top_k=500), Choice(top_k=1), Choice(top_k=7, top_p=1e-3), Choice(top_p=0.999)]
    if not mixed:
        choices = [Choice(top_k=5)] * 4
    torch.manual_seed(1)
    rows = ChoiceRows.of(tuple(choices), CPU)
    for step in (1.0, 0.25, 1e-3):
        logits = (3 * torch.randn(len(choices), 300) / step).round() * step
        logits[:, 200:290] = -torch.inf
        noise = torch.randn(logits.shape).round()
        found = rows.choose(logits, noise)
        expected = [choose(row, choice, some) for row, choice, some in zip(logits, choices, noise, strict=True)]
        assert found.tolist() == [int(code) for code in expected]


def test_code_0_is_restricted_as_by_the_oracle():
    torch.manual_seed(2)
    vocabulary, eos = 2_048, 1_500
    histories = [torch.tensor(codes, dtype=torch.int64) for codes in ([], [3], [3, 7, 3], [9] * 40)]
    penalties, logits = [1.3, 1.0, 0.7, 1.05], torch.randn(4, vocabulary)
    seen = torch.zeros(4, vocabulary, dtype=torch.bool)
    for row, history in zip(seen, histories, strict=True):
        row[history] = True
    frames = [len(history) for history in histories]
    found = RestrictedRows(vocabulary, eos, CPU).restrict(logits.clone(), seen, penalties, frames)
    for lane, history in enumerate(histories):
        assert torch.equal(found[lane], restrict(logits[lane], history, penalties[lane], eos)), lane


def test_memory_grows_with_a_stream_and_goes_with_it(tiny):
    streams = Streams(tiny, count=1, frames=2)
    streams.prompts[0] = torch.randn(CHUNK_POSITIONS, tiny.config.talker.hidden_size)
    lanes = streams.lanes(positions=CHUNK_POSITIONS + 2)
    slot = streams.start(lanes, 0)
    cache = lanes._slots[slot].cache
    sizes = [cache.memory.nbytes]
    for frame in range(2):
        lanes.tick([slot], [streams.row(0, frame)])
        sizes.append(cache.memory.nbytes)
    chunk = CHUNK_POSITIONS * lanes.position_bytes
    assert sizes == [0, chunk, 2 * chunk]
    lanes.free(slot)
    assert lanes._slots[slot] is None and lanes.open_slots == 0


def test_what_cannot_be_started_is_named(tiny):
    streams = Streams(tiny, count=1, frames=4)
    lanes, prompt = streams.lanes(max_slots=1, positions=20), streams.prompts[0]
    with pytest.raises(SamplingError, match="rng='torch'"):
        lanes.start(prompt, Sampling(rng="torch"), 0, 4)
    with pytest.raises(SamplingError, match="seed"):
        lanes.start(prompt, Sampling(), -1, 4)
    with pytest.raises(CapacityError, match="21 positions"):
        lanes.start(prompt, Sampling(), 0, 21 - len(prompt))
    with pytest.raises(PromptError):
        lanes.start(prompt[:1], Sampling(), 0, 4)
    slot = lanes.start(prompt, Sampling(), 0, 4)
    with pytest.raises(CapacityError, match="all 1 slots"):
        lanes.start(prompt, Sampling(), 0, 4)
    lanes.free(slot)
    with pytest.raises(CapacityError, match="not open"):
        lanes.free(slot)
    assert lanes.start(prompt, Sampling(), 0, 4) == slot


def test_a_refused_tick_changes_nothing(tiny):
    streams = Streams(tiny, count=2, frames=2)
    streams.settings = [replace(Sampling(), repetition_penalty=1.2)] * 2
    lanes, text = streams.lanes(), streams.texts[0][0]
    slots = [streams.start(lanes, i) for i in range(2)]
    for wrong, rows, error in (
        ([slots[0], 7], [None, None], CapacityError),
        ([slots[0], slots[0]], [None, None], CapacityError),
        (slots, [None], CapacityError),
        (slots, [None, text], PromptError),
    ):
        with pytest.raises(error):
            lanes.tick(wrong, rows)
    assert lanes.tick([], []) == []
    made = [lanes.tick(slots, [None, None]), lanes.tick(slots, [streams.row(i, 1) for i in range(2)])]
    for i in range(2):
        assert same([frame[i] for frame in made], streams.expected(i))
    with pytest.raises(CapacityError, match="2 of at most 2"):
        lanes.tick(slots[:1], [text])
    with pytest.raises(PromptError, match="row"):
        streams.start(lanes, 0)
        lanes.tick([2], [text[:3]])
