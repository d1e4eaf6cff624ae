"""Streams and sessions of a synthesizer whose checkpoint names a text front end, and of one that names none."""

from __future__ import annotations

import pytest
from fakes import FAKE_ENGINES, ONE, FakeBackend, fake_synthesizer

from mktts.errors import TextError
from mktts.speech.front import FrontEnd
from mktts.synth import Synthesizer


@pytest.fixture(params=FAKE_ENGINES)
def synth(request):
    with fake_synthesizer(FakeBackend(eos_after=3), engine=request.param) as synthesizer:
        synthesizer.front_end = FrontEnd.ready("english", ["auto", "english"])
        yield synthesizer


def prompts(synth: Synthesizer):
    return synth._models.any().prompts


def test_the_model_is_given_the_words(synth):
    synth.say("DR. Smith paid $12")
    assert prompts(synth).built == ["Doctor smith paid twelve dollars."]


def test_a_text_is_cut_by_the_length_of_its_words(synth):
    with synth.stream("It is 1,777,777. So is 1,777,777.", options=ONE) as stream:
        stream.read()
    synth._whole_chars = 100
    synth.say("It is 1,777,777. So is 1,777,777.")
    assert len(prompts(synth).built) == 1 + 2


def test_fed_pieces_are_read_as_the_whole(synth):
    with synth.open(options=ONE) as session:
        for piece in ("I pay $1", "2.50 on Jan", ". 5 to D", "r. No"):
            session.feed(piece)
        session.finish()
        session.read()
    (prompt,) = prompts(synth).opened
    assert prompt.text == "I pay twelve dollars and fifty cents on january fifth to doctor no."


def test_what_cannot_be_spoken_is_refused_at_the_call(synth):
    with pytest.raises(TextError, match="CJK"):
        synth.stream("你好")
    with pytest.raises(TextError, match="letter or a digit"):
        synth.say("?!...")


def test_a_session_goes_on_after_a_refused_piece_and_ends_without_words(synth):
    with synth.open(options=ONE) as session:
        session.feed("Good ")
        with pytest.raises(TextError, match="CYRILLIC"):
            session.feed("день")
        session.feed("day")
        session.finish()
        session.read()
    assert prompts(synth).opened[-1].text == "Good day."
    with synth.open(options=ONE) as session:
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
