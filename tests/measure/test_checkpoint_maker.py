"""Random checkpoints made in other processes."""

from __future__ import annotations

import pytest

from mktts.measure.checkpoint_maker import CheckpointMaker


def test_what_was_waited_for_is_there_and_what_cannot_be_made_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setenv("MKTTS_CACHE", str(tmp_path))
    maker = CheckpointMaker(["random:tiny", "a/folder", "random:no-such-size"], ["random:tiny"])
    maker.wait("random:tiny")
    assert len(list(tmp_path.glob("*/model.safetensors"))) >= 1
    maker.wait("random:tiny", "text")
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 2
    for source in ("random:no-such-size", "a/folder", "never asked for"):
        maker.wait(source)


@pytest.mark.parametrize("source", ["folder", "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice", ""])
def test_only_random_sources_are_made(source, monkeypatch):
    monkeypatch.setattr("mktts.measure.checkpoint_maker._make", lambda kind, source: pytest.fail(f"made {source}"))
    CheckpointMaker([source], [source]).wait(source)
