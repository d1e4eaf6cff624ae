"""What a stream is asked for: defaults that the checkpoint fills in, wrong settings by name; text front ends."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from fakes import FAKE_ENGINES, ONE, FakeBackend, fake_synthesizer

import mktts
from mktts import EngineError, OptionsError, SamplingError, Synthesizer
from mktts.errors import BackendUnavailable, TextError
from mktts.speech.front import FrontEnd

SHORT = {"seed": 1, "max_frames": 3}


@pytest.fixture(scope="module")
def synth(tiny):
    with Synthesizer.load(tiny) as synthesizer:
        yield synthesizer


def test_the_shortest_program_speaks_with_the_checkpoints_first_speaker(synth, tiny):
    first = next(iter(tiny.config.speakers))
    assert np.array_equal(synth.say("Hello.", **SHORT), synth.say("Hello.", speaker=first, **SHORT))
    second = list(tiny.config.speakers)[1]
    assert not np.array_equal(synth.say("Hello.", **SHORT), synth.say("Hello.", speaker=second, **SHORT))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": 0.5}, OptionsError, r"sampling=Sampling\(talker=Choice\(temperature="),
        ({"colour": "red"}, OptionsError, "no setting 'colour'; expected one of language, speaker"),
        ({"options": (1, 1)}, OptionsError, r"must be StreamOptions, got tuple"),
        ({"sampling": {"top_k": 5}}, OptionsError, "must be a Sampling, got dict"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_setting_is_named_at_the_call(synth, settings, error, message):
    with pytest.raises(error, match=message):
        synth.stream("Hello.", **settings)
    with pytest.raises(error, match=message):
        synth.open(**settings)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, torch.float64, 16], ids=str)
def test_a_dtype_that_no_backend_computes_in_is_refused(tiny, dtype):
    with pytest.raises(BackendUnavailable, match=r"dtype must be torch\.bfloat16, torch\.float32 or None"):
        Synthesizer.load(tiny, dtype=dtype)


async def test_a_stream_that_was_read_to_its_end_is_not_silently_empty(synth):
    stream = synth.stream("Hello.", **SHORT)
    assert len(stream.read())
    for again in (stream.read, lambda: list(stream)):
        with pytest.raises(EngineError, match="make another stream"):
            again()
    with pytest.raises(EngineError, match="make another stream"):
        await stream.aread()


def test_a_stream_may_be_left_and_taken_up_again(synth):
    stream = synth.stream("Hello.", seed=1, max_frames=4)
    first = next(iter(stream))
    assert len(first.pcm) + len(stream.read()) == len(synth.say("Hello.", seed=1, max_frames=4))


def test_a_cancelled_stream_stays_empty_without_an_error():
    with fake_synthesizer() as synthesizer:
        stream = synthesizer.stream("Hello.", **SHORT)
        stream.cancel()
        assert list(stream) == [] == list(stream)


def test_representations_say_what_it_is(synth):
    assert repr(synth).startswith("<Synthesizer: ") and "torch on cpu, float32" in repr(synth)
    stream = synth.stream("Hello.", **SHORT)
    stream.read()
    assert repr(stream) == "<Stream: 3 frames, max_frames, seed 1>"


def test_everything_exported_exists_where_it_is_said_to_be():
    assert set(mktts.__all__) == set(mktts._HOME) <= set(dir(mktts))
    for name, home in mktts._HOME.items():
        assert getattr(mktts, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'synthesiser'"):
        _ = mktts.synthesiser


def test_the_import_is_light_and_loading_a_voice_makes_none():
    loads = "import sys, mktts; print('torch' in sys.modules); mktts.Synthesizer; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True).stdout
    first, modules = printed.splitlines()
    assert first == "False"
    mine = [name for name in modules.split() if name.startswith("mktts.")]
    assert not [name for name in mine if "random." in name or "upstream" in name or ".kernel" in name]
    assert "num2words" not in modules.split()  # only where a checkpoint reads by it


def test_sampling_errors_are_exported_errors():
    with pytest.raises(SamplingError):
        mktts.Choice(temperature=-1)


@pytest.fixture(params=FAKE_ENGINES)
def reading(request):
    with fake_synthesizer(FakeBackend(eos_after=3), engine=request.param) as synthesizer:
        synthesizer.front_end = FrontEnd.ready("english", ["auto", "english"])
        yield synthesizer


def prompts(reading: Synthesizer):
    return reading._models.any().prompts


def test_the_model_is_given_the_words(reading):
    reading.say("DR. Smith paid $12")
    assert prompts(reading).built == ["Doctor smith paid twelve dollars."]


def test_a_text_is_cut_by_the_length_of_its_words(reading):
    with reading.stream("It is 1,777,777. So is 1,777,777.", options=ONE) as stream:
        stream.read()
    reading._whole_chars = 100
    reading.say("It is 1,777,777. So is 1,777,777.")
    assert len(prompts(reading).built) == 1 + 2


def test_fed_pieces_are_read_as_the_whole(reading):
    with reading.open(options=ONE) as session:
        for piece in ("I pay $1", "2.50 on Jan", ". 5 to D", "r. No"):
            session.feed(piece)
        session.finish()
        session.read()
    (prompt,) = prompts(reading).opened
    assert prompt.text == "I pay twelve dollars and fifty cents on january fifth to doctor no."


def test_what_cannot_be_spoken_is_refused_at_the_call(reading):
    with pytest.raises(TextError, match="CJK"):
        reading.stream("你好")
    with pytest.raises(TextError, match="letter or a digit"):
        reading.say("?!...")


def test_a_session_goes_on_after_a_refused_piece_and_ends_without_words(reading):
    with reading.open(options=ONE) as session:
        session.feed("Good ")
        with pytest.raises(TextError, match="CYRILLIC"):
            session.feed("день")
        session.feed("day")
        session.finish()
        session.read()
    assert prompts(reading).opened[-1].text == "Good day."
    with reading.open(options=ONE) as session:
        session.feed("… 😀")
        with pytest.raises(TextError, match="letter or a digit"):
            session.finish()
        assert session.finish_reason == "cancelled"


def test_without_a_front_end_text_reaches_the_model_as_it_stands():
    with fake_synthesizer(FakeBackend(eos_after=3)) as synthesizer:
        synthesizer.say("DR. Smith paid $12, 你好")
        assert synthesizer.front_end is None
        assert prompts(synthesizer).built == ["DR. Smith paid $12, 你好"]


def test_a_checkpoint_gets_the_front_end_that_it_names(tiny, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(tiny.folder, tmp_path / "named")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"text_front_end": "english"}))
    with Synthesizer.load(folder, device="cpu", backend="torch") as named:
        languages = set(named.checkpoint.config.spoken_languages) - {"auto"}
        assert named.front_end.name == "english" and set(named.front_end.languages) == languages
