"""Token ids against transformers' own Qwen2 tokenizer, and against themselves when the text comes in parts; rows that
prompts look up; the oracle's state and borders, and the same codes on CUDA as on the CPU."""

import ctypes
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.errors import CapacityError, CheckpointError, PromptError, SamplingError, TextError
from mktts.measure.parity.upstream import our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.prompt import AddressedRows, FedPrompt, Prompt, PromptBuilder, Request, SpokenRows, gather, numbers
from mktts.model.sampling import Sampling
from mktts.model.tokenizer import IncrementalTokenizer, TextTokenizer
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS

TEXTS = [
    "iPhone",
    "My iPhone runs JavaScript, YouTube and GitHub; NaN is not LaTeX.",
    "สวัสดีครับ ภาษาไทย กำลังเรียน",
    "Call 0123456789 at 3.14 or 1,000 ²½ ٣٤",
    "don't DON'T I'll we've HE'S 'tis rock'n'roll x'",
    "你好，世界。今天天气很好！「こんにちは」 안녕하세요",
    "e\u0301 \u00e9 \u1100\u1161\u11a8 \u0915\u094d\u0937 a\u0316\u0301 \u212b",
    "👩‍👩‍👧‍👦 🇩🇪 1️⃣ 😀😀",
    "def f(x):\n\treturn x**2  # square\r\n\r\n\n  if (a != b) { }",
    "  two  spaces\u3000wide\u00a0hard \t tab\n \n end  ",
    "assistant user assistants\n\nuser",
    "\x00 \x07 \x1c \x7f \u200b \u2028 \ufeff",
]
# every kind of character whose neighbours can change how it is cut, composed or stripped
PARTS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\u3000", "\x1c", "\x85", "'", "'s", "'t", "re", "ll", "a", "Z", "the", "iPhone"]
    + ["1", "²", ".", "!", "...", "-", "/", "e", "\u0301", "\u0316", "\u030a", "A", "か", "\u3099", "\u1100", "\u1161"]
    + ["\u11a8", "각", "ส", "\u0e35", "\u09c7", "\u09be", "好", "，", "😀", "\u200d", "\ufe0f", "=", "\u0338", "\x00"]
)
REQUESTS = [
    Request("Some words.", speaker="ryan"),
    Request("Other words, and more of them.", speaker="ryan", language="english", layout="streaming"),
]
SPOKEN = {
    "random:tiny": [Request("Hello there, you."), Request("Yes", language="english"), Request("No " * 40)],
    "random:tiny:voice_design": [Request("Hello you.", instruct="A low voice, slowly."), Request("Hello you.")],
}
TEXT = Request("Some words, spoken in the streaming layout.", speaker="ryan", layout="streaming")


