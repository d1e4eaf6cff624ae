"""qwen-tts's own generate behind the synthesizer's interface, and cloned voices, on tiny random checkpoints."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import OFF, WAIT_S

from mktts.codec.decoder import CodecDecoder
from mktts.errors import PromptError, TextError
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.guard import Guard
from mktts.speech.stream import Stream
from mktts.synth import Synthesizer
from mktts.synth import upstream as fallback

TEXT = "The quick brown fox jumps over the lazy dog."
WHO = {"speaker": "vivian"}
LIKE_UPSTREAM = Sampling(rng="torch")


@pytest.fixture(scope="module")
def synth(tiny):
    with Synthesizer.load(tiny, device="cpu") as synthesizer:
        yield synthesizer


def speak(synth: Synthesizer, text: str = TEXT, frames: int = 12, **settings) -> Stream:
    return synth.stream(text, **{"seed": 1, "max_frames": frames, "options": OFF, **WHO, **settings})


@pytest.fixture(scope="module")
def upstream(tiny):
    with Synthesizer.load(tiny, backend="upstream", device="cpu") as synthesizer:
        yield synthesizer


def test_upstream_speaks_the_same_codes_and_samples(upstream, synth):
    theirs, ours = speak(upstream, frames=10), speak(synth, frames=10, sampling=LIKE_UPSTREAM)
    chunks = list(theirs)
    assert [chunk.frames for chunk in chunks] == [1, 1, 2, 4, 2]
    assert np.abs(np.concatenate([chunk.pcm for chunk in chunks]) - ours.read()).max() <= 1e-4
    assert torch.equal(theirs.codes, ours.codes)
    assert theirs.finish_reason == "max_frames" and upstream.backend_name == "upstream"
    assert [round(chunk.start_s * SAMPLE_RATE_HZ) for chunk in chunks] == [
        f * SAMPLES_PER_FRAME for f in (0, 1, 2, 4, 8)
    ]


def test_upstream_takes_text_in_segments_and_fed(upstream):
    options = replace(OFF, max_chars_per_segment=30, guard=Guard(frames_per_text_token=0.1, slack_frames=3))
    stream = speak(upstream, "One sentence is here. Another one is there.", options=options)
    assert (len(stream.read()), stream.finish_reason) == (len(stream.codes) * SAMPLES_PER_FRAME, "runaway")
    session = upstream.open(seed=1, max_frames=4, options=OFF, **WHO)
    session.feed("Hello ")
    session.feed("there.")
    session.finish()
    expected = speak(upstream, "Hello there.", frames=4, layout="streaming")
    assert np.array_equal(session.read(), expected.read())


def test_upstream_is_cancelled_within_a_frame(upstream, monkeypatch):
    third, cancelled = threading.Event(), threading.Event()
    generate = fallback.generate_codes

    def held_at_the_third_frame(*arguments, on_frame, **settings):
        def hold(codes):
            on_frame(codes)
            if len(stream.codes) == 3:
                third.set()
                assert cancelled.wait(WAIT_S)

        return generate(*arguments, on_frame=hold, **settings)

    monkeypatch.setattr(fallback, "generate_codes", held_at_the_third_frame)
    stream = speak(upstream, frames=1_000)
    assert third.wait(WAIT_S)
    stream.cancel()
    cancelled.set()
    assert list(stream) == [] and stream.finish_reason == "cancelled"
    monkeypatch.undo()
    assert len(speak(upstream, frames=1).read()) == SAMPLES_PER_FRAME  # the worker is free again
    assert len(stream.codes) == 3


def test_upstream_refuses_at_the_call(upstream):
    with pytest.raises(PromptError):
        upstream.stream(TEXT, speaker="nobody")
    with pytest.raises(TextError):
        upstream.stream(" ", **WHO)


# ---- cloned voices


@pytest.fixture(scope="module")
def in_context(tiny_base) -> Voice:
    draw = torch.Generator().manual_seed(3)
    embedding = torch.randn(tiny_base.config.talker.hidden_size, generator=draw)
    codes = torch.randint(CODEBOOK_SIZE, (9, NUM_CODEBOOKS), generator=draw)
    return Voice(embedding, codes, "What I said.", tiny_base.config.model_size)


@pytest.fixture(scope="module")
def base_synth(tiny_base):
    with Synthesizer.load(tiny_base, device="cpu") as synthesizer:
        yield synthesizer


def test_an_in_context_voice_is_heard_before_and_not_in_the_pcm(base_synth, tiny_base, in_context):
    stream = speak(base_synth, speaker=None, voice=in_context)
    pcm = stream.read()
    codec = CodecDecoder(tiny_base.codec_config, tiny_base.codec_tensors())
    whole = codec.decode_all(torch.cat((in_context.codes, stream.codes))).numpy()
    assert np.abs(pcm - whole[len(in_context.codes) * SAMPLES_PER_FRAME :]).max() <= 1e-5
    embedding_alone = replace(in_context, codes=None, transcript=None)
    assert not np.array_equal(pcm, speak(base_synth, speaker=None, voice=embedding_alone).read())


def test_fed_text_in_a_cloned_voice_gives_the_codes_of_the_text_at_once(base_synth, in_context):
    settings = {"voice": in_context, "seed": 1, "max_frames": 12, "options": OFF}
    whole = base_synth.stream(TEXT, **settings)
    session = base_synth.open(**settings)
    for word in TEXT.split(" "):
        session.feed(word + " ")
    session.finish()
    assert len(session.read()) == len(whole.read())
    assert torch.equal(session.codes, whole.codes)


def test_a_base_checkpoint_without_a_voice_and_another_with_one_are_refused(base_synth, synth, in_context):
    with pytest.raises(PromptError, match="voice"):
        base_synth.stream(TEXT)
    with pytest.raises(PromptError, match="voice"):
        synth.stream(TEXT, voice=in_context, **WHO)


def test_upstream_speaks_the_same_in_context_voice(tiny_base, base_synth, in_context):
    with Synthesizer.load(tiny_base, backend="upstream", device="cpu") as upstream:
        theirs = speak(upstream, frames=6, speaker=None, voice=in_context)
        ours = speak(base_synth, frames=6, speaker=None, voice=in_context, sampling=LIKE_UPSTREAM)
        assert np.abs(theirs.read() - ours.read()).max() <= 1e-4
        assert torch.equal(theirs.codes, ours.codes)
