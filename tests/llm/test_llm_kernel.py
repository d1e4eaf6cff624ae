"""The text kernel against the torch oracle, on a GPU; its packing anywhere."""

import pytest
import torch

from mktts.kernel.grid import Shape, choose_text_shape
from mktts.kernel.tape import pack_wide_head
from mktts.llm.backend import TextKernelBackend, TorchTextBackend
from mktts.llm.checkpoint import open_text_checkpoint
from mktts.model.sampling import Choice, choose, gumbel

GREEDY = Choice(do_sample=False)
CHOICES = {
    "greedy": GREEDY,
    "released": Choice(temperature=0.6, top_k=20, top_p=0.95),
    "top-k": Choice(temperature=0.9, top_k=20),
    "hot, no filter": Choice(temperature=1.5, top_k=0),
    "top-p of all": Choice(temperature=1.0, top_k=0, top_p=0.5),
}


def backend_of(checkpoint, kind=TextKernelBackend):
    return kind(checkpoint.config, checkpoint.tensors(), "cuda", torch.bfloat16)


def test_a_wide_head_gives_every_row_to_one_block():
    shape: Shape = choose_text_shape(open_text_checkpoint("random:tiny").config.stack, 132)
    rows, width = 5_000, 64
    weight = torch.arange(1, rows + 1, dtype=torch.float32)[:, None].expand(rows, width)  # a row is its number
    packed = pack_wide_head(shape, weight)
    counts = torch.bincount(packed.flatten().long(), minlength=rows + 1)
    assert torch.equal(counts[1:], torch.full((rows,), width))


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny:margin", "random:0.6b:margin"])
def test_greedy_tokens_are_the_oracles_where_margins_are_wide(source):
    checkpoint = open_text_checkpoint(source)
    oracle, kernel = backend_of(checkpoint, TorchTextBackend), backend_of(checkpoint)
    for prompt in (torch.arange(1, 2), torch.arange(5, 45)):
        theirs, ours = (backend.start(prompt, GREEDY, 0, 100) for backend in (oracle, kernel))
        assert [kernel.step(ours) for _ in range(100)] == [oracle.step(theirs) for _ in range(100)]


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:0.6b"])
@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_the_choosers_on_the_kernels_own_logits(name, source):
    checkpoint, choice = open_text_checkpoint(source), CHOICES[name]
    kernel, size = backend_of(checkpoint), checkpoint.config.stack.vocab_size
    state = kernel.start(torch.arange(7, 20), choice, 11, 60)
    debug = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    for index in range(60):
        token = kernel.step(state, debug)
        logits = debug.float().cpu()
        (noise,) = torch.from_numpy(gumbel(11, index, range(1), size))
        assert token == int(choose(logits, choice, noise)), index


@pytest.mark.gpu
@pytest.mark.parametrize("context", [33, 1_000, 1_900])
def test_its_logits_are_no_further_from_fp32_than_the_oracles(context):
    checkpoint = open_text_checkpoint("random:0.6b")
    config, tensors = checkpoint.config, checkpoint.tensors()
    kernel = backend_of(checkpoint)
    bf16, fp32 = (TorchTextBackend(config, tensors, "cuda", dtype) for dtype in (torch.bfloat16, torch.float32))
    states = [backend.start(torch.arange(7, 7 + context), GREEDY, 0, 40) for backend in (kernel, bf16, fp32)]
    debug = torch.zeros(config.stack.vocab_size, dtype=torch.bfloat16, device="cuda")
    squares = torch.zeros(2)
    for _ in range(40):
        token = kernel.step(states[0], debug)
        theirs, exact = (b.logits(s) for b, s in zip((bf16, fp32), states[1:], strict=True))
        states[1].last = states[2].last = token
        squares += torch.stack([(x - exact).square().mean() for x in (debug.float(), theirs)]).cpu()
    ours, oracle = (squares / 40).sqrt().tolist()
    print(f"rms error to fp32: kernel {ours:.4f}, oracle bf16 {oracle:.4f}")
    assert ours <= 1.1 * oracle


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:0.6b"])
def test_a_prompt_that_goes_on_from_a_state_gives_the_logits_of_the_whole_prompt(source):
    """And from another state it does not: what is kept is what is attended to."""
    checkpoint = open_text_checkpoint(source)
    kernel = backend_of(checkpoint)
    debug = torch.zeros(checkpoint.config.stack.vocab_size, dtype=torch.bfloat16, device="cuda")

    def logits(state):
        kernel.step(state, debug)
        return debug.float()

    first, other = torch.arange(7, 60), torch.arange(900, 953)
    spoken = kernel.start(first, GREEDY, 0, 64)
    made = [kernel.step(spoken) for _ in range(20)]
    another = kernel.start(other, GREEDY, 0, 64)
    for _ in range(20):
        kernel.step(another)
    keep = len(first) + len(made) - 1
    prompt = torch.tensor([*first.tolist(), *made, *range(300, 317)])
    whole = logits(kernel.start(prompt, GREEDY, 0, 8))
    kept = logits(kernel.start(prompt, GREEDY, 0, 8, (spoken, keep)))
    wrong = logits(kernel.start(prompt, GREEDY, 0, 8, (another, keep)))
    error, control = ((found - whole).norm() / whole.norm() for found in (kept, wrong))
    print(f"{source}: relative error {error:.4f}, from another state {control:.4f}")
    assert error < 0.05 and control > 3 * error
