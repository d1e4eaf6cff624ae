"""All that one stream can be asked for, of many at once on the batch engine of a CPU: what each gives, and how it ends.

The truth is the oracle's: one stream after the other, by plain operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from served import until

from mktts.model.sampling import Choice, Sampling
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS
from mktts.speech.guard import Guard
from mktts.speech.options import StreamOptions
from mktts.synth import Synthesizer

OFF = StreamOptions(guard=Guard.off())
PCM_LIMIT = 1e-5  # rounding of the codec's sums
TEXT = "One sentence to say. And a second one, a little longer. Then the last."


def voice(seed: int, reference_frames: int = 0) -> Voice:
    """With frames of a reference, one that is continued in context."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(64, (reference_frames, NUM_CODEBOOKS), generator=draw) if reference_frames else None
    return Voice(torch.randn(64, generator=draw), codes, "Reference speech." if reference_frames else None, "0b6")


def sampling(talker: dict[str, Any], predictor: dict[str, Any], penalty: float) -> Sampling:
    return Sampling(Choice(**talker), Choice(**predictor), penalty)


PLAIN: list[dict[str, Any]] = [
    {},
    {"sampling": Sampling().greedy()},
    {"sampling": sampling({"top_k": 5}, {"top_p": 0.8}, 1.3)},
    {"sampling": sampling({"temperature": 0.4, "top_p": 0.9}, {"do_sample": False}, 1.0)},
    {"max_frames": 1},
    {"options": replace(OFF, max_chars_per_segment=25)},
    {"options": replace(OFF, trim_lead=True, schedule=(3,))},
    {"options": StreamOptions(guard=Guard(frames_per_text_token=0.2, slack_frames=3)), "max_frames": None},
    {"layout": "streaming"},
]
OF_A_TYPE: dict[str, list[dict[str, Any]]] = {
    "tiny": [*PLAIN, {"language": "english"}],
    "tiny_projected": [{}, {"instruct": "Whisper it."}, {"instruct": "Shout it, as loud as you can.", "seed": 4}],
    "tiny_design": [{"instruct": "An old man."}, {"instruct": "A young woman, far away."}, {}],
    "tiny_base": [{"voice": voice(1)}, {"voice": voice(2)}, {"voice": voice(3, 9)}, {"voice": voice(4, 70)}],
}


def opened(synth: Synthesizer, seed: int, **changes: Any) -> Any:
    """A stream that waits for its place for as long as it takes, however slow the machine is."""
    return synth._stream_unpaced(TEXT, {"seed": seed, "max_frames": 8, "options": OFF, **changes})


def heard(stream: Any) -> dict[str, Any]:
    chunks = list(stream)
    return {
        "codes": stream.codes.tolist(),
        "pcm": np.concatenate([np.zeros(0, np.float32), *(chunk.pcm for chunk in chunks)]),
        "reason": stream.finish_reason,
        "engine": stream.engine,
    }


@pytest.mark.parametrize("checkpoint", OF_A_TYPE)
def test_every_type_of_checkpoint_and_setting_gives_many_at_once_what_it_gives_one(request, checkpoint):
    kind = request.getfixturevalue(checkpoint)
    asked = [{"seed": index, **changes} for index, changes in enumerate(OF_A_TYPE[checkpoint])]
    with Synthesizer.load(kind, device="cpu", engine="single") as synth:
        wanted = [heard(opened(synth, **one)) for one in asked]
    with Synthesizer.load(kind, device="cpu", engine="batch") as synth:
        streams = [opened(synth, **one) for one in asked]
        found = [heard(stream) for stream in streams]
    for one, other in zip(wanted, found, strict=True):
        assert (one["codes"], one["reason"]) == (other["codes"], other["reason"])
        assert len(one["pcm"]) == len(other["pcm"]) and np.abs(one["pcm"] - other["pcm"]).max() < PCM_LIMIT
        assert (one["engine"], other["engine"]) == ("single", "batch")
    assert len({str(one["codes"]) for one in wanted}) == len(wanted)  # they can be told apart
    reasons = {one["reason"] for one in wanted}
    assert "max_frames" in reasons and (checkpoint != "tiny" or "runaway" in reasons)


def test_deterministic_is_the_batch_engine_from_one_stream_on_and_neighbours_change_nothing(tiny):
    with Synthesizer.load(tiny, device="cpu", deterministic=True) as synth:
        assert synth.lanes.deterministic
        alone = heard(opened(synth, 5))
        others = [opened(synth, seed, max_frames=2 + seed) for seed in range(5)]
        beside = heard(opened(synth, 5))
        assert alone["engine"] == beside["engine"] == "batch"
        assert alone["codes"] == beside["codes"] and np.array_equal(alone["pcm"], beside["pcm"])
        for other in others:
            other.read()


HOW = {"seed": 1, "max_frames": 6}


@pytest.fixture(params=["single", "batch"])
def synthesizer(request, tiny_base):
    with Synthesizer.load(tiny_base, device="cpu", engine=request.param) as made:
        yield made


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


def test_caches_let_one_voice_go_and_keep_the_others(synthesizer):
    anna, ben = voice(1, 5), voice(2, 5)
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
