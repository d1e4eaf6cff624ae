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
from mktts.errors import BackendUnavailable, CapacityError, PromptError
from mktts.measure.parity.upstream import made_up_voice
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer

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


def test_what_loads_is_left_alone(modules):
    real = [types.ModuleType(name) for name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")]
    for module in (*real, types.ModuleType("onnxruntime")):
        modules.setitem(sys.modules, module.__name__, module)
    upstream.install_shim()
    assert [sys.modules[module.__name__] for module in real] == real


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
    with pytest.raises(CapacityError, match="at least 1, got 0"):
        upstream.generate_codes(model, REQUEST, Sampling(), 1, 0)


def test_upstream_is_quiet_and_its_talker_takes_the_dtype_while_the_codec_stays_float32(model, tiny, capfd):
    upstream.generate_codes(upstream.load_upstream(tiny, torch.float32), REQUEST, Sampling().greedy(), 1, 2)
    upstream.generate_codes(model, REQUEST, Sampling(), 1, 2)
    assert capfd.readouterr() == ("", "")
    codec, name = model.model.speech_tokenizer.model, "decoder.0.conv.weight"
    assert (model.model.dtype, codec.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(codec.decoder.state_dict()[name], tiny.codec_tensors()[name])


LIKE_UPSTREAM = Sampling(rng="torch")


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
    assert [round(chunk.start_s * SAMPLE_RATE_HZ) for chunk in chunks] == [
        f * SAMPLES_PER_FRAME for f in (0, 1, 2, 4, 8)
    ]


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


# ---- cloned voices


@pytest.fixture(scope="module")
def in_context(tiny_base) -> Voice:
    return made_up_voice(tiny_base, 9)


@pytest.fixture(scope="module")
def base_synth(tiny_base):
    with Synthesizer.load(tiny_base, device="cpu") as synthesizer:
        yield synthesizer


def test_fed_text_in_a_cloned_voice_gives_the_codes_of_the_text_at_once(base_synth, in_context):
    settings = {"voice": in_context, "seed": 1, "max_frames": 12, "options": OFF}
    whole = base_synth.stream(TEXT, **settings)
    session = base_synth.open(**settings)
    assert len(fed(session, (word + " " for word in TEXT.split()))) == len(whole.read())
    assert torch.equal(session.codes, whole.codes)


def test_a_base_checkpoint_without_a_voice_and_another_with_one_are_refused(base_synth, speaking, synth, in_context):
    with pytest.raises(PromptError, match="voice"):
        base_synth.stream(TEXT)
    for custom_voice in (synth, speaking):
        with pytest.raises(PromptError, match="voice"):
            custom_voice.stream(TEXT, voice=in_context, **WHO)


def test_upstream_speaks_the_same_in_context_voice(tiny_base, base_synth, in_context):
    with Synthesizer.load(tiny_base, backend="upstream", device="cpu") as speaking:
        theirs = speak(speaking, frames=6, speaker=None, voice=in_context)
        ours = speak(base_synth, frames=6, speaker=None, voice=in_context, sampling=LIKE_UPSTREAM)
        assert np.abs(theirs.read() - ours.read()).max() <= 1e-4
        assert torch.equal(theirs.codes, ours.codes)
