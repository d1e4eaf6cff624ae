"""qwen-tts as it is, and as the model behind a synthesizer."""

import sys
import types
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from desk import TEXT, WHO, fed, speak
from fakes import OFF, WAIT_S

from mktts.engine import upstream
from mktts.engine.options import Guard
from mktts.engine.scheduler import FRAME_S
from mktts.errors import BackendUnavailable, CapacityError, PromptError
from mktts.measure.parity.upstream import made_up_voice
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer

REQUEST, LIKE_UPSTREAM = Request("Hello there.", "english", "ryan"), Sampling(rng="torch")


@pytest.fixture(scope="module")
def model(tiny):
    return upstream.load_upstream(tiny, torch.bfloat16)


def test_what_cannot_load_is_replaced_and_says_why_when_used_and_what_loads_is_left_alone(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torchaudio", "sox", "onnxruntime"):
            monkeypatch.delitem(sys.modules, name)
    real = [types.ModuleType(name) for name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")]
    for module in (*real, types.ModuleType("onnxruntime")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    upstream.install_shim()
    assert [sys.modules[module.__name__] for module in real] == real
    for module in real:
        monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # makes `import torchaudio` fail
    upstream.install_shim()
    replaced = dict(sys.modules)
    assert "import of torchaudio halted" in replaced["torchaudio"].reason
    assert type(replaced["onnxruntime"]) is types.ModuleType
    import torchaudio.compliance.kaldi as kaldi

    assert not hasattr(kaldi, "fbank")
    with pytest.raises(AttributeError, match="kaldi.fbank: only a stand-in is loaded, because .*halted"):
        kaldi.fbank()
    upstream.install_shim()
    assert sys.modules["torchaudio"] is replaced["torchaudio"]


def test_without_qwen_tts_the_package_is_named(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "qwen_tts", None)
    with pytest.raises(BackendUnavailable, match="package qwen-tts .* Install requirements.txt"):
        upstream.load_upstream(tiny)


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
    cloned = [upstream.clone_prompt(voice)]
    (expected,), _ = model.generate_voice_clone("Hello there.", voice_clone_prompt=cloned, max_new_tokens=6)
    codes = upstream.generate_codes(model, Request("Hello there.", voice=voice), Sampling(), 4, 5)
    assert len(codes) == 5
    assert np.array_equal(upstream.decode_codes(model, codes, voice.codes), expected)
    with pytest.raises(PromptError, match="needs a voice"):
        upstream.generate_codes(model, Request("Hello there."), Sampling(), 4, 5)


@pytest.mark.parametrize("wrong", [{"language": "klingon"}, {"language": "beijing_dialect"}, {"speaker": "nobody"}])
def test_what_upstream_refuses_is_a_prompt_error(model, wrong):
    with pytest.raises(PromptError, match="qwen-tts refuses this request: Unsupported"):
        upstream.prompt_embeds(model, Request("Hello.", **{"speaker": "ryan", **wrong}))
    with pytest.raises(CapacityError, match="at least 1, got 0"):
        upstream.generate_codes(model, REQUEST, Sampling(), 1, 0)


def test_upstream_is_quiet_and_its_talker_takes_the_dtype_while_the_codec_stays_float32(model, tiny, capfd):
    upstream.generate_codes(upstream.load_upstream(tiny, torch.float32), REQUEST, Sampling().greedy(), 1, 2)
    upstream.generate_codes(model, REQUEST, Sampling(), 1, 2)
    assert capfd.readouterr() == ("", "")
    codec, name = model.model.speech_tokenizer.model, "decoder.0.conv.weight"
    assert (model.model.dtype, codec.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(codec.decoder.state_dict()[name], tiny.codec_tensors()[name])


@pytest.fixture(scope="module")
def speaking(tiny):
    with Synthesizer.load(tiny, backend="upstream", device="cpu") as synthesizer:
        yield synthesizer


def test_upstream_speaks_the_same_codes_and_samples(speaking, synth):
    theirs, ours = speak(speaking, frames=10), speak(synth, frames=10, sampling=LIKE_UPSTREAM)
    chunks = list(theirs)
    assert [chunk.frames for chunk in chunks] == [1, 1, 2, 4, 2]
    assert np.abs(np.concatenate([chunk.pcm for chunk in chunks]) - ours.read()).max() <= 1e-4
    assert torch.equal(theirs.codes, ours.codes)
    assert theirs.finish_reason == "max_frames" and speaking.backend_name == "upstream"
    assert [chunk.start_s / FRAME_S for chunk in chunks] == pytest.approx([0, 1, 2, 4, 8])


def test_upstream_takes_text_in_segments_and_fed(speaking):
    options = replace(OFF, max_chars_per_segment=30, guard=Guard(frames_per_text_token=0.1, slack_frames=3))
    stream = speak(speaking, "One sentence is here. Another one is there.", options=options)
    assert (len(stream.read()), stream.finish_reason) == (len(stream.codes) * SAMPLES_PER_FRAME, "runaway")
    session = speaking.open(seed=1, max_frames=4, options=OFF, **WHO)
    expected = speak(speaking, "Hello there.", frames=4, layout="streaming")
    assert np.array_equal(fed(session, ("Hello ", "there.")), expected.read())


def test_upstream_is_cancelled_within_a_frame(speaking, monkeypatch):
    count, opened, frames = upstream.GuardState.count, SimpleQueue(), []

    def cancels_at_the_third_frame(guard, codes, text_tokens):
        frames.append(codes)
        if len(frames) == 3:
            opened.get(timeout=WAIT_S).cancel()
        return count(guard, codes, text_tokens)

    monkeypatch.setattr(upstream.GuardState, "count", cancels_at_the_third_frame)
    stream = speak(speaking, frames=1_000)
    opened.put(stream)
    stream.read()
    assert stream.finish_reason == "cancelled"
    monkeypatch.undo()
    assert len(speak(speaking, frames=1).read()) == SAMPLES_PER_FRAME  # the worker is free again
    assert len(frames) == 3


def test_an_in_context_voice_speaks_as_upstream_has_it_and_fed_text_as_at_once(tiny_base, speaking, synth):
    how = {"speaker": None, "voice": made_up_voice(tiny_base, 9)}
    with (
        Synthesizer.load(tiny_base, backend="upstream", device="cpu") as upstreams,
        Synthesizer.load(tiny_base, device="cpu") as cloning,
    ):
        theirs, ours = speak(upstreams, frames=6, **how), speak(cloning, frames=6, **how, sampling=LIKE_UPSTREAM)
        assert np.abs(theirs.read() - ours.read()).max() <= 1e-4
        assert torch.equal(theirs.codes, ours.codes)
        whole = speak(cloning, **how)
        session = cloning.open(voice=how["voice"], seed=1, max_frames=12, options=OFF)
        assert len(fed(session, (word + " " for word in TEXT.split()))) == len(whole.read())
        assert torch.equal(session.codes, whole.codes)
        with pytest.raises(PromptError, match="voice"):
            cloning.stream(TEXT)
    for custom_voice in (synth, speaking):
        for asked in ({"text": TEXT, **how, **WHO}, {"text": "[Anna] Hi.", "voices": {"anna": how["voice"]}}):
            with pytest.raises(PromptError, match="only base checkpoints"):
                custom_voice.stream(**asked)
