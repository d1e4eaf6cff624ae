"""Sampling against transformers' own logits processors, bit for bit; the counter-based generator against published
vectors, its noise against that of csrc/sampling.cuh, and its draws against their distribution."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers.generation import logits_process as theirs

from mktts.errors import SamplingError
from mktts.model import sampling
from mktts.model.sampling import Choice, ChoiceRows, Sampling, check_start, choose, distribution, gumbel, restrict
from mktts.spec import CODEBOOK_SIZE, MIN_NEW_FRAMES, SUPPRESSED_TAIL

SIZE = 300
start = partial(check_start, torch.zeros(2, 4), 4, max_frames=1)
CHOICES = {
    "released": Choice(),
    "no filter": Choice(temperature=1.3, top_k=0),
    "top-p": Choice(top_k=0, top_p=0.8),
    "top-k and top-p": Choice(temperature=0.7, top_k=20, top_p=0.9),
    "cold": Choice(temperature=0.3, top_k=5),
}
ANY_CHOICE = st.builds(
    Choice,
    temperature=st.sampled_from([0.3, 0.9, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 50, 1_000]),
    top_p=st.sampled_from([0.1, 0.8, 0.95, 1.0]),
)
# Random123's known answers (kat_vectors, philox4x32 10): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
# Seed, frame, codebook, id -> the bits that csrc/sampling.cuh gives, one rounding an operation.
NOISE = [
    (0, 0, 1, 0, "0x1.13a3d8p-3"),
    (7, 3, 1, 1, "-0x1.031860p-1"),
    (7, 3, 2, 2, "-0x1.1bfabep+0"),
    (2**32 - 1, 8191, 3, 3, "0x1.98008cp+0"),
    (2**64 - 1, 1, 15, 2047, "0x1.a6c538p+1"),
    (2**64 - 1, 1, 8, 1001, "0x1.ed69c6p+0"),
    (0x123456789ABCDEF0, 500, 9, 64, "0x1.09745ep+1"),
    (0x123456789ABCDEF0, 500, 4, 513, "0x1.4a4b2ap-5"),
]


def logits_of(seed: int) -> torch.Tensor:
    """Logits rounded as bf16 gives them, so that ties occur."""
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16().float()


def kept(logits: torch.Tensor, choice: Choice) -> torch.Tensor:
    return ChoiceRows.of((choice,), logits.device).kept(logits[None])[0]


def warpers(choice: Choice) -> list:
    made = [theirs.TemperatureLogitsWarper(choice.temperature)]
    made += [theirs.TopKLogitsWarper(choice.top_k)] if choice.top_k else []
    return made + ([theirs.TopPLogitsWarper(choice.top_p)] if choice.top_p < 1 else [])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), choice=ANY_CHOICE)
def test_distribution_is_that_of_transformers_warpers(seed, choice):
    scores = logits_of(seed)[None]
    for warper in warpers(choice):
        scores = warper(None, scores)
    assert torch.equal(distribution(logits_of(seed), choice), scores.softmax(-1)[0])


@pytest.mark.parametrize("penalty", [1.0, 1.2, 0.5])
@pytest.mark.parametrize("frames", [0, MIN_NEW_FRAMES - 1, MIN_NEW_FRAMES, 30])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_code_0_is_drawn_after_all_of_transformers_processors_in_upstreams_order(choice, frames, penalty):
    size, eos = CODEBOOK_SIZE + SUPPRESSED_TAIL, CODEBOOK_SIZE + 102
    generator = torch.Generator().manual_seed(frames)
    logits = torch.randn(size, generator=generator) * 3
    logits[eos] += 12  # so that it matters whether it may be said
    history = torch.randint(CODEBOOK_SIZE, (frames,), generator=generator)
    logits[history] += 6
    suppressed = [token for token in range(CODEBOOK_SIZE, size) if token != eos]
    # The prompt went in as embeddings, so transformers' input_ids are the codes so far.
    processors = [
        theirs.RepetitionPenaltyLogitsProcessor(penalty),
        theirs.MinNewTokensLengthLogitsProcessor(0, MIN_NEW_FRAMES, eos),
        theirs.SuppressTokensLogitsProcessor(suppressed),
    ]
    scores = logits[None].clone()
    for processor in (*processors, *warpers(choice)):
        scores = processor(history[None], scores)
    before = logits.clone()
    ours = restrict(logits, history, penalty, eos)
    assert torch.equal(kept(ours, choice), scores[0]) and torch.equal(logits, before)
    noise = noise_rows(50, size)
    assert [int(choose(ours, choice, row)) for row in noise] == (scores + noise).argmax(-1).tolist()


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_philoxs_draws_follow_their_distribution(choice):
    """Pearson's chi-square; cells that expect fewer than five draws count as one. The seed is fixed."""
    logits, draws = logits_of(6), 6_000
    drawn = torch.stack([choose(logits, choice, row) for row in noise_rows(draws, SIZE)])
    expected = kept(logits, choice).double().softmax(-1) * draws
    found = torch.bincount(drawn, minlength=SIZE).double()
    assert found[expected == 0].sum() == 0
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    cells = expected > 0
    statistic = ((found - expected)[cells].square() / expected[cells]).sum()
    freedom = int(cells.sum()) - 1
    assert statistic < freedom + 3.5 * (2 * freedom) ** 0.5  # mean + 3.5 standard deviations


