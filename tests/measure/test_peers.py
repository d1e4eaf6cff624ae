"""The adapter of faster-qwen3-tts, on a stand-in with its interface."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from mktts.errors import BackendUnavailable
from mktts.measure.bench import peers
from mktts.model.prompt import Request
from mktts.model.sampling import Choice, Sampling
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

REQUEST = Request("Some words.", "auto", "ryan", layout="streaming")


class FakeTokenizer:
    @classmethod
    def from_pretrained(cls, folder):
        assert folder == "folder"
        return "loaded without the flag"


class FakeFaster:
    """The interface of faster-qwen3-tts 0.5.4 that the adapter uses; a frame takes 5 ms by its own clock."""

    asked: dict = {}

    def __init__(self) -> None:
        self.model = types.SimpleNamespace(processor=types.SimpleNamespace(tokenizer=FakeTokenizer()))

    @classmethod
    def from_pretrained(cls, model_name, device="cuda", dtype=torch.bfloat16):
        print("a banner")
        return cls()

    def generate_custom_voice_streaming(
        self,
        text,
        speaker,
        language,
        instruct=None,
        non_streaming_mode=None,
        max_new_tokens=2048,
        min_new_tokens=2,
        temperature=0.9,
        top_k=50,
        top_p=1.0,
        do_sample=True,
        repetition_penalty=1.05,
        chunk_size=12,
    ):
        FakeFaster.asked = dict(locals())
        made = 0
        while made < max_new_tokens:
            steps = min(chunk_size, max_new_tokens - made)
            made += steps
            timing = {"chunk_steps": steps, "total_steps_so_far": made, "decode_ms": 5.0 * steps}
            yield np.zeros(steps * SAMPLES_PER_FRAME, np.float32), SAMPLE_RATE_HZ, timing


@pytest.fixture
def faster(monkeypatch, capsys) -> peers.FasterPeer:
    monkeypatch.setitem(sys.modules, "faster_qwen3_tts", types.SimpleNamespace(FasterQwen3TTS=FakeFaster))
    peer = peers.FasterPeer("folder", "cpu")
    assert capsys.readouterr().out == ""  # standard output is for the figures
    assert peer._model.model.processor.tokenizer == "loaded without the flag"
    return peer


def test_a_streamed_run_knows_its_first_pcm_its_audio_and_where_each_frame_was(faster):
    run = faster.stream(REQUEST, Sampling(Choice(temperature=0.7, top_k=20)), 0, max_frames=10, chunk_frames=4)
    assert run.audio_s == pytest.approx(0.8)
    assert run.frame_ms == [(4, 5.0), (8, 5.0), (10, 5.0)]
    assert [frames for frames, _ in run.chunks] == [4, 4, 2]
    assert run.chunks[0][1] == run.first_pcm_ms and run.chunks[-1][1] == run.total_ms
    assert 0 < run.first_pcm_ms <= run.total_ms
    assert run.rtf == pytest.approx(run.total_ms / 800)
    asked = FakeFaster.asked
    assert (asked["temperature"], asked["top_k"], asked["chunk_size"]) == (0.7, 20, 4)
    assert (asked["text"], asked["speaker"], asked["non_streaming_mode"]) == ("Some words.", "ryan", False)


def test_an_absent_peer_is_named_with_the_reason(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "faster_qwen3_tts", None)
    with pytest.raises(BackendUnavailable, match="faster_qwen3_tts is needed"):
        peers.FasterPeer(tiny.folder, "cpu")
