"""The synthesizer on tiny random checkpoints (random weights: timing and parity only)."""

import asyncio
import importlib
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from desk import TEXT, WHO, fed, speak
from fakes import OFF, ONE, FakeBackend, fake_synthesizer
from served import until

import mktts
from mktts.batch import BatchSettings
from mktts.codec.decoder import CodecDecoder
from mktts.engine.options import Guard, StreamOptions
from mktts.engine.stream import Stream
from mktts.errors import BackendUnavailable, EngineError, OptionsError, PromptError, TextError
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Choice, Sampling
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME
from mktts.synth import Synthesizer
from mktts.synth.loading import step_backend
from mktts.text import FrontEnd
from mktts.text.lexicon import Lexicon
from mktts.text.split import MAX_TEXT_CHARS

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_SMALL = BatchSettings(max_streams=32, memory_bytes=1 << 30, codec="full")  # several tests share a device
_MANY = {"device": "cuda", "engine": "batch", "batch": _SMALL}
ENGINES = [
    pytest.param({"backend": "torch", "device": "cpu", "engine": "single"}, id="oracle"),
    pytest.param({"device": "cpu", "engine": "batch"}, id="batch"),
    pytest.param({"backend": "megakernel", "device": "cuda"}, id="megakernel", marks=_GPU),
    pytest.param({**_MANY, "deterministic": False}, id="batch-cuda", marks=_GPU),
    pytest.param(_MANY, id="batch-cuda-same", marks=_GPU),
]


@pytest.fixture(scope="module", params=ENGINES)
def loading(request):
    return request.param


@pytest.fixture(scope="module")
def synth(tiny, loading):
    with Synthesizer.load(tiny, **loading) as synthesizer:
        yield synthesizer


def limit(synth: Synthesizer) -> float:
    """How far a sample may lie from the plain decoder's in fp32: rounding, or 80 dB of a device's fused decoder."""
    return 1e-5 if synth.device.type == "cpu" else 1e-4


