"""`--play` and the loudspeaker, with a sounddevice that only takes notes."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import soundfile

from mktts.cli import main
from mktts.errors import BackendUnavailable
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth.say import Loudspeaker

SAY = ["say", "Hello there.", "--checkpoint", "random:tiny", "--seed", "1", "--max-frames", "4"]


class Device(ModuleType):
    """Stands for the package sounddevice. `notes`: what was done with its one output stream, in order."""

    class PortAudioError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        super().__init__("sounddevice")
        self.broken, self.active = broken, False
        self.notes: list[str] = []
        self.heard: list[np.ndarray] = []

    def OutputStream(self, rate_hz: int, channels: int, dtype: str) -> Device:
        if self.broken:
            raise self.PortAudioError("Error querying device -1")
        assert (rate_hz, channels, dtype) == (SAMPLE_RATE_HZ, 1, "float32")
        return self

    def __getattr__(self, name: str):
        if name not in ("start", "stop", "abort", "close"):
            raise AttributeError(name)

        def noted() -> None:
            self.notes.append(name)
            self.active = name == "start"

        return noted

    def write(self, pcm: np.ndarray) -> None:
        assert self.active and pcm.shape[1] == 1 and pcm.dtype == np.float32
        self.heard.append(pcm[:, 0])


@pytest.fixture
def device(monkeypatch, checkpoint_cache, tmp_path):
    made = Device()
    monkeypatch.setitem(sys.modules, "sounddevice", made)
    monkeypatch.chdir(tmp_path)
    return made


def test_all_that_the_file_gets_is_played_and_heard_to_the_end_and_without_one_none_is_written(device, tmp_path):
    assert main([*SAY, "--play"]) == 0 and not list(tmp_path.iterdir())
    assert main([*SAY, "--play", "-o", "out.wav"]) == 0
    written, _ = soundfile.read("out.wav", dtype="float32")
    np.testing.assert_allclose(np.concatenate(device.heard), np.tile(written, 2), atol=1 / 32_767)
    assert device.notes == 2 * ["start", "stop", "close"]


def test_an_interrupt_ends_the_sound_at_once_and_nothing_played_needs_no_waiting(device):
    with pytest.raises(KeyboardInterrupt), Loudspeaker() as loudspeaker:
        loudspeaker.play(np.zeros(10, np.float32))
        raise KeyboardInterrupt
    with Loudspeaker():
        pass
    assert device.notes == ["start", "abort", "close", "close"]


def test_without_package_or_device_the_command_says_so_before_it_opens_a_checkpoint(monkeypatch, capsys):
    for module, message in ((None, "pip install sounddevice"), (Device(broken=True), "Error querying device")):
        monkeypatch.setitem(sys.modules, "sounddevice", module)
        assert main(["say", "Hi.", "--play", "--checkpoint", "absent-folder"]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and "absent-folder" not in error


def test_without_its_library_the_library_is_named(monkeypatch, tmp_path):
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')")
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match=r"library PortAudio \(PortAudio library not found\)"):
        Loudspeaker()
