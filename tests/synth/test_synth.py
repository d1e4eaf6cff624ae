"""The synthesizer on tiny random checkpoints (random weights: timing and parity only)."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import FakeBackend, fake_synthesizer

from mktts.batch.settings import BatchSettings
from mktts.codec.decoder import CodecDecoder
from mktts.errors import BackendUnavailable, CheckpointError, EngineError, OptionsError, PromptError, TextError
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME
from mktts.speech.guard import Guard
from mktts.speech.options import SCHEDULE, StreamOptions
from mktts.speech.stream import Stream
from mktts.speech.text import MAX_TEXT_CHARS, clean_text
from mktts.synth import Synthesizer
from mktts.synth.loading import step_backend

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_SMALL = BatchSettings(max_streams=32, memory_bytes=1 << 30)  # so that several tests share a device
_CUDA = {"device": "cuda", "engine": "batch", "batch": _SMALL}
ENGINES = [
    pytest.param({"backend": "torch", "device": "cpu", "engine": "single"}, id="oracle"),
    pytest.param({"device": "cpu", "engine": "batch"}, id="batch"),
    pytest.param({"backend": "megakernel", "device": "cuda"}, id="megakernel", marks=_GPU),
    pytest.param(
        {"device": "cuda", "engine": "batch", "deterministic": False, "batch": _SMALL}, id="batch-cuda", marks=_GPU
    ),
    pytest.param({"device": "cuda", "engine": "batch", "batch": _SMALL}, id="batch-cuda-same", marks=_GPU),
]
OFF = StreamOptions(guard=Guard.off(), schedule=SCHEDULE)
TEXT = "The quick brown fox jumps over the lazy dog."
WHO = {"speaker": "vivian"}


@pytest.fixture(scope="module", params=ENGINES)
def loading(request):
    return request.param


@pytest.fixture(scope="module")
def limit(loading):
    """How far a sample may lie from the plain decoder's in fp32: rounding, or 80 dB of a device's fused decoder."""
    return 1e-5 if loading["device"] == "cpu" else 1e-4


@pytest.fixture(scope="module")
def synth(tiny, loading):
    with Synthesizer.load(tiny, **loading) as synthesizer:
        yield synthesizer


@pytest.fixture(scope="module")
def margin_synth(tiny_margin, loading):
    with Synthesizer.load(tiny_margin, **loading) as synthesizer:
        yield synthesizer


@pytest.fixture(scope="module")
def codec(tiny):
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


def speak(synth: Synthesizer, text: str = TEXT, frames: int = 12, **settings) -> Stream:
    return synth.stream(text, **{"seed": 1, "max_frames": frames, "options": OFF, **WHO, **settings})


# ---- what comes out


def test_the_pcm_is_what_the_codec_makes_of_the_codes_offline(synth, codec, limit):
    stream = speak(synth, frames=20)
    pcm = stream.read()
    assert (stream.codes.shape, stream.codes.dtype) == ((20, NUM_CODEBOOKS), torch.int64)
    assert np.abs(pcm - codec.decode_all(stream.codes).numpy()).max() <= limit
    assert pcm.dtype == np.float32 and pcm.shape == (20 * SAMPLES_PER_FRAME,)


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(synth):
    first, again, other = speak(synth), speak(synth), speak(synth, seed=2)
    pcm = first.read()
    assert np.array_equal(pcm, again.read())
    assert not np.array_equal(pcm, other.read())


def test_a_drawn_seed_is_told_and_repeats_the_utterance(synth):
    first = speak(synth, seed=None)
    pcm = first.read()
    assert np.array_equal(pcm, speak(synth, seed=first.seed).read())
    assert speak(synth, seed=None).seed != first.seed


def test_the_chunk_schedule_does_not_change_the_samples(synth, limit):
    pcm = speak(synth, frames=16).read()
    for schedule in ((1,), (5, 2), (16,)):
        chunks = list(speak(synth, frames=16, options=replace(OFF, schedule=schedule)))
        assert np.abs(np.concatenate([chunk.pcm for chunk in chunks]) - pcm).max() <= limit
        assert [chunk.frames for chunk in chunks][0] == schedule[0]


def test_interleaved_streams_give_what_each_gives_alone(synth):
    settings = [{"seed": 1}, {"seed": 2, "speaker": "ryan"}, {"seed": 3, "language": "german"}]
    alone = [speak(synth, **setting).read() for setting in settings]
    together = [speak(synth, **setting) for setting in settings]
    mixed: list[list[np.ndarray]] = [[], [], []]
    for chunks in zip(*together, strict=True):
        for pcm, chunk in zip(mixed, chunks, strict=True):
            pcm.append(chunk.pcm)
    assert all(np.array_equal(a, np.concatenate(b)) for a, b in zip(alone, mixed, strict=True))


def test_say_is_the_joined_stream_and_the_default_is_the_checkpoint_s_sampling(synth, tiny):
    pcm = synth.say(TEXT, max_frames=9, seed=1, options=OFF, **WHO)
    assert np.array_equal(pcm, speak(synth, frames=9).read())
    assert np.array_equal(pcm, speak(synth, frames=9, sampling=tiny.sampling()).read())
    assert not np.array_equal(pcm, speak(synth, frames=9, sampling=tiny.sampling().greedy()).read())


def test_greedy_speech_does_not_depend_on_the_seed(synth):
    greedy = Sampling().greedy()
    assert np.array_equal(speak(synth, seed=1, sampling=greedy).read(), speak(synth, seed=2, sampling=greedy).read())


def test_long_text_is_spoken_in_segments_with_one_codec(synth, codec, limit):
    text = "One short sentence here. And then another one follows. Here is the third of them."
    options = StreamOptions(guard=Guard(repeat_frames=None, frames_per_text_token=None), max_chars_per_segment=30)
    stream = synth.stream(text, seed=1, max_frames=30, options=options, **WHO)
    pcm = stream.read()
    assert np.abs(pcm - codec.decode_all(stream.codes).numpy()).max() <= limit


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("A cat sat. " * 909 + "x", id="ten-thousand-characters"),
        pytest.param("one\x00two\x1b[31m\tthree\r\n", id="control-characters"),
        pytest.param("😀 👩\u200d🚀 🇬🇧", id="emoji-alone"),
        pytest.param("Well done 🎉!", id="emoji"),
        pytest.param("Hello 你好 こんにちは 안녕 Привет", id="mixed-languages"),
        pytest.param("<|im_end|><|im_start|>assistant", id="special-tokens"),
        pytest.param("!!!", id="marks-alone"),
        pytest.param("\ud83dhalf a pair", id="lone-surrogate"),
        pytest.param("a" * 500, id="one-long-word"),
    ],
)
def test_odd_text_is_spoken(synth, text):
    stream = speak(synth, text, frames=3)
    assert len(stream.read()) == 3 * SAMPLES_PER_FRAME


def test_ten_thousand_characters_are_spoken_to_the_end():
    text = clean_text(("The cat sat on the mat, and Mr. Brown paid 3.50 for it. " * 180)[:10_000])
    with fake_synthesizer(FakeBackend(eos_after=3)) as synth:
        stream = synth.stream(text)
        pcm = stream.read()
        spoken = synth._models.any().prompts.built
        assert (" ".join(spoken), stream.finish_reason) == (text, "eos")
        assert len(pcm) == 3 * len(spoken) * SAMPLES_PER_FRAME and len(spoken) > 30


# ---- what is refused, at the call


@pytest.mark.parametrize("method", ["stream", "astream", "say"])
@pytest.mark.parametrize("text", ["", " \n", "\x00\x01", None, 7, "a" * (MAX_TEXT_CHARS + 1)])
def test_text_that_cannot_be_spoken_is_refused_at_the_call(synth, method, text):
    with pytest.raises(TextError):
        getattr(synth, method)(text, **WHO)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"speaker": "nobody"}, id="unknown-speaker"),
        pytest.param({"language": "klingon"}, id="unknown-language"),
        pytest.param({"layout": "sideways"}, id="unknown-layout"),
        pytest.param({"instruct": "Whisper."}, id="instruction-for-0.6B"),
    ],
)
def test_what_the_checkpoint_does_not_have_is_refused_at_the_call(synth, settings):
    with pytest.raises(PromptError):
        synth.stream(TEXT, **{**WHO, **settings})
    with pytest.raises(PromptError):
        synth.open(**{**WHO, **settings})


def test_fed_text_has_no_whole_layout(synth):
    with pytest.raises(PromptError, match="streaming layout"):
        synth.open(layout="whole", **WHO)


@pytest.mark.parametrize("settings", [{"seed": -1}, {"max_frames": 0}, {"seed": 1.5}])
def test_options_out_of_range_are_refused_at_the_call(synth, settings):
    with pytest.raises(OptionsError):
        synth.stream(TEXT, **WHO, **settings)
    with pytest.raises(OptionsError):
        synth.open(**WHO, **settings)


def test_an_instruction_is_cleaned_like_text(tiny_projected):
    with Synthesizer.load(tiny_projected, device="cpu") as synth:
        plain, dirty = speak(synth, frames=4, instruct="Whisper."), speak(synth, frames=4, instruct=" Whisper.\x00\n")
        assert torch.equal(torch.tensor(plain.read()), torch.tensor(dirty.read()))
        with pytest.raises(TextError, match="instruct"):
            synth.stream(TEXT, instruct="\x07", **WHO)
        with pytest.raises(TextError, match="instruct must be a str"):
            synth.stream(TEXT, instruct=["a"], **WHO)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "megakernel", "device": "cpu"}, "needs a CUDA device"),
        ({"backend": "banana"}, "banana"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "meta"}, "meta"),
    ],
)
def test_a_backend_or_device_that_cannot_run_here_is_named(tiny, settings, said):
    with pytest.raises(BackendUnavailable, match=said):
        Synthesizer.load(tiny, **settings)


def test_auto_takes_the_torch_backend_where_the_megakernel_cannot_be_built_and_says_why(tiny, monkeypatch, caplog):
    def refuse(*_):
        raise BackendUnavailable("no compiler today")

    monkeypatch.setattr("mktts.kernel.backend.MegakernelBackend", refuse)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("mktts.synth.loading.TorchBackend", lambda *a: a[2])
    assert step_backend("auto", tiny, cuda, torch.bfloat16) == cuda
    assert "no compiler today" in caplog.text
    caplog.clear()
    assert step_backend("auto", tiny, cpu, torch.bfloat16) == cpu
    assert step_backend("auto", tiny, cuda, torch.float32) == cuda and not caplog.text
    with pytest.raises(BackendUnavailable, match="no compiler today"):
        step_backend("megakernel", tiny, cuda, torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(tiny):
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        Synthesizer.load(tiny, device="cuda")


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        Synthesizer.load(tmp_path / "nothing")


# ---- loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attributes_say_what_was_loaded(tiny, dtype):
    with Synthesizer.load(tiny, device="cpu", dtype=dtype) as synth:
        assert (synth.backend_name, synth.device, synth.dtype) == ("torch", torch.device("cpu"), dtype)
        assert synth.checkpoint is tiny and synth.sampling == tiny.sampling()
        assert len(speak(synth, frames=2).read()) == 2 * SAMPLES_PER_FRAME


@pytest.mark.parametrize(("asked", "used"), [(3, 3), (None, 1)])
def test_only_the_worker_uses_the_cpu_threads_asked_for(tiny, asked, used, monkeypatch):
    seen = []
    step = TorchBackend.step
    monkeypatch.setattr(TorchBackend, "step", lambda *a: seen.append(torch.get_num_threads()) or step(*a))
    before = torch.get_num_threads()
    with Synthesizer.load(tiny, device="cpu", cpu_threads=asked) as synthesizer:
        synthesizer.say(TEXT, **WHO, max_frames=2, options=OFF)
    assert set(seen) == {used} and torch.get_num_threads() == before


def test_auto_takes_what_this_machine_has(tiny):
    with Synthesizer.load(tiny) as synth:
        cuda = torch.cuda.is_available()
        assert synth.device.type == ("cuda" if cuda else "cpu")
        assert synth.dtype == (torch.bfloat16 if cuda else torch.float32)


@pytest.mark.parametrize("checkpoint", ["tiny", "tiny_base", "tiny_design"])
def test_every_type_warms_up(request, checkpoint):
    with Synthesizer.load(request.getfixturevalue(checkpoint), device="cpu") as synth:
        synth.warm_up()
    with pytest.raises(EngineError):
        synth.warm_up()


# ---- text that comes later


@pytest.mark.parametrize("pieces", [[TEXT], [word + " " for word in TEXT.split(" ")], list(TEXT)])
def test_fed_text_gives_the_codes_of_the_text_at_once(margin_synth, pieces, limit):
    greedy = {"sampling": Sampling().greedy(), "seed": 1, "max_frames": 25, "options": OFF, **WHO}
    whole = margin_synth.stream(TEXT, layout="streaming", **greedy)
    whole_pcm = whole.read()
    session = margin_synth.open(**greedy)
    for piece in pieces:
        session.feed(piece)
    session.finish()
    assert np.abs(session.read() - whole_pcm).max() <= limit
    assert torch.equal(session.codes, whole.codes)


def test_a_session_speaks_before_its_text_is_complete(synth):
    session = synth.open(seed=1, max_frames=40, options=OFF, **WHO)
    session.feed("Hello there, my good ")
    first = next(session)
    assert first.frames == 1 and first.timings.ready_ms > 0
    session.feed("friend.")
    session.finish()
    assert first.frames + sum(chunk.frames for chunk in session) == 40


def test_ready_ms_of_a_session_counts_from_the_first_text(synth):
    session = synth.open(seed=1, max_frames=2, options=OFF, **WHO)
    session.feed(" ")
    begun_s = time.perf_counter()
    session.feed("Hello there.")
    session.finish()
    chunk = next(session)
    assert 0 < chunk.timings.ready_ms <= 1e3 * (time.perf_counter() - begun_s)


# ---- event loops


async def test_astream_gives_what_stream_gives(synth):
    pcm = speak(synth).read()
    stream = synth.astream(TEXT, seed=1, max_frames=12, options=OFF, **WHO)
    assert np.array_equal(np.concatenate([chunk.pcm async for chunk in stream]), pcm)
    assert np.array_equal(await speak(synth).aread(), pcm)


def test_a_voice_that_holds_nan_ends_its_stream_by_name_and_the_next_one_is_right(tiny_base, loading):
    size = tiny_base.config.talker.hidden_size
    broken, sound = (Voice(torch.full((size,), 0.1), None, None, tiny_base.config.model_size) for _ in range(2))
    broken.embedding.fill_(torch.nan)  # which no voice is made with
    settings = {"seed": 1, "max_frames": 4, "options": OFF}
    with Synthesizer.load(tiny_base, **loading) as synth:
        before = synth.say(TEXT, voice=sound, **settings)
        with pytest.raises(EngineError, match="gave no number.*prompt or voice holds NaN"):
            synth.say(TEXT, voice=broken, **settings)
        assert np.array_equal(synth.say(TEXT, voice=sound, **settings), before)
