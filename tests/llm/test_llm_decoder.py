"""The text oracle against transformers' Qwen3ForCausalLM; the token stream against a stand-in; the text kernel against
the oracle, on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from mktts.errors import BackendUnavailable, CapacityError, EngineError, OptionsError, PromptError, TextError
from mktts.kernel.grid import choose_text_shape
from mktts.kernel.prefill import Prefill, kept_of_cache
from mktts.kernel.tape import pack_wide_head
from mktts.llm.backend import TextKernelBackend, TorchTextBackend
from mktts.llm.checkpoint import TextCheckpoint, open_text_checkpoint
from mktts.llm.decoder import TextDecoder
from mktts.model.qwen3 import Qwen3Stack
from mktts.model.sampling import Choice, choose, distribution, gumbel

GREEDY = Choice(do_sample=False)
CHOICES = {
    "greedy": GREEDY,
    "released": Choice(temperature=0.6, top_k=20, top_p=0.95),
    "top-k": Choice(temperature=0.9, top_k=20),
    "hot, no filter": Choice(temperature=1.5, top_k=0),
    "top-p of all": Choice(temperature=1.0, top_k=0, top_p=0.5),
}
PROMPT = "Hello world, this is the weather today: user question, please answer."


@pytest.fixture(scope="module")
def tiny(checkpoint_cache: None) -> TextCheckpoint:
    return open_text_checkpoint("random:tiny")


@cache
def pair(size: str, dtype: torch.dtype) -> tuple[TextDecoder, Qwen3ForCausalLM]:
    decoder = TextDecoder.load(f"random:{size}", device="cpu", dtype=dtype)
    return decoder, Qwen3ForCausalLM.from_pretrained(decoder.checkpoint.folder, dtype=dtype).eval()


def backend_of(checkpoint: TextCheckpoint, dtype: torch.dtype = torch.float32, device: str = "cpu") -> TorchTextBackend:
    return TorchTextBackend(checkpoint.config, checkpoint.tensors(), device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", ["tiny", "tiny-untied"])
def test_logits_and_greedy_tokens_are_those_of_transformers(size, dtype):
    """Logits of the prompt at once, then row by row, both with forced tokens: bit for bit, in bfloat16 too."""
    decoder, model = pair(size, dtype)
    ids = decoder.vocabulary.encode(PROMPT)
    backend = backend_of(decoder.checkpoint, dtype)
    state = backend.start(torch.tensor(ids), GREEDY, 0, 8)
    with torch.inference_mode():
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        for forced in (5, 151_643, 77_091, 5):
            assert torch.equal(backend.logits(state), out.logits[0, -1].float())
            state.last = forced
            out = model(torch.tensor([[forced]]), past_key_values=out.past_key_values, use_cache=True)
    for prompt, tokens in ((ids, 32), ([9], 2)):
        made = decoder.generate(prompt, choice=GREEDY, max_tokens=tokens)
        text, whole = made.read(), torch.tensor([prompt])
        theirs = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=tokens, do_sample=False)
        assert made.ids == theirs[0, len(prompt) :].tolist() and len(set(made.ids)) > tokens // 3
        assert text == b"".join(map(decoder.vocabulary.data, made.ids)).decode(errors="replace")


@pytest.mark.parametrize(
    "choice", [None, Choice(temperature=1.5, top_k=0, top_p=0.7), Choice(top_k=5)], ids=["own", "top-p", "top-k"]
)
def test_the_distribution_before_the_draw_is_that_of_transformers(choice):
    """None: what generation_config.json says, as transformers' generate reads it by itself."""
    decoder, model = pair("tiny", torch.bfloat16)
    ids = decoder.vocabulary.encode(PROMPT)
    settings = {} if choice is None else {**vars(choice)}
    settings |= {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    made = model.generate(torch.tensor([ids]), **settings)
    backend = backend_of(decoder.checkpoint, torch.bfloat16)
    logits = backend.logits(backend.start(torch.tensor(ids), GREEDY, 0, 1))
    assert torch.equal(distribution(logits, choice or decoder.choice), made.scores[0][0].softmax(-1))


def test_token_i_is_the_draw_of_frame_i(tiny):
    """score + Gumbel noise of (seed, token index, codebook 0), over the kept ids: what every backend must draw."""
    backend, choice = backend_of(tiny), Choice(temperature=1.3, top_k=40, top_p=0.9)
    state = backend.start(torch.tensor([5, 6, 7]), choice, 2**40 + 3, 6)
    ids, expected = [], []
    for index in range(6):
        scores = backend.logits(state) / choice.temperature
        kept = distribution(backend.logits(state), choice) > 0
        noise = torch.from_numpy(gumbel(2**40 + 3, index, range(1), len(scores)))[0]
        expected.append(int((scores.masked_fill(~kept, -torch.inf) + noise).argmax()))
        ids.append(backend.step(state))
    assert ids == expected and 1 < int(kept.sum()) <= 40


def test_a_seed_repeats_also_for_streams_that_take_turns(tiny):
    decoder = TextDecoder.load(tiny, device="cpu")
    streams = [decoder.generate(PROMPT, seed=seed, max_tokens=12) for seed in (1, 1, 2)]
    interleaved = [[token.id for token in group] for group in zip(*streams, strict=True)]
    first, same, other = ([row[i] for row in interleaved] for i in range(3))
    assert first == same != other
    assert len({decoder.generate(PROMPT, max_tokens=1).seed for _ in range(3)}) == 3


@dataclass
class FakeBackend:
    """Gives `ids` one after the other, whatever the prompt; its state is what was made."""

    ids: Sequence[int]
    name: str = "fake"
    calls: int = 0
    started: list[tuple[list[int], Choice, int, int]] = field(default_factory=list)

    def start(self, prompt: Tensor, *choice_seed_and_most: Any) -> list[int]:
        self.started.append((prompt.tolist(), *choice_seed_and_most[:3]))
        return []

    def step(self, state: list[int]) -> int:
        self.calls += 1
        state.append(self.ids[len(state) % len(self.ids)])
        return state[-1]


def faked(tiny: TextCheckpoint, ids: Sequence[int]) -> tuple[TextDecoder, FakeBackend]:
    backend = FakeBackend(ids)
    return TextDecoder(backend, tiny), backend


def test_a_stream_ends_at_max_tokens_or_at_an_end_id_unless_that_is_passed_over(tiny):
    first, second = tiny.config.eos_ids
    for ids, how, made, reason in (
        ([10, 11, 12], {"max_tokens": 5, "choice": GREEDY}, [10, 11, 12, 10, 11], "max_tokens"),
        ([10, 11, first, second], {}, [10, 11, first], "eos"),
        ([10, 11, first, second], {"max_tokens": 5, "stop_at_eos": False}, [10, 11, first, second, 10], "max_tokens"),
    ):
        decoder, backend = faked(tiny, ids)
        stream = decoder.generate([1, 2], seed=7, **how)
        assert stream.finish_reason is None and stream.seed == 7
        tokens = list(stream)
        assert stream.ids == [token.id for token in tokens] == made and stream.finish_reason == reason
        asked = ([1, 2], how.get("choice", tiny.config.choice), 7, how.get("max_tokens", 256))
        assert backend.started == [asked] and backend.calls == len(made)
        assert 0 < tokens[0].ready_ms <= tokens[-1].ready_ms and list(stream) == []
        assert tokens[-1].text == "" or reason != "eos"


def test_no_token_splits_a_character(tiny):
    text = "ü🙂語"
    vocabulary = tiny.tokenizer()
    by_byte = {vocabulary.data(i): i for i in range(256)}
    ids = [by_byte[bytes([byte])] for byte in text.encode()]
    decoder, _ = faked(tiny, ids)
    pieces = [token.text for token in decoder.generate("Hello", max_tokens=len(ids))]
    assert [piece for piece in pieces if piece] == list(text) and len(pieces) == len(ids)
    assert decoder.generate("Hello", max_tokens=1).read() == "\ufffd"  # the end inside a character


def test_a_cancel_a_failure_and_the_decoders_end_each_end_a_stream_in_its_way(tiny):
    decoder, backend = faked(tiny, [10, 11, 12])
    with decoder.generate("Hello") as stream:
        assert next(stream).id == 10
        stream.cancel()
    assert list(stream) == [] and stream.finish_reason == "cancelled" and stream.ids == [10]
    assert backend.calls == 1 and stream.state is None
    with decoder.generate("Hello") as left:
        next(left)
    assert left.finish_reason == "cancelled"
    with decoder:
        stream = decoder.generate("Hello", max_tokens=3)
    assert len(list(stream)) == 3
    stream.cancel()
    assert stream.finish_reason == "max_tokens"
    with pytest.raises(EngineError, match="closed"):
        decoder.generate("Hello")
    decoder, backend = faked(tiny, [10])
    broken = decoder.generate("Hello")
    next(broken)
    backend.ids = []  # the next step divides by their number
    with pytest.raises(ZeroDivisionError):
        next(broken)
    assert broken.ids == [10] and broken.finish_reason is None and list(broken) == []


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "message"),
    [
        *((none, {}, TextError, "at least one token") for none in ("", [])),
        (7, {}, TextError, "text or a list of token ids, got int"),
        *((bad, {}, TextError, "list of token ids") for bad in ([1, 2.5], [True])),
        ("half \ud800", {}, TextError, "surrogate"),
        *(([id], {}, PromptError, f"from 0 to 151935, got {id}") for id in (151_936, -1, 2**70)),
        ([1] * 40_000, {"max_tokens": 961}, CapacityError, "40960 positions"),
        ([1], {"max_tokens": 0}, OptionsError, "max_tokens"),
        *(([1], {"seed": seed}, OptionsError, "seed") for seed in (-1, 1.5)),
    ],
)
def test_a_bad_request_is_named_before_the_model_runs(tiny, prompt, settings, error, message):
    decoder, backend = faked(tiny, [10])
    with pytest.raises(error, match=message):
        decoder.generate(prompt, **settings)
    assert backend.started == []