def voice(seed: int, reference_frames: int = 0) -> Voice:
    """With frames of a reference, one that is continued in context."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(64, (reference_frames, NUM_CODEBOOKS), generator=draw) if reference_frames else None
    return Voice(torch.randn(64, generator=draw), codes, "Reference speech." if reference_frames else None, "0b6")


def test_the_pcm_is_what_the_codec_makes_of_the_codes_offline(synth, tiny):
    stream, codec = speak(synth, frames=20), CodecDecoder(tiny.codec_config, tiny.codec_tensors())
    pcm = stream.read()
    assert (stream.codes.shape, stream.codes.dtype) == ((20, NUM_CODEBOOKS), torch.int64)
    assert np.abs(pcm - codec.decode_all(stream.codes).numpy()).max() <= limit(synth)
    assert pcm.dtype == np.float32 and pcm.shape == (20 * SAMPLES_PER_FRAME,)


def test_the_seed_decides_the_samples_where_they_are_drawn(synth, tiny):
    drawn = speak(synth, seed=None)
    pcm = drawn.read()
    assert np.array_equal(pcm, speak(synth, seed=drawn.seed).read())
    assert np.array_equal(pcm, synth.say(TEXT, max_frames=12, seed=drawn.seed, options=OFF, **WHO))
    assert np.array_equal(pcm, speak(synth, seed=drawn.seed, sampling=tiny.sampling()).read())  # the checkpoint's
    other = speak(synth, seed=None)
    assert other.seed != drawn.seed and not np.array_equal(pcm, other.read())
    greedy, same = (speak(synth, seed=seed, sampling=Sampling().greedy()).read() for seed in (1, 2))
    assert np.array_equal(greedy, same) and not np.array_equal(greedy, pcm)


ODD = {
    "ten thousand characters": "A cat sat. " * 909 + "x",
    "control characters": "one\x00two\x1b[31m\tthree\r\n",
    "emoji alone": "😀 👩\u200d🚀 🇬🇧",
    "mixed languages": "Hello 你好 こんにちは 안녕 Привет",
    "special tokens": "<|im_end|><|im_start|>assistant",
    "marks alone": "!!!",
    "lone surrogate": "\ud83dhalf a pair",
    "one long word": "a" * 500,
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_text_is_spoken(synth, text):
    assert len(speak(synth, text, frames=3).read()) == 3 * SAMPLES_PER_FRAME


@pytest.mark.parametrize("text", [" \n", None, "a" * (MAX_TEXT_CHARS + 1)], ids=["blank", "none", "long"])
def test_text_that_cannot_be_spoken_is_refused_at_the_call(synth, text):
    for method in (synth.stream, synth.astream, synth.say):
        with pytest.raises(TextError):
            method(text, **WHO)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": 0.5}, OptionsError, r"sampling=Sampling\(talker=Choice\(temperature="),
        ({"colour": "red"}, OptionsError, "no setting 'colour'; expected one of language, speaker"),
        ({"options": (1, 1)}, OptionsError, r"must be StreamOptions, got tuple"),
        ({"sampling": {"top_k": 5}}, OptionsError, "must be a Sampling, got dict"),
        ({"seed": -1}, OptionsError, "seed must"),
        ({"seed": 2**63}, OptionsError, "seed must"),
        ({"seed": 1.5}, OptionsError, "seed must"),
        ({"max_frames": 0}, OptionsError, "max_frames must"),
        ({"speaker": "nobody"}, PromptError, "speaker must be one of"),
        ({"speaker": 3}, PromptError, "speaker must be one of .* got 3"),
        ({"language": "klingon"}, PromptError, "language must be"),
        ({"layout": "sideways"}, PromptError, "layout must be"),
        ({"instruct": "Whisper."}, PromptError, "instruct"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named_at_the_call(synth, settings, error, message):
    for method in (partial(synth.stream, TEXT), synth.open):
        with pytest.raises(error, match=message):
            method(**{**WHO, **settings})


def test_an_instruction_is_cleaned_like_text(tiny_projected):
    with Synthesizer.load(tiny_projected, device="cpu") as synth:
        plain, dirty = (speak(synth, frames=4, instruct=said).read() for said in ("Whisper.", " Whisper.\x00\n"))
        assert np.array_equal(plain, dirty)
        for wrong, message in (("\x07", "instruct"), (["a"], "instruct must be a str")):
            with pytest.raises(TextError, match=message):
                synth.stream(TEXT, instruct=wrong, **WHO)


def test_auto_takes_the_torch_backend_where_the_megakernel_cannot_be_built_and_says_why(tiny, monkeypatch, caplog):
    def refuse(*_):
        raise BackendUnavailable("no compiler today")

    monkeypatch.setattr("mktts.kernel.backend.MegakernelBackend", refuse)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("mktts.synth.loading.TorchBackend", lambda *a: a[2])
    assert step_backend("auto", tiny, cpu, torch.bfloat16) == cpu
    assert step_backend("auto", tiny, cuda, torch.float32) == cuda and not caplog.text
    assert step_backend("auto", tiny, cuda, torch.bfloat16) == cuda and "no compiler today" in caplog.text
    with pytest.raises(BackendUnavailable, match="no compiler today"):
        step_backend("megakernel", tiny, cuda, torch.bfloat16)


def test_the_shortest_program_loads_what_this_machine_has_and_speaks_with_the_first_speaker(tiny):
    cuda = torch.cuda.is_available()
    with Synthesizer.load(tiny) as synth:
        assert synth.device.type == ("cuda" if cuda else "cpu")
        assert synth.dtype == (torch.bfloat16 if cuda else torch.float32)
        assert synth.checkpoint is tiny and synth.sampling == tiny.sampling() and synth.front_end is None
        assert repr(synth).startswith(f"<Synthesizer: {tiny.folder.name}, {synth.backend_name} on {synth.device}, ")
        first, second, *_ = tiny.config.speakers
        pcm = synth.say("Hello.", seed=1, max_frames=3)
        assert np.array_equal(pcm, synth.say("Hello.", speaker=first, seed=1, max_frames=3))
        assert not np.array_equal(pcm, synth.say("Hello.", speaker=second, seed=1, max_frames=3))


@pytest.mark.parametrize(("asked", "used"), [(3, 3), (None, 1)])
def test_only_the_worker_uses_the_cpu_threads_asked_for_and_in_bfloat16_where_asked_for(tiny, asked, used, monkeypatch):
    seen, frames, before = [], TorchBackend.frames, torch.get_num_threads()
    monkeypatch.setattr(TorchBackend, "frames", lambda *a: seen.append(torch.get_num_threads()) or frames(*a))
    with Synthesizer.load(tiny, device="cpu", dtype=torch.bfloat16, cpu_threads=asked) as synth:
        assert (synth.backend_name, synth.device, synth.dtype) == ("torch", torch.device("cpu"), torch.bfloat16)
        assert len(speak(synth, frames=2).read()) == 2 * SAMPLES_PER_FRAME
    assert set(seen) == {used} and torch.get_num_threads() == before


@pytest.mark.parametrize("checkpoint", ["tiny", "tiny_base", "tiny_design"])
def test_every_type_warms_up(request, checkpoint):
    with Synthesizer.load(request.getfixturevalue(checkpoint), device="cpu") as synth:
        synth.warm_up()
        assert len(synth.stats) == 2 and all(sum(one.ticks.counts) for one in synth.stats.values())
    with pytest.raises(EngineError):
        synth.warm_up()


def test_everything_exported_exists_where_it_is_said_to_be():
    assert set(mktts.__all__) == set(mktts._HOME) <= set(dir(mktts))
    for name, home in mktts._HOME.items():
        assert getattr(mktts, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'synthesiser'"):
        _ = mktts.synthesiser


def test_the_import_is_light_and_loading_a_voice_makes_none():
    loads = "import sys, mktts; print('torch' in sys.modules); mktts.Synthesizer; print(*sys.modules)"
    first, modules = subprocess.check_output([sys.executable, "-c", loads], text=True, timeout=100).splitlines()
    assert first == "False"
    mine = [name for name in modules.split() if name.startswith("mktts.")]
    assert not [name for name in mine if "random." in name or "upstream" in name or ".kernel" in name]
    assert "num2words" not in modules.split()  # only where a checkpoint reads by it


def test_fed_text_gives_the_codes_of_the_text_at_once(tiny_margin, loading):
    greedy = {"sampling": Sampling().greedy(), "seed": 1, "max_frames": 25, "options": OFF, **WHO}
    with Synthesizer.load(tiny_margin, **loading) as synth:
        whole = synth.stream(TEXT, layout="streaming", **greedy)
        whole_pcm = whole.read()
        for pieces in [TEXT], [word + " " for word in TEXT.split(" ")], TEXT:
            session = synth.open(**greedy)
            assert np.abs(fed(session, pieces) - whole_pcm).max() <= limit(synth)
            assert torch.equal(session.codes, whole.codes)


def test_a_session_speaks_before_its_text_is_complete_and_counts_from_the_first(synth):
    with pytest.raises(PromptError, match="streaming layout"):
        synth.open(layout="whole", **WHO)
    session = synth.open(seed=1, max_frames=40, options=OFF, **WHO)
    session.feed(" ")
    begun_s = time.perf_counter()
    session.feed("Hello there, my good ")
    first = next(session)
    assert first.frames == 1 and 0 < first.timings.ready_ms <= 1e3 * (time.perf_counter() - begun_s)
    session.feed("friend.")
    session.finish()
    assert first.frames + sum(chunk.frames for chunk in session) == 40


async def test_however_it_is_read_the_samples_are_the_same_and_a_second_time_is_an_error(synth):
    stream, other, left = speak(synth), synth.astream(TEXT, seed=1, max_frames=12, options=OFF, **WHO), speak(synth)
    pcm = stream.read()
    assert np.array_equal(np.concatenate([chunk.pcm async for chunk in other]), pcm)
    assert np.array_equal(await speak(synth).aread(), pcm)
    first = next(iter(left))
    assert np.array_equal(np.concatenate((first.pcm, left.read())), pcm)
    for again in (stream.read, lambda: list(stream)):
        with pytest.raises(EngineError, match="make another stream"):
            again()
    with pytest.raises(EngineError, match="make another stream"):
        await stream.aread()
    assert repr(stream) == "<Stream: 12 frames, max_frames, seed 1>"
    session = synth.open(**WHO)  # without text, its first reader waits
    read = await asyncio.gather(session.aread(), session.aread(), return_exceptions=True)
    assert len(read[0]) == 0 and isinstance(read[1], EngineError) and "one consumer" in str(read[1])


def test_a_voice_that_holds_nan_ends_its_streams_alone_and_by_name(tiny_base, loading):
    broken, sound = voice(1), voice(2)
    broken.embedding[3] = torch.nan  # which no voice is made with
    settings = {"seed": 1, "max_frames": 4, "options": OFF}
    with Synthesizer.load(tiny_base, **loading) as synth:
        wanted = synth.say(TEXT, voice=sound, **settings)
        beside, bad, later = (synth.stream(TEXT, voice=who, **settings) for who in (sound, broken, sound))
        with pytest.raises(EngineError, match="gave no number.*prompt or voice holds NaN"):
            bad.read()
        assert np.array_equal(beside.read(), wanted) and np.array_equal(later.read(), wanted)
        assert np.array_equal(synth.say(TEXT, voice=sound, **settings), wanted)  # also what has its slot and pages then


SENTENCES = "One sentence to say. And a second one, a little longer. Then the last."
PLAIN: list[dict[str, Any]] = [
    {},
    {"sampling": Sampling().greedy()},
    {"sampling": Sampling(Choice(top_k=5), Choice(do_sample=False), 1.3)},
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


def heard(stream: Stream) -> tuple[np.ndarray, list, str, str]:
    return stream.read(), stream.codes.tolist(), stream.finish_reason, stream.engine


@pytest.mark.parametrize("checkpoint", OF_A_TYPE)
def test_every_type_of_checkpoint_and_setting_gives_many_at_once_what_it_gives_one(request, checkpoint):
    kind, usual = request.getfixturevalue(checkpoint), {"max_frames": 8, "options": OFF}
    changes = [{"seed": index, **usual, **one} for index, one in enumerate(OF_A_TYPE[checkpoint])]
    with Synthesizer.load(kind, device="cpu", engine="single") as synth:
        wanted = [heard(synth.stream(SENTENCES, **one)) for one in changes]
    with Synthesizer.load(kind, device="cpu", engine="batch") as synth:
        found = [heard(stream) for stream in [synth.stream(SENTENCES, **one) for one in changes]]
    for (pcm, *end, engine), (other_pcm, *other_end, other_engine) in zip(wanted, found, strict=True):
        assert end == other_end and (engine, other_engine) == ("single", "batch")
        assert len(pcm) == len(other_pcm) and np.abs(pcm - other_pcm).max() < 1e-5
    assert len({str(codes) for _, codes, *_ in wanted}) == len(wanted)  # they can be told apart
    reasons = {reason for *_, reason, _ in wanted}
    assert "max_frames" in reasons and (checkpoint != "tiny" or "runaway" in reasons)


def held(synthesizer: Synthesizer, of: Voice) -> set[str]:
    """Which caches hold something of the voice."""
    found = set()
    for engine, runner in synthesizer.engine.runners.items():
        primed = runner.lanes.primed if engine == "single" else runner.lanes._primed
        found |= {"codec"} if id(of.codes) in primed._states else set()
        found |= {"rows"} if any(of.digest in key for key in runner.prompts._heads) else set()
        pages = runner.lanes.pages
        found |= {"pages"} if pages and any(of.digest in key for key in pages._kept) else set()
    return found


@pytest.mark.parametrize("engine", ["single", "batch"])
def test_caches_let_one_voice_go_and_keep_the_others(tiny_base, engine):
    anna, ben = ({"voice": voice(seed, 5), "seed": 1, "max_frames": 6} for seed in (1, 2))
    with Synthesizer.load(tiny_base, device="cpu", engine=engine) as synth:
        said = synth.say("Hello.", **anna)
        synth.say("Hello.", **ben)
        kept = held(synth, ben["voice"])
        assert held(synth, anna["voice"]) == kept >= {"codec", "rows"}
        with synth.stream("Hello.", **anna) as stream:
            synth.forget(anna["voice"])
            assert np.array_equal(stream.read(), said)
        synth.forget(anna["voice"])
        until(lambda: not held(synth, anna["voice"]), "the voice to be let go")
        assert held(synth, ben["voice"]) == kept
        assert np.array_equal(synth.say("Hello.", **anna), said)


@pytest.fixture(params=["single", "batch"])
def reading(request):
    with fake_synthesizer(FakeBackend(eos_after=3), engine=request.param) as synthesizer:
        synthesizer.front_end = FrontEnd(["auto", "english"])
        yield synthesizer


def test_known_text_is_given_to_the_model_as_words_and_cut_by_their_length(reading):
    built = reading._prompts.built
    reading.say("DR. Smith paid $12")
    with reading.open(options=ONE) as session:
        fed(session, ("D", "R. Smith paid $1", "2"))
    (prompt,) = reading._prompts.opened
    assert [*built, prompt.text] == ["Doctor smith paid twelve dollars."] * 2
    reading._whole_chars = 100
    reading.say("It is 1,777,777. So is 1,777,777.")
    assert len(built) == 1 + 2
    for text, named in (("你好", "CJK"), ("?!...", "letter or a digit")):
        with pytest.raises(TextError, match=named):
            reading.stream(text)
        with reading.open() as session, pytest.raises(TextError, match=named):
            fed(session, text)


@pytest.mark.parametrize("named", [True, False], ids=["front end", "none"])
def test_markup_is_taken_out_and_words_are_said_as_the_request_and_then_the_lexicon_have_them(reading, named):
    if not named:
        reading.front_end = None
    reading.lexicon = Lexicon({"nginx": "engine six", "GIF": "jif"})
    settings = {"options": replace(ONE, markup="strip"), "pronunciations": {"gif": "gift"}}
    said = "An engine six gift."
    with reading.stream("An **nginx** [GIF](https://x.y). [pause] GIF", **settings) as stream:
        stream.read()
    assert reading._prompts.built == [said, "Gift." if named else "gift"]
    with reading.open(**settings) as session:
        fed(session, ("An *", "*ng", "inx** [G", "IF](https://x", ".y)."))
    assert reading._prompts.opened[-1].text == said
    with pytest.raises(TextError, match="beside its markup"):
        reading.stream("```", **settings)
    with pytest.raises(OptionsError, match="markup"):
        StreamOptions(markup="no")
    with pytest.raises(OptionsError, match="pronunciations must be a mapping"):
        reading.stream("Hello.", pronunciations=["nginx"])
    with pytest.raises(OptionsError, match="pronunciations"):
        reading.open(pronunciations={"nginx": ""})


def test_a_checkpoint_gets_the_front_end_that_it_names(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny), "text_front_end", lambda _: "english")
    with Synthesizer.load(tiny, device="cpu", backend="torch") as named:
        assert set(named.front_end.languages) == set(tiny.config.spoken_languages) - {"auto"}
