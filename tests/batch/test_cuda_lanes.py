"""Many utterances in one tick against the oracle, one by one: random joins, skipped ticks, early ends, used slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Choice, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHOICES = (
    Choice(do_sample=False),
    Choice(temperature=2.0, top_k=10),
    Choice(temperature=2.0, top_k=20, top_p=0.8),
    Choice(temperature=1.5, top_k=0),
)
FRAMES, STREAMS, SLOTS = 10, 24, 12


@pytest.mark.parametrize("checkpoint", ["tiny_margin", "tiny_projected"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_codes_are_the_oracles_under_random_joins_skips_and_ends(request, checkpoint, graphs):
    from mktts.batch.cuda_lanes import CudaLanes

    opened = request.getfixturevalue(checkpoint)
    config, tensors, device = opened.config, opened.tensors(), torch.device("cuda")
    oracle = TorchBackend(config, tensors, device, torch.float32)
    lanes = CudaLanes(config, tensors, device, torch.float32, SLOTS, 256, 4 * SLOTS, graphs=graphs)
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def random_rows(count: int) -> torch.Tensor:
        return 0.5 * torch.randn(count, config.talker.hidden_size, generator=generator).to(device)

    prompts = [random_rows(int(rng.integers(2, 90))) for _ in range(STREAMS)]
    texts = [random_rows(FRAMES) for _ in range(STREAMS)]
    settings = [replace(Sampling(), talker=CHOICES[i % 4], predictor=CHOICES[i % 4]) for i in range(STREAMS)]
    seeds = [1_000 + i + (7 << 33) for i in range(STREAMS)]
    length = [int(rng.integers(3, FRAMES + 1)) for _ in range(STREAMS)]
    wanted = [of_the_oracle(oracle, *of) for of in zip(prompts, settings, seeds, texts, length, strict=True)]

    todo, slot_of, got = list(range(STREAMS)), {}, [[] for _ in range(STREAMS)]
    while todo or slot_of:
        while todo and len(slot_of) < SLOTS and rng.random() < 0.5:
            i = todo.pop(0)
            slot_of[i] = lanes.start(prompts[i], settings[i], seeds[i], FRAMES)
        going = [i for i in slot_of if rng.random() < 0.7]
        rng.shuffle(going)
        if not going:
            continue
        rows = [texts[i][len(got[i]) - 1] if got[i] else None for i in going]
        for i, codes in zip(going, lanes.tick([slot_of[i] for i in going], rows), strict=True):
            got[i].append(codes)
            if codes is None or len(got[i]) == length[i]:
                lanes.free(slot_of.pop(i))
    for i in range(STREAMS):
        assert len(got[i]) == len(wanted[i]), i
        for mine, theirs in zip(got[i], wanted[i], strict=True):
            assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs)), i


def of_the_oracle(oracle, prompt, sampling, seed, text, length):
    state, found = oracle.start(PromptRows(prompt), sampling, seed, length), []
    while len(found) < length and not state.ended:
        found.append(oracle.step(state, text[len(found) - 1] if found else None).codes)
    return found