def test_the_kernel_serves_where_it_can_auto_says_why_not_and_what_cannot_be_loaded_is_named(tiny, monkeypatch, caplog):
    """On a pretended CUDA device, with a stand-in for the kernel."""

    made: list[tuple[Any, ...]] = []
    kernel = "mktts.llm.decoder.TextKernelBackend"
    monkeypatch.setattr(kernel, lambda *words: made.append(words) or FakeBackend([1], "megakernel"))
    monkeypatch.setattr("mktts.llm.decoder.device_named", lambda name: torch.device("cuda"))
    monkeypatch.setattr("mktts.llm.decoder.TorchTextBackend", lambda *words: FakeBackend([1], "torch"))
    assert TextDecoder.load(tiny).backend_name == "megakernel"
    config, tensors, device, dtype = made[0]
    assert config == tiny.config and "lm_head.weight" not in tensors
    assert (device.type, dtype) == ("cuda", torch.bfloat16)
    assert TextDecoder.load(tiny, dtype=torch.float32).backend_name == "torch"
    monkeypatch.setattr(kernel, Mock(side_effect=BackendUnavailable("no room for its grid")))
    assert TextDecoder.load(tiny).backend_name == "torch" and "no room for its grid" in caplog.text
    with pytest.raises(BackendUnavailable, match="no room"):
        TextDecoder.load(tiny, backend="megakernel")
    monkeypatch.undo()
    for settings, message in (
        ({"backend": "upstream"}, "backend must be one of"),
        ({"device": "abacus"}, "abacus"),
        ({"backend": "megakernel", "device": "cpu"}, "megakernel"),
    ):
        with pytest.raises(BackendUnavailable, match=message):
            TextDecoder.load(tiny, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("choice", "dtype"),
    [
        (GREEDY, torch.float32),
        (GREEDY, torch.bfloat16),
        (Choice(temperature=4.0, top_k=20), torch.float32),  # a temperature at which the runners-up do come
    ],
)
def test_tokens_on_cuda_are_those_of_the_cpu_where_margins_are_wide(choice, dtype):
    checkpoint, prompt = open_text_checkpoint("random:tiny:margin"), torch.tensor([1, 2, 3])
    backends = [backend_of(checkpoint, dtype, device) for device in ("cpu", "cuda")]
    states = [backend.start(prompt, choice, 5, 60) for backend in backends] + [backends[0].start(prompt, GREEDY, 0, 60)]
    by_state = zip([*backends, backends[0]], states, strict=True)
    here, there, greedy = ([backend.step(state) for _ in range(60)] for backend, state in by_state)
    assert here == there and (greedy == here) is (choice == GREEDY)


