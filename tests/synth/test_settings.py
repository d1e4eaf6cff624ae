"""What the package exports, and text that is read by a front end before it is spoken."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from fakes import ONE, FakeBackend, fake_synthesizer

import mktts
from mktts import Synthesizer
from mktts.errors import TextError
from mktts.speech.front import FrontEnd


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


@pytest.fixture(params=["single", "batch"])
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
    folder = shutil.copytree(tiny.folder, tmp_path / "named")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"text_front_end": "english"}))
    with Synthesizer.load(folder, device="cpu", backend="torch") as named:
        languages = set(named.checkpoint.config.spoken_languages) - {"auto"}
        assert named.front_end.name == "english" and set(named.front_end.languages) == languages
