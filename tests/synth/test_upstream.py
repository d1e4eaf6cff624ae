"""The wrapper around qwen-tts: what it stands in for, and that it changes nothing but what it says."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from mktts.errors import BackendUnavailable, CapacityError, PromptError
from mktts.measure.parity.upstream import made_up_voice
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME
from mktts.synth import upstream

REQUEST = Request("Hello there.", "english", "ryan")


@pytest.fixture(scope="module")
def model(tiny):
    return upstream.load_upstream(tiny, torch.bfloat16)


@pytest.fixture
def modules(monkeypatch):
    """sys.modules without what the shim looks at, put back afterwards."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torchaudio", "sox", "onnxruntime"):
            monkeypatch.delitem(sys.modules, name)
    return monkeypatch


def test_what_cannot_load_is_replaced_and_says_why_when_used(modules):
    modules.setitem(sys.modules, "torchaudio", None)  # makes `import torchaudio` fail
    modules.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    replaced = upstream.install_shim()
    assert "import of torchaudio halted" in replaced["torchaudio"] and "onnxruntime" not in replaced
    import torchaudio.compliance.kaldi as kaldi

    assert not hasattr(kaldi, "fbank")
    with pytest.raises(AttributeError, match="kaldi.fbank: only a stand-in is loaded, because .*halted"):
        kaldi.fbank()
    assert upstream.install_shim() == replaced
    for name in replaced:
        modules.delitem(sys.modules, name)


def test_what_loads_is_left_alone(modules):
    real = [types.ModuleType(name) for name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")]
    for module in (*real, types.ModuleType("onnxruntime")):
        modules.setitem(sys.modules, module.__name__, module)
    replaced = upstream.install_shim()
    assert set(replaced) <= {"sox"} and sys.modules["torchaudio"] is real[0]


def test_without_qwen_tts_the_package_is_named(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "qwen_tts", None)
    with pytest.raises(BackendUnavailable, match="package qwen-tts .* Install requirements.txt"):
        upstream.load_upstream(tiny)


def test_the_talker_takes_the_dtype_and_the_codec_stays_float32(model, tiny):
    codec = model.model.speech_tokenizer.model
    assert (model.model.dtype, codec.dtype) == (torch.bfloat16, torch.float32)
    name = "decoder.0.conv.weight"
    assert torch.equal(codec.decoder.state_dict()[name], tiny.codec_tensors()[name])


def test_the_seed_alone_decides_the_codes_and_the_global_generator_is_untouched(model):
    before = torch.get_rng_state()
    first = upstream.generate_codes(model, REQUEST, Sampling(), 1, 5)
    torch.rand(7)
    second = upstream.generate_codes(model, REQUEST, Sampling(), 1, 5)
    torch.set_rng_state(before)
    other, fresh, again = (upstream.generate_codes(model, REQUEST, Sampling(), seed, 5) for seed in (2, None, None))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (5, NUM_CODEBOOKS) and first.dtype == torch.int64 and torch.equal(first, second)
    assert not torch.equal(first, other) and not torch.equal(fresh, again)


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_max_frames_is_the_number_of_frames(model, frames):
    assert len(upstream.generate_codes(model, REQUEST, Sampling(), 1, frames)) == frames
    with pytest.raises(CapacityError, match="at least 1, got 0"):
        upstream.generate_codes(model, REQUEST, Sampling(), 1, 0)


def test_cancelling_takes_effect_at_the_next_frame_and_keeps_what_was_made(model):
    whole, seen = upstream.generate_codes(model, REQUEST, Sampling(), 1, 6), []
    cut = upstream.generate_codes(model, REQUEST, Sampling(), 1, 6, lambda: len(seen) == 3, seen.append)
    assert torch.equal(cut, whole[:3]) and torch.equal(torch.stack(seen), cut)
    assert upstream.generate_codes(model, REQUEST, Sampling(), 1, 6, lambda: True).shape == (0, NUM_CODEBOOKS)
    assert torch.equal(upstream.generate_codes(model, REQUEST, Sampling(), 1, 6), whole)  # nothing was left behind


def test_codes_and_pcm_are_what_the_wrapper_itself_returns(model):
    torch.manual_seed(4)
    (expected,), _ = model.generate_custom_voice("Hello there.", "ryan", "english", max_new_tokens=7)
    codes = upstream.generate_codes(model, REQUEST, Sampling(), 4, 6)
    pcm = upstream.decode_codes(model, codes)
    assert pcm.dtype == np.float32 and len(pcm) == 6 * SAMPLES_PER_FRAME and np.array_equal(pcm, expected)


def test_in_context_pcm_is_cut_where_the_wrapper_cuts_it(tiny_base):
    model, voice = upstream.load_upstream(tiny_base, torch.float32), made_up_voice(tiny_base, 7)
    torch.manual_seed(4)
    (expected,), _ = model.generate_voice_clone(
        "Hello there.", voice_clone_prompt=[upstream.clone_prompt(voice)], max_new_tokens=6
    )
    codes = upstream.generate_codes(model, Request("Hello there.", voice=voice), Sampling(), 4, 5)
    assert len(codes) == 5
    assert np.array_equal(upstream.decode_codes(model, codes, voice.codes), expected)
    with pytest.raises(PromptError, match="needs a voice"):
        upstream.generate_codes(model, Request("Hello there."), Sampling(), 4, 5)


@pytest.mark.parametrize("wrong", [{"language": "klingon"}, {"language": "beijing_dialect"}, {"speaker": "nobody"}])
def test_what_upstream_refuses_is_a_prompt_error(model, wrong):
    with pytest.raises(PromptError, match="qwen-tts refuses this request: Unsupported"):
        upstream.prompt_embeds(model, Request("Hello.", **{"speaker": "ryan", **wrong}))


def test_upstream_is_quiet(model, tiny, capfd):
    upstream.generate_codes(upstream.load_upstream(tiny, torch.float32), REQUEST, Sampling().greedy(), 1, 2)
    upstream.generate_codes(model, REQUEST, Sampling(), 1, 2)
    assert capfd.readouterr() == ("", "")