@pytest.fixture(scope="module")
def tokenizer(tiny: Checkpoint) -> TextTokenizer:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def reference(tiny: Checkpoint) -> object:
    """transformers' tokenizer on the same files, as it treats a Hub id."""
    from transformers import Qwen2TokenizerFast

    return Qwen2TokenizerFast.from_pretrained(tiny.folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_transformers_ids(tokenizer, reference, text):
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_are_transformers_ids_for_any_text(tokenizer, reference, text):
    """Any but the added tokens' own, which hypothesis finds in the package's source: here those are characters."""
    assume(not any(added in text for added in reference.get_added_vocab()))
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_the_prompt_layout_ids_are_upstreams_and_special_tokens_in_the_text_stay_text(tokenizer, tiny, reference):
    ids = tiny.config.text_ids
    wrapped = "<|im_start|>assistant\niPhone<|im_end|>\n<|im_start|>assistant\n"
    newline = tokenizer.encode("\n")
    role = [ids.im_start, ids.assistant, *newline]
    assert reference(wrapped)["input_ids"] == [*role, *tokenizer.encode("iPhone"), ids.im_end, *newline, *role]
    assert tokenizer.encode("assistant") == [ids.assistant]
    assert tokenizer.encode("2024") == [tokenizer.encode(digit)[0] for digit in "2024"]
    assert reference("<tts_pad><tts_text_bos><tts_text_eod>")["input_ids"] == [ids.tts_pad, ids.tts_bos, ids.tts_eos]
    assert max(tokenizer.encode("a <|im_end|> <|im_start|> <tts_pad> b")) < ids.im_start - 1


@pytest.mark.parametrize("bad", [None, b"bytes", 3, "half a pair \ud83d"])
def test_what_is_not_text_is_refused(tokenizer, bad):
    with pytest.raises(TextError, match="expected"):
        tokenizer.encode(bad)
    with pytest.raises(TextError, match="expected"):
        IncrementalTokenizer(tokenizer).push(bad)


def test_broken_tokenizer_files_and_the_vocabulary_of_another_model_are_named(tiny, tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"vocab.json: expected a BPE vocabulary"):
        TextTokenizer.load(tmp_path)
    folder = Path(shutil.copytree(tiny.folder, tmp_path / "copy"))
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["assistant"], vocab["user"] = vocab["user"], vocab["assistant"]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(CheckpointError, match=r"expected 'assistant' to be the one token 77091 .*found \[872\]"):
        open_checkpoint(folder).tokenizer()


@settings(max_examples=250, deadline=None)
@given(parts=st.lists(PARTS | st.text(max_size=4), max_size=25))
def test_any_split_of_a_text_gives_the_ids_of_the_whole(tokenizer, parts):
    whole = tokenizer.encode("".join(parts).strip())
    incremental = IncrementalTokenizer(tokenizer)
    ids: list[int] = []
    for part in parts:
        ids += incremental.push(part)
        assert ids == whole[: len(ids)]
    assert ids + incremental.finish() == whole


def test_ids_come_as_soon_as_nothing_can_change_them(tokenizer):
    incremental = IncrementalTokenizer(tokenizer)
    assert incremental.push("  the") == []  # could become "then"
    assert incremental.push(" ") == tokenizer.encode("the")
    assert incremental.push("world") == []
    assert incremental.push(".") == tokenizer.encode(" world")
    assert incremental.push("\n") == []  # a line break joins the full stop, unless the text ends here
    assert incremental.finish() == tokenizer.encode(".")
    with pytest.raises(TextError, match="finished"):
        incremental.push("more")


# ---- rows: kept ones stay as they were made, and those at addresses are those that are computed


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


# ---- the oracle


def made(checkpoint, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[TorchBackend, Prompt]:
    prompt = builder_of(checkpoint, device, dtype=dtype).build(TEXT)
    return TorchBackend(checkpoint.config, checkpoint.tensors(), device, dtype), prompt


def run(backend: TorchBackend, prompt: Prompt, state: TorchStream, frames: int) -> torch.Tensor:
    codes = [backend.step(state, prompt.row(state.frames - 1) if state.frames else None).codes for _ in range(frames)]
    return torch.stack(codes)


@pytest.mark.parametrize("rng", ["philox", "torch"])
def test_a_copied_stream_goes_on_alike_and_apart(tiny, rng):
    backend, prompt = made(tiny)
    state = backend.start(prompt, Sampling(rng=rng), seed=3, max_frames=12)
    run(backend, prompt, state, 4)
    fork = state.copy()
    rest = run(backend, prompt, state, 6)
    assert torch.equal(run(backend, prompt, fork, 6), rest)
    assert fork.cache.memory.data_ptr() != state.cache.memory.data_ptr()


def test_a_stream_keeps_nothing_for_a_gradient(tiny):
    backend, prompt = made(tiny)
    embeds = prompt.embeds.detach().clone().requires_grad_()
    state = backend.start(PromptRows(embeds), Sampling(), 3, 4)
    assert not state.head_rows.requires_grad and not state.cache.memory.requires_grad
    assert not backend.code0_logits(state).requires_grad
    assert state.head_rows.is_inference()


def test_rows_in_pieces_see_what_they_see_at_once(tiny):
    talker = made(tiny)[0].talker
    rows, cache = torch.randn(9, tiny.config.talker.hidden_size), talker.new_cache(9)
    pieces = torch.cat([talker.advance(some, [cache], [len(some)]) for some in rows.split([4, 3, 1, 1])])
    torch.testing.assert_close(pieces, talker.advance(rows, [talker.new_cache(9)], [9]), atol=1e-5, rtol=1e-5)


def test_draws_follow_all_of_the_seed_and_the_generator(tiny):
    backend, prompt = made(tiny)
    seeds = (1, 1, 2, 1 + 2**32, 2**64 - 1)
    codes = {rng: [our_codes(backend, prompt, Sampling(rng=rng), s, 6) for s in seeds] for rng in ("philox", "torch")}
    for first, again, other, *_ in codes.values():
        assert torch.equal(first, again) and not torch.equal(first, other)
    first, *others = codes["philox"]
    assert not any(torch.equal(first, other) for other in (*others[2:], codes["torch"][0]))  # torch: 32 bits of a seed


def test_borders(tiny):
    backend, prompt = made(tiny)
    state = backend.start(prompt, Sampling().greedy(), 0, max_frames=2)
    run(backend, prompt, state, 2)
    with pytest.raises(CapacityError, match="at most 2"):
        backend.step(state, prompt.row(1))
    for max_frames in (0, 10**7):
        with pytest.raises(CapacityError, match="max_frames"):
            backend.start(prompt, Sampling(), 0, max_frames)
    for rng in ("philox", "torch"):
        with pytest.raises(SamplingError, match="seed"):
            backend.start(prompt, Sampling(rng=rng), -1, 4)
    with pytest.raises(PromptError, match=str(tiny.config.talker.hidden_size)):
        backend.start(PromptRows(torch.zeros(5, 7)), Sampling(), 0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_codes_on_cuda_are_those_of_the_cpu_where_margins_are_wide(tiny_margin, dtype):
    codes = [our_codes(*made(tiny_margin, device, dtype), Sampling().greedy(), 0, 40) for device in ("cpu", "cuda")]
    assert codes[0].shape == (40, NUM_CODEBOOKS) and torch.equal(*codes)