# ---- the kernel


def kernel_of(checkpoint: TextCheckpoint) -> TextKernelBackend:
    return TextKernelBackend(checkpoint.config, checkpoint.tensors(), "cuda", torch.bfloat16)


def test_a_wide_head_gives_every_row_to_one_block(tiny):
    rows, width = 5_000, 64
    weight = torch.arange(1, rows + 1, dtype=torch.float32)[:, None].expand(rows, width)  # a row is its number
    packed = pack_wide_head(choose_text_shape(tiny.config.stack, 132), weight)
    assert torch.equal(torch.bincount(packed.flatten().long(), minlength=rows + 1)[1:], torch.full((rows,), width))


@pytest.mark.parametrize("keep", [1, 7, 8, 31])
def test_the_kernels_prefill_goes_on_from_a_cache(tiny, keep):
    """On the CPU."""
    c, tensors = tiny.config.stack, tiny.tensors()
    prefill = Prefill(Qwen3Stack(c, tensors, "model.", torch.device("cpu"), torch.float32))
    rows = tensors["model.embed_tokens.weight"][:40].float()
    before, whole, resumed = torch.zeros(3, c.num_hidden_layers, c.num_key_value_heads, 4, 12, 2, c.head_dim)
    prefill.fill(rows[:32], before)
    wanted = prefill.fill(rows, whole)
    found = prefill.go_on(rows, resumed, kept_of_cache(before, keep))
    torch.testing.assert_close((found, resumed), (wanted, whole), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny:margin", "random:0.6b:margin"])
def test_greedy_tokens_are_the_oracles_where_margins_are_wide(source):
    checkpoint = open_text_checkpoint(source)
    oracle, kernel = backend_of(checkpoint, torch.bfloat16, "cuda"), kernel_of(checkpoint)
    for prompt in (torch.arange(1, 2), torch.arange(5, 45)):
        theirs, ours = (backend.start(prompt, GREEDY, 0, 100) for backend in (oracle, kernel))
        assert [kernel.step(ours) for _ in range(100)] == [oracle.step(theirs) for _ in range(100)]


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:0.6b"])
@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_the_choosers_on_the_kernels_own_logits(name, source):
    checkpoint, choice = open_text_checkpoint(source), CHOICES[name]
    kernel, size = kernel_of(checkpoint), checkpoint.config.stack.vocab_size
    state = kernel.start(torch.arange(7, 20), choice, 11, 60)
    debug = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    for index in range(60):
        token = kernel.step(state, debug)
        (noise,) = torch.from_numpy(gumbel(11, index, range(1), size))
        assert token == int(choose(debug.float().cpu(), choice, noise)), index


@pytest.mark.gpu
@pytest.mark.parametrize("context", [33, 1_000, 1_900])
def test_its_logits_are_no_further_from_fp32_than_the_oracles(context):
    checkpoint = open_text_checkpoint("random:0.6b")
    kernel = kernel_of(checkpoint)
    bf16, fp32 = (backend_of(checkpoint, dtype, "cuda") for dtype in (torch.bfloat16, torch.float32))
    states = [backend.start(torch.arange(7, 7 + context), GREEDY, 0, 40) for backend in (kernel, bf16, fp32)]
    debug = torch.zeros(checkpoint.config.stack.vocab_size, dtype=torch.bfloat16, device="cuda")
    squares = torch.zeros(2)
    for _ in range(40):
        token = kernel.step(states[0], debug)
        theirs, exact = (b.logits(s) for b, s in zip((bf16, fp32), states[1:], strict=True))
        states[1].last = states[2].last = token
        squares += torch.stack([(x - exact).square().mean() for x in (debug.float(), theirs)]).cpu()
    ours, oracle = (squares / 40).sqrt().tolist()
    assert ours <= 1.1 * oracle


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:0.6b"])
def test_a_prompt_that_goes_on_from_a_state_gives_the_logits_of_the_whole_prompt(source):
    """And from another state it does not: what is kept is what is attended to."""
    checkpoint = open_text_checkpoint(source)
    kernel = kernel_of(checkpoint)
    debug = torch.zeros(checkpoint.config.stack.vocab_size, dtype=torch.bfloat16, device="cuda")

    def logits(state):
        kernel.step(state, debug)
        return debug.float()

    first, other = torch.arange(7, 60), torch.arange(900, 953)
    spoken, another = (kernel.start(ids, GREEDY, 0, 64) for ids in (first, other))
    made, _ = ([kernel.step(state) for _ in range(20)] for state in (spoken, another))
    keep = len(first) + len(made) - 1
    prompt = torch.tensor([*first.tolist(), *made, *range(300, 317)])
    befores = (None, (spoken, keep), (another, keep))
    whole, kept, wrong = (logits(kernel.start(prompt, GREEDY, 0, 8, before)) for before in befores)
    error, control = ((found - whole).norm() / whole.norm() for found in (kept, wrong))
    assert error < 0.05 and control > 3 * error
