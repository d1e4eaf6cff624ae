"""The chooser of `mktts.model.sampling`, given a backend's own logits, against the codes it drew from them."""

from dataclasses import replace

import pytest
import torch
from test_megakernel import TEXT, kernel_of, prompt_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mktts.checkpoint import open_checkpoint
from mktts.measure.parity.kernel import forced
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder
from mktts.model.sampling import Choice, Sampling, choose, gumbel, restrict
from mktts.spec import NUM_CODEBOOKS, ModelConfig

FRAMES = 200
NUCLEUS, HOT = Choice(top_p=0.8), Choice(temperature=1.3, top_k=0)
SETTINGS = {
    "greedy": Sampling().greedy(),
    "released": Sampling(),
    "top-p": Sampling(NUCLEUS, NUCLEUS),
    "top-p of all": Sampling(replace(NUCLEUS, top_k=0), replace(NUCLEUS, top_k=0)),
    "hot, no filter": Sampling(HOT, HOT),
    "penalty": Sampling(repetition_penalty=1.2),
    "greedy with a penalty": Sampling(repetition_penalty=1.2).greedy(),
    "greedy talker": Sampling(Choice(do_sample=False), Choice(temperature=0.5, top_k=7)),
}


def chosen(logits: Tensor, history: Tensor, config: ModelConfig, sampling: Sampling, seed: int) -> list[int]:
    """The sixteen codes, on the CPU, of the raw logits (16, vocabulary) of the frame after `history` (N,)."""
    logits, frame = logits.float().cpu(), len(history)
    scores = restrict(logits[0], history, sampling.repetition_penalty, config.codec_ids.eos)
    (noise,) = torch.from_numpy(gumbel(seed, frame, range(1), len(scores)))
    codes = [int(choose(scores, sampling.talker, noise))]
    size = config.predictor.vocab_size
    noises = torch.from_numpy(gumbel(seed, frame, range(1, NUM_CODEBOOKS), size))
    return codes + [
        int(choose(row, sampling.predictor, noise)) for row, noise in zip(logits[1:, :size], noises, strict=True)
    ]


def compare(backend, prompt, sampling: Sampling, frames: int, step) -> None:
    """Streams of seeds 40, 41, ... until `frames` frames were compared; `step(state, text)` gives codes and logits."""
    config, compared, seed = backend.config, 0, 39
    while compared < frames:
        seed, history = seed + 1, []
        state = backend.start(prompt, sampling, seed, frames - compared)
        while compared < frames:
            codes, logits = step(state, prompt.row(len(history) - 1) if history else None)
            expected = chosen(logits, torch.tensor(history, dtype=torch.int64), config, sampling, seed)
            if codes is None:
                assert expected[0] == config.codec_ids.eos, f"seed {seed}, frame {len(history)}"
                break
            assert codes.tolist() == expected, f"seed {seed}, frame {len(history)}"
            history.append(expected[0])
            compared += 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_oracles_codes_are_the_choosers(setting, tiny):
    backend = TorchBackend(tiny.config, tiny.tensors())
    prompt = PromptBuilder(tiny.config, tiny.tensors(), tiny.tokenizer()).build(TEXT)

    def step(state, text):
        before = state.copy()
        codes = backend.step(state, text).codes
        seen = forced(backend, before, text, torch.zeros(NUM_CODEBOOKS, dtype=torch.int64) if codes is None else codes)
        return codes, pad_sequence(seen.logits, batch_first=True)

    compare(backend, prompt, SETTINGS[setting], 8, step)


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["random:tiny", "random:tiny:margin", "random:tiny:margin:eos9"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_kernels_codes_are_the_choosers(setting, source):
    checkpoint = open_checkpoint(source)
    backend, prompt = kernel_of(checkpoint), prompt_of(checkpoint)
    debug = backend.new_debug()
    compare(backend, prompt, SETTINGS[setting], FRAMES, lambda *at: (backend.step(*at, debug).codes, debug.logits))