def noise_rows(count: int, size: int) -> torch.Tensor:
    """(count, size) Gumbel noise of sixteen codebooks of as many frames as that takes."""
    frames = range(-(-count // 16))
    return torch.cat([torch.from_numpy(gumbel(9, frame, range(16), size)) for frame in frames])[:count]


def test_of_equals_the_lowest_wins_and_top_p_leaves_the_highest():
    even, noise = torch.zeros(8), torch.zeros(8)
    assert int(choose(even, Choice(top_k=0), noise)) == 0
    assert kept(even, Choice(temperature=1.0, top_k=3)).tolist() == [0] * 8
    many = kept(torch.zeros(512), Choice(temperature=1.0, top_k=0, top_p=0.5))  # as many as a sorting network reorders
    assert many.isfinite().tolist() == [False] * 256 + [True] * 256


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), choices=st.lists(ANY_CHOICE | st.just(Choice(False)), min_size=2, max_size=7))
def test_of_each_of_many_rows_is_chosen_what_is_chosen_of_it_alone(seed, choices):
    logits = torch.stack([logits_of(seed + row) for row in range(len(choices))])
    noise = noise_rows(len(choices), SIZE).round()  # so that sums are often equal too
    found = ChoiceRows.of(tuple(choices), logits.device).choose(logits, noise)
    assert found.tolist() == [int(choose(*one)) for one in zip(logits, choices, noise, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_on_cuda_the_same_ids_are_drawn(choice):
    for row, noise in enumerate(noise_rows(200, SIZE)):
        logits, history = pad(logits_of(row), (0, SUPPRESSED_TAIL)), torch.tensor([1, 5, 9])
        on_cuda = restrict(logits.cuda(), history.cuda(), 1.2, SIZE)[:SIZE]
        logits = restrict(logits, history, 1.2, SIZE)[:SIZE]
        assert torch.equal(on_cuda.cpu(), logits)
        assert int(choose(on_cuda, choice, noise.cuda())) == int(choose(logits, choice, noise))


@pytest.mark.parametrize(
    ("made", "given", "named"),
    [
        *((Choice, {"temperature": value}, "temperature") for value in (0.0, 1e-40, 1e39, float("nan"), None)),
        *((Choice, {"top_k": value}, "top_k") for value in (-1, 2.5, 2**63, "5")),
        *((Choice, {"top_p": value}, "top_p") for value in (0.0, 1.1)),
        *((start, {"seed": seed}, "seed must be") for seed in (None, -1, 2**64, 1.0, "7", True)),
        (Sampling, {"repetition_penalty": 0.0}, "repetition_penalty"),
        (Sampling, {"talker": {"top_k": 5}}, "Choice"),
        (Sampling, {"rng": "numpy"}, "philox.*torch.*numpy"),
        *((Sampling().with_flat, {"given": {name: 0.1}}, name) for name in ("min_p", "do_sample")),
        (Sampling().with_flat, {"given": {"predictor_top_p": 2.0}}, "top_p"),
    ],
)
def test_a_setting_that_is_none_or_out_of_range_is_named(made, given, named):
    with pytest.raises(SamplingError, match=named):
        made(**given)


def test_greedy_keeps_the_rest_and_flat_names_say_all_settings_and_give_them_back():
    greedy = Sampling(talker=Choice(top_k=7), repetition_penalty=1.2, rng="torch").greedy()
    assert not greedy.talker.do_sample and not greedy.predictor.do_sample
    assert (greedy.talker.top_k, greedy.repetition_penalty, greedy.rng) == (7, 1.2, "torch")
    odd = Sampling(Choice(False, 0.3, 5, 0.8), Choice(True, 0.4, 6, 0.7), 1.2)
    assert odd.flat() == {
        "greedy": True, "temperature": 0.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2,
        "predictor_greedy": False, "predictor_temperature": 0.4, "predictor_top_k": 6, "predictor_top_p": 0.7,
    }  # fmt: skip
    assert Sampling().with_flat(odd.flat()) == odd == Sampling().with_upstream(odd.upstream())
    written = Choice(temperature=1, top_k=50.0, top_p=1)  # as JSON may say them
    assert (type(written.temperature), type(written.top_k), type(written.top_p)) == (float, int, float)
    changed = Sampling(rng="torch").with_flat({"top_k": None, "predictor_top_k": 3})
    assert changed == Sampling(predictor=Choice(top_k=3), rng="torch")


def test_known_answers():
    assert [tuple(sampling.philox(counter, key)) for counter, key, _ in KNOWN] == [words for *_, words in KNOWN]


@pytest.mark.parametrize(("seed", "frame", "book", "token", "bits"), NOISE)
def test_noise_is_the_kernels_bit_for_bit(seed, frame, book, token, bits):
    noise = gumbel(seed, frame, range(1, 16), 2048)
    assert noise.shape == (15, 2048) and noise.dtype == np.float32
    assert noise[book - 1, token] == float.fromhex(bits)
    assert np.array_equal(gumbel(seed, frame, range(book, book + 1), 301)[0], noise[book - 1, :301])


def test_the_logarithm_is_that_of_float64_within_its_bound():
    k = np.arange(0, 2**23, 7, dtype=np.float32)
    u = (k + np.float32(0.5)) * np.float32(2**-23)
    before = u.copy()
    for x in (u, -sampling.exact_log(u)):
        true = np.log(x.astype(np.float64))
        assert (np.abs(sampling.exact_log(x) - true) / np.maximum(1, np.abs(true))).max() < 1e-7
    assert np.array_equal(u, before)
    ends = (np.array([0, 2**23 - 1], dtype=np.float32) + np.float32(0.5)) * np.float32(2**-23)
    assert 0 < ends[0] and ends[1] < 1 and np.isfinite(sampling.exact_log(-sampling.exact_log(ends))).all()
