"""The oracle's state and borders, and the same codes on CUDA as on the CPU."""

import pytest
import torch

from mktts.errors import CapacityError, PromptError, SamplingError
from mktts.measure.parity.upstream import our_codes
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend, TorchStream
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

TEXT = Request("Some words, spoken in the streaming layout.", speaker="ryan", layout="streaming")


def made(checkpoint, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[TorchBackend, Prompt]:
    tensors = checkpoint.tensors()
    builder = PromptBuilder(checkpoint.config, tensors, checkpoint.tokenizer(), device, dtype)
    return TorchBackend(checkpoint.config, tensors, device, dtype), builder.build(TEXT)


def run(backend: TorchBackend, prompt: Prompt, state: TorchStream, frames: int) -> torch.Tensor:
    made_frames = []
    for _ in range(frames):
        text = prompt.row(state.frames - 1) if state.frames else None
        made_frames.append(backend.step(state, text).codes)
    return torch.stack(made_frames)


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
