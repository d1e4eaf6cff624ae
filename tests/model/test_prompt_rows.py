"""Rows that prompts look up: kept ones stay as they were made, those at addresses are those that are computed, and rows
read on the host are those of the device."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.errors import CheckpointError, PromptError
from mktts.model.prompt import AddressedRows, FedPrompt, Prompt, PromptBuilder, Request, SpokenRows, gather, numbers
from mktts.model.voice import Voice

REQUESTS = [
    Request("Some words.", speaker="ryan"),
    Request("Other words, and more of them.", speaker="ryan", language="english", layout="streaming"),
]


def builder_of(checkpoint: Checkpoint, device: str = "cpu", tensors=None, dtype=torch.bfloat16) -> PromptBuilder:
    tensors = tensors or checkpoint.tensors()
    return PromptBuilder(checkpoint.config, tensors, checkpoint.tokenizer(), device=device, dtype=dtype)


def rest_of(prompt: Prompt) -> torch.Tensor:
    """Text rows behind the prompt, which are made when the first of them is asked for."""
    prompt.row(0)
    return prompt.rest


def rows_of(builder: PromptBuilder, request: Request) -> torch.Tensor:
    prompt = builder.build(request)
    return torch.cat((prompt.embeds, rest_of(prompt), prompt.pad[None]))


def fed_rows_of(builder: PromptBuilder) -> torch.Tensor:
    fed = FedPrompt(builder, builder.check(Request("", speaker="ryan", layout="streaming")))
    fed.push("Words that ")
    fed.push("come later.")
    fed.close()
    return torch.cat((fed.embeds, torch.stack([fed.row(frame) for frame in range(12)])))


def test_rows_that_are_kept_are_those_of_a_new_builder_whatever_was_built_before(tiny):
    used = builder_of(tiny)
    for _ in range(2):
        for request in REQUESTS:
            assert torch.equal(rows_of(used, request), rows_of(builder_of(tiny), request))
        assert torch.equal(fed_rows_of(used), fed_rows_of(builder_of(tiny)))


@pytest.mark.parametrize("layout", ["whole", "streaming"])
def test_an_instruction_to_a_clone_is_a_users_turn_before_the_prompt_it_would_have_without(tiny, tiny_base, layout):
    asking = tiny_base.with_instructions()
    voice = Voice(torch.ones(asking.config.talker.hidden_size), None, None, asking.config.model_size)
    request = Request("Some words.", voice=voice, layout=layout)
    with pytest.raises(PromptError, match="got 'anna'"):
        builder_of(tiny_base).check(replace(request, voice="anna"))
    with pytest.raises(PromptError, match="takes no instructions"):
        builder_of(tiny_base).build(replace(request, instruct="Softly."))
    builder, plain = builder_of(asking), builder_of(tiny_base).build(request)
    asked = builder.build(replace(request, instruct="Softly."))
    marks, encode = asking.config.text_ids, asking.tokenizer().encode
    turn = builder.text_rows([marks.im_start, *encode("user\nSoftly."), marks.im_end, *encode("\n")])
    assert torch.equal(asked.embeds, torch.cat((turn, plain.embeds)))
    assert torch.equal(rest_of(asked), rest_of(plain)) and asked.prefix_rows == len(turn) + plain.prefix_rows
    with pytest.raises(CheckpointError, match="expected a Base checkpoint, found custom_voice"):
        tiny.with_instructions()


def test_rows_that_the_first_frame_does_not_need_are_made_when_they_are_asked_for_and_once(tiny, monkeypatch):
    builder = builder_of(tiny)
    expected, ids = rows_of(builder, REQUESTS[1]), builder.tokenizer.encode(REQUESTS[1].text)
    asked, rows = [], builder.text_rows
    monkeypatch.setattr(builder, "text_rows", lambda ids: asked.append(list(ids)) or rows(ids))
    prompt = builder.build(REQUESTS[1])
    assert asked == [ids[:1]]
    for _ in range(2):
        assert torch.equal(torch.cat((prompt.embeds, rest_of(prompt), prompt.pad[None])), expected)
    assert asked == [ids[:1], ids[1:]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_gathered_bit_by_bit_and_ids_beyond_the_table_are_refused(dtype):
    table = torch.randn(40, 16).to(dtype)
    table[3, :2] = torch.tensor([torch.nan, -0.0])
    ids, out = [3, 39, 0, 3], torch.empty(4, 16, dtype=dtype)
    gather(numbers(table), ids, numbers(out))
    assert torch.equal(out.view(torch.uint8), table[ids].view(torch.uint8))
    for wrong in ([0, 40], [-1]):
        with pytest.raises(IndexError, match="0 to 39"):
            gather(numbers(table), wrong, numbers(out[: len(wrong)]))


def read(rows: AddressedRows) -> torch.Tensor:
    """What stands at the addresses, as float32."""
    width = rows.shape[1]
    return torch.tensor(np.array([(ctypes.c_float * width).from_address(at) for at in rows.addresses.tolist()]))


SPOKEN = {
    "random:tiny": [Request("Hello there, you."), Request("Yes", language="english"), Request("No " * 40)],
    "random:tiny:voice_design": [Request("Hello you.", instruct="A low voice, slowly."), Request("Hello you.")],
}


@pytest.mark.parametrize("source", SPOKEN)
def test_rows_at_addresses_are_those_of_the_prompt_that_is_computed_and_a_streaming_one_always_is(source):
    prompts = builder_of(open_checkpoint(source), dtype=torch.float32)
    spoken = SpokenRows(prompts)
    for request in map(prompts.check, SPOKEN[source]):
        computed, found = prompts.of_checked(request), prompts.of_checked(request, spoken)
        assert isinstance(found.embeds, AddressedRows) and found.embeds.shape == tuple(computed.embeds.shape)
        torch.testing.assert_close(read(found.embeds), computed.embeds, rtol=1e-5, atol=1e-6)
        same = ("prefix_rows", "prefix_key", "text_tokens")
        assert all(getattr(found, name) == getattr(computed, name) for name in same)
        assert torch.equal(found.row(3), computed.row(3)) and torch.equal(rest_of(found), rest_of(computed))
        assert torch.equal(read(found.embeds)[: found.prefix_rows], computed.embeds[: found.prefix_rows])
        streaming = replace(request, layout="streaming")
        assert torch.equal(prompts.of_checked(streaming, spoken).embeds, prompts.of_checked(streaming).embeds)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_read_on_the_host_give_the_bits_of_a_table_on_the_device(tiny, dtype):
    uploaded = {name: tensor.cuda() for name, tensor in tiny.tensors().items()}
    ours, theirs = builder_of(tiny, "cuda", dtype=dtype), builder_of(tiny, "cuda", uploaded, dtype)
    for request in REQUESTS:
        assert torch.equal(rows_of(ours, request), rows_of(theirs, request))
    assert torch.equal(fed_rows_of(ours), fed_rows_of(theirs))


@pytest.mark.gpu
def test_the_text_table_takes_no_memory_of_the_device(tiny):
    table = tiny.tensors()["talker.model.text_embedding.weight"]
    before = torch.cuda.memory_allocated()
    builder = builder_of(tiny, "cuda")
    assert torch.cuda.memory_allocated() - before < table.nbytes
    assert builder.text_rows([1, 2]).is_cuda
