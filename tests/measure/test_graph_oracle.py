"""The static-cache frame chooses the oracle's codes; on a GPU also as captured graphs."""

from __future__ import annotations

import pytest
import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.errors import CapacityError, EngineError
from mktts.measure.bench.graph_oracle import GraphOracle
from mktts.measure.parity.upstream import our_codes
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Choice, Sampling, distribution

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GREEDY = Sampling().greedy()


def made(checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu") -> tuple[TorchBackend, Prompt]:
    request = Request("A few words, and some more of them.", speaker="ryan", layout="streaming")
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), device, dtype)
    return TorchBackend(checkpoint.config, checkpoint.tensors(), device, dtype), builder.build(request)


@pytest.mark.parametrize("name", ["tiny", "tiny_projected", "tiny_margin"])
def test_greedy_codes_are_the_oracles_whatever_the_caches_length(name, request):
    oracle, prompt = made(request.getfixturevalue(name), torch.float32)
    expected = our_codes(oracle, prompt, GREEDY, 0, 20)
    for positions in (64, 131):
        assert torch.equal(our_codes(GraphOracle(oracle, positions), prompt, GREEDY, 0, 20), expected)


def test_a_stream_leaves_nothing_behind_for_the_next(tiny):
    oracle, prompt = made(tiny, torch.float32)
    graph = GraphOracle(oracle, 64)
    first = our_codes(graph, prompt, GREEDY, 0, 12)
    our_codes(graph, prompt, Sampling(), 5, 20)
    assert torch.equal(our_codes(graph, prompt, GREEDY, 0, 12), first)


def test_a_stream_that_another_replaced_and_one_too_long_are_refused(tiny):
    oracle, prompt = made(tiny, torch.float32)
    graph = GraphOracle(oracle, 64)
    old = graph.start(prompt, GREEDY, 0, 4)
    graph.start(prompt, GREEDY, 0, 4)
    with pytest.raises(EngineError, match="one at a time"):
        graph.step(old, None)
    with pytest.raises(CapacityError, match="exceed 64 positions"):
        graph.start(prompt, GREEDY, 0, 64)


def test_draws_follow_the_distribution():
    from mktts.measure.bench.graph_oracle import _draw

    logits, choice = torch.tensor([2.0, 1.0, 0.5, -torch.inf, 0.0]), Choice(temperature=0.8, top_k=3)
    torch.manual_seed(0)
    counts = torch.bincount(torch.cat([_draw(logits, choice) for _ in range(4_000)]), minlength=5)
    expected = distribution(logits, choice)
    assert ((counts / 4_000 - expected).abs() < 5 * (expected / 4_000).sqrt() + 1e-9).all()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("source", ["random:tiny:margin", "random:tiny-projected:margin"])
def test_captured_graphs_choose_the_oracles_greedy_codes(source):
    oracle, prompt = made(open_checkpoint(source), torch.bfloat16, "cuda")
    graph = GraphOracle(oracle, 128)
    expected = our_codes(oracle, prompt, GREEDY, 0, 60)
    assert torch.equal(our_codes(graph, prompt, GREEDY, 0, 60), expected)
    assert torch.equal(our_codes(graph, prompt, GREEDY, 0, 60), expected)


@pytest.mark.gpu
@GPU
def test_captured_draws_differ_from_frame_to_frame_and_repeat_with_the_seed():
    oracle, prompt = made(open_checkpoint("random:tiny"), torch.bfloat16, "cuda")
    graph = GraphOracle(oracle, 128)
    first = our_codes(graph, prompt, Sampling(), 3, 40)
    assert len({tuple(codes) for codes in first.tolist()}) == len(first)
    assert torch.equal(our_codes(graph, prompt, Sampling(), 3, 40), first)
