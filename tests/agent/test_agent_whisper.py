"""Whisper's ears over a stand-in for faster-whisper: what it is asked, what comes of it, what is refused."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from pipecat.frames.frames import TranscriptionFrame
from pipecat.transcriptions.language import Language

from mktts.agent.ears import find_ears, load_ears, make_ears
from mktts.agent.settings import AgentSettings, from_environment
from mktts.cli import main
from mktts.errors import AgentError

HUB = "LocalEntryNotFoundError: no network\n  and no cache"


class FakeModel:
    """Says what it was given: how many samples, their peak, the language."""

    loaded: list[tuple[str, str]] = []

    def __init__(self, name: str, device: str, device_index: int) -> None:
        if name == "org/absent":
            raise RuntimeError(HUB)
        if name == "huge":
            raise ValueError("Invalid model size 'huge', expected one of: tiny, base, base.en")
        type(self).loaded.append((name, f"{device}:{device_index}"))
        self.supported_languages = ["en"] if name.endswith(".en") else ["en", "de"]

    def transcribe(self, audio: np.ndarray, language: str | None, **_: object) -> tuple:
        said = SimpleNamespace(text=f"{len(audio)} {np.abs(audio).max():.2f} {language}", no_speech_prob=0.1)
        noise = SimpleNamespace(text="thank you", no_speech_prob=0.9)
        return iter([said, noise]), None


@pytest.fixture
def whisper(monkeypatch):
    package = ModuleType("faster_whisper")
    package.WhisperModel = FakeModel
    package.__spec__ = SimpleNamespace(name="faster_whisper")
    monkeypatch.setitem(sys.modules, "faster_whisper", package)
    monkeypatch.setattr(FakeModel, "loaded", [])
    yield
    for name in ("mktts.agent.whisper", "pipecat.services.whisper.stt", "pipecat.services.whisper"):
        sys.modules.pop(name, None)  # they hold the stand-in


def ears(**changes: object) -> AgentSettings:
    return AgentSettings(ears="whisper", device="cpu", **changes)


async def test_it_hears_what_is_said_and_leaves_noise_out(whisper):
    service = make_ears(ears(language="german"))
    pcm = (np.arange(1_600) % 2 * 16_384).astype("<i2")
    (frame,) = [frame async for frame in service.run_stt(pcm.tobytes())]
    assert isinstance(frame, TranscriptionFrame) and frame.text.split() == ["1600", "0.50", "de"]
    assert not service.wants_wav_segments and find_ears(ears()).__name__ == "WhisperSTTService"


def test_conversations_share_one_model_and_a_language_is_found_out_where_none_is_named(whisper):
    load_ears(ears())
    one, other = make_ears(ears()), make_ears(ears())
    assert FakeModel.loaded == [("base", "cpu:0")] and one._model is other._model
    assert one._settings.language is None
    assert make_ears(ears(language="english", ears_model="base.en"))._settings.language == Language.EN


def test_a_folder_is_taken_where_it_holds_a_model(whisper, tmp_path):
    with pytest.raises(AgentError, match="no config.json and no model.bin"):
        load_ears(ears(ears_model=str(tmp_path)))
    for name in ("config.json", "model.bin"):
        (tmp_path / name).write_bytes(b"")
    load_ears(ears(ears_model=str(tmp_path)))
    assert FakeModel.loaded == [(str(tmp_path), "cpu:0")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ears_model": "huge"}, "one of: tiny, base, base.en"),
        ({"ears_model": "/no/such/folder"}, "no such folder"),
        ({"ears_model": "org/absent"}, "no network and no cache"),
        ({"ears_model": "base.en", "language": "german"}, "cannot transcribe"),
    ],
)
def test_a_model_that_cannot_be_is_told_in_one_line(whisper, changes, words):
    with pytest.raises(AgentError, match=words) as refused:
        make_ears(ears(**changes))
    assert "\n" not in str(refused.value)


def test_without_the_package_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    assert main(["agent", "--checkpoint", "absent-folder", "--port", "0", "--ears", "whisper"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mktts: ")]
    assert "needs the package faster-whisper" in line


def test_the_arguments_choose_it(whisper):
    settings = from_environment({"DEEPGRAM_API_KEY": "k"}, ears="whisper", ears_model="tiny")
    assert settings.ears_model == "tiny" and "Whisper, tiny" in settings.parts()["ears"]
