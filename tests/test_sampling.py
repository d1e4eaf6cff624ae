"""Sampling against transformers' own logits processors, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mktts.errors import SamplingError
from mktts.sampling import Choice, Sampling, choose, distribution, penalise

SIZE = 300


def logits_of(seed: int) -> torch.Tensor:
    """Logits rounded as bf16 gives them, so that ties occur."""
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16().float()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.9, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 50, 1_000]),
    top_p=st.sampled_from([0.1, 0.8, 0.95, 1.0]),
)
def test_distribution_is_that_of_transformers_warpers(seed, temperature, top_k, top_p):
    logits = logits_of(seed)
    scores = logits[None].clone()
    if temperature != 1.0:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    ours = distribution(logits, Choice(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(ours, scores.softmax(-1)[0])


@pytest.mark.parametrize("penalty", [1.0, 1.05, 2.0, 0.5])
def test_penalty_is_that_of_transformers(penalty):
    logits, history = logits_of(1), torch.tensor([3, 7, 7, 250])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history[None], logits[None].clone())[0]
    assert torch.equal(penalise(logits, history, penalty), expected)


def test_penalty_leaves_its_input_alone():
    logits = logits_of(2)
    before = logits.clone()
    penalise(logits, torch.tensor([1, 2]), 1.3)
    assert torch.equal(logits, before)


def test_forbidden_ids_are_never_drawn():
    logits = logits_of(3)
    logits[10:] = -torch.inf
    generator = torch.Generator().manual_seed(0)
    drawn = {int(choose(logits, Choice(temperature=5.0, top_k=0), generator)) for _ in range(200)}
    assert max(drawn) < 10 and len(drawn) > 3


def test_draws_follow_the_generator_and_greedy_ignores_it():
    logits = logits_of(4)
    draws = [
        [int(choose(logits, Choice(), generator)) for _ in range(20)]
        for generator in (torch.Generator().manual_seed(5), torch.Generator().manual_seed(5))
    ]
    assert draws[0] == draws[1] and len(set(draws[0])) > 1
    assert int(choose(logits, Choice(do_sample=False), None)) == int(logits.argmax())


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_a_setting_out_of_range_is_named(kwargs, named):
    with pytest.raises(SamplingError, match=named):
        Choice(**kwargs)


def test_a_bad_penalty_is_named_and_greedy_keeps_the_rest():
    with pytest.raises(SamplingError, match="repetition_penalty"):
        Sampling(repetition_penalty=0.0)
    greedy = Sampling(talker=Choice(top_k=7), repetition_penalty=1.2).greedy()
    assert not greedy.talker.do_sample and not greedy.predictor.do_sample
    assert greedy.talker.top_k == 7 and greedy.repetition_penalty == 1.2
