"""Prompts as rows that lie somewhere: the same numbers as those that are computed."""

import ctypes

import numpy as np
import pytest
import torch

from mktts.checkpoint import open_checkpoint
from mktts.model.prompt import AddressedRows, PromptBuilder, Request, SpokenRows

REQUESTS = {
    "random:tiny": [Request("Hello there, you."), Request("Yes", language="english"), Request("No " * 40)],
    "random:tiny:voice_design": [Request("Hello you.", instruct="A low voice, slowly."), Request("Hello you.")],
}


def read(rows: AddressedRows) -> torch.Tensor:
    """What stands at the addresses, as float32."""
    width = rows.shape[1]
    return torch.tensor(np.array([(ctypes.c_float * width).from_address(at) for at in rows.addresses.tolist()]))


@pytest.fixture(scope="module", params=list(REQUESTS))
def builder(request) -> tuple[PromptBuilder, list[Request]]:
    checkpoint = open_checkpoint(request.param)
    prompts = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer(), "cpu", torch.float32)
    return prompts, REQUESTS[request.param]


def test_they_are_those_of_the_prompt_that_is_computed(builder):
    prompts, requests = builder
    spoken = SpokenRows(prompts)
    for request in map(prompts.check, requests):
        computed, found = prompts.of_checked(request), prompts.of_checked(request, spoken)
        assert isinstance(found.embeds, AddressedRows) and found.embeds.shape == tuple(computed.embeds.shape)
        torch.testing.assert_close(read(found.embeds), computed.embeds, rtol=1e-5, atol=1e-6)
        same = ("prefix_rows", "prefix_key", "text_tokens")
        assert all(getattr(found, name) == getattr(computed, name) for name in same)
        assert torch.equal(found.row(3), computed.row(3)) and torch.equal(found.trailing, computed.trailing)
        assert torch.equal(read(found.embeds)[: found.prefix_rows], computed.embeds[: found.prefix_rows])


def test_a_streaming_prompt_is_computed_all_the_same(builder):
    prompts, (request, *_) = builder
    request = prompts.check(Request(request.text, instruct=request.instruct, layout="streaming"))
    assert torch.equal(prompts.of_checked(request, SpokenRows(prompts)).embeds, prompts.of_checked(request).embeds)
