"""What a synthesizer's caches hold of a voice can be let go of, by either engine; open streams go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from served import until

from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS
from mktts.synth import Synthesizer

HOW = {"seed": 1, "max_frames": 6}


@pytest.fixture(params=["single", "batch"])
def synthesizer(request, tiny_base):
    with Synthesizer.load(tiny_base, device="cpu", engine=request.param) as made:
        yield made


def voice(tiny_base, value: float) -> Voice:
    config = tiny_base.config
    codes = torch.full((5, NUM_CODEBOOKS), 3)
    embedding = torch.full((config.talker.hidden_size,), value)
    return Voice(embedding, codes, "What it says.", config.model_size)


def held(synthesizer: Synthesizer, of: Voice) -> set[str]:
    """Which caches hold something of the voice."""
    found = set()
    for model, engine in synthesizer._models.each():
        primed = model.primed if engine == "single" else model.lanes._primed
        found |= {"codec"} if id(of.codes) in primed._states else set()
        found |= {"rows"} if any(of.digest in key for key in model.prompts._heads) else set()
        if engine == "batch":
            found |= {"pages"} if model.lanes.pages.known(lambda key: of.digest in key) else set()
    return found


def test_caches_let_one_voice_go_and_keep_the_others(synthesizer, tiny_base):
    anna, ben = voice(tiny_base, 0.5), voice(tiny_base, -0.5)
    said = synthesizer.say("Hello.", voice=anna, **HOW)
    synthesizer.say("Hello.", voice=ben, **HOW)
    assert held(synthesizer, anna) >= {"codec", "rows"} and held(synthesizer, anna) == held(synthesizer, ben)
    kept = held(synthesizer, ben)
    with synthesizer.stream("Hello.", voice=anna, **HOW) as stream:
        synthesizer.forget(anna)
        assert np.array_equal(stream.read(), said)
    synthesizer.forget(anna)
    until(lambda: not held(synthesizer, anna), "the voice to be let go")
    assert held(synthesizer, ben) == kept
    assert np.array_equal(synthesizer.say("Hello.", voice=anna, **HOW), said)
