"""`python -m mktts parity`: what is right passes, what is broken is found, and the file holds nobody's paths."""

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from upstream_models import loaded

from mktts.checkpoint import Checkpoint
from mktts.cli import main
from mktts.errors import BackendUnavailable, CodecError
from mktts.measure.parity import codec, command
from mktts.measure.parity.command import name_of, without_paths
from mktts.measure.parity.kernel import Scope
from mktts.model import qwen3
from mktts.spec import SAMPLES_PER_FRAME


@pytest.fixture
def quick(monkeypatch, tiny) -> None:
    """Less of everything, and one load of upstream's model."""
    monkeypatch.setattr(command, "load_upstream", lambda checkpoint, dtype: loaded("random:tiny", dtype)[1])
    monkeypatch.setattr(command, "CODES_FRAMES", 3)
    monkeypatch.setattr(command, "CODES_REQUESTS", 1)
    monkeypatch.setattr(command, "SCOPE", Scope(contexts=(5,), frames=4, exact=4))
    monkeypatch.setattr(codec, "FRAMES", 20)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def run(quick, tmp_path, capsys) -> Callable[..., tuple[int, dict, dict]]:
    """Exit status, document and the sections of its first checkpoint."""

    def called(*words: str) -> tuple[int, dict, dict]:
        path = tmp_path / "parity.json"
        status = main(["parity", *words, "--device", "cpu", "--output", str(path)])
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document == json.loads(path.read_text())
        return status, document, next(iter(document["checkpoints"].values()))["sections"]

    return called


def test_what_is_right_passes_and_what_cannot_run_is_skipped_by_name(run, tiny_margin):
    status, document, found = run("random:tiny", "--kernel", "torch")
    assert status == 0 and document["passed"]
    assert [found[name]["status"] for name in ("prompt", "codes", "codec", "kernel")] == ["passed"] * 4
    assert found["prompt"]["prompts"] == found["prompt"]["equal"] >= 9
    assert found["codes"]["frames"] == found["codes"]["asked"] == 6
    assert {row["sampled"] for row in found["codes"]["rows"]} == {True, False}
    assert found["codec"]["whole_to_upstream"]["snr_db"] > 100
    assert all(value["seconds"] >= 0 for value in found.values())
    assert found["kernel"]["ratio"]["hidden"] == 1
    whole = document["checkpoints"]["random:tiny"]  # as notebook 03 reads it
    assert set(whole) >= {"checkpoint", "forced", "divergence", "exact", "passed"}
    assert whole["forced"]["frames"] == {"5": 8} and whole["forced"]["pooled"]["hidden"]["ratio"] == 1
    assert whole["exact"] == {"frames": 4, "asked": 4, "equal": True, "passed": True}
    named = whole["checkpoint"]
    assert len(named["sha256"]["config.json"]) == 64 and named["weights"].startswith("random weights")
    assert document["packages"]["qwen_tts"].startswith("qwen-tts") and document["environment"]["torch"]
    status, document, found = run("random:tiny", "--parts", "kernel")
    assert status == 1 and not document["passed"], "where nothing could run nothing is proven"
    assert [(one["status"], one["reason"]) for one in found.values()] == [("skipped", "no CUDA device")]


def test_a_prompt_a_codec_and_a_norm_that_are_off_or_broken_are_found(run, monkeypatch):
    def unrounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)  # upstream rounds before the weight

    whole = codec.decode_streamed
    monkeypatch.setattr(codec, "decode_streamed", lambda *given: whole(*given) * 0.999)
    build, off = command.compare_prompts, {"equal": False, "max_abs_error": 0.5}
    monkeypatch.setattr(command, "compare_prompts", lambda *given: [row | off for row in build(*given)])
    status, document, found = run("random:tiny", "--parts", "codec,prompt")
    assert status == 1 and not document["passed"]
    assert "60.0 dB, at least 100 dB" in found["codec"]["reason"] and found["codec"]["status"] == "failed"
    assert "prompts are not upstream's" in found["prompt"]["reason"]

    broken = Mock(side_effect=RuntimeError("no room in /some/where/file.bin"))
    monkeypatch.setattr(codec, "codec_for", broken)
    monkeypatch.setattr(command, "compare_prompts", build)
    monkeypatch.setattr(qwen3, "rms_norm", unrounded)
    status, document, found = run("random:tiny", "--parts", "prompt,codes,codec")
    assert status == 1 and found["codec"]["reason"] == "RuntimeError: no room in file.bin"
    assert found["codes"]["status"] == "failed" and "codebook" in found["codes"]["reason"]
    assert found["prompt"]["status"] == "passed"  # an error within a section leaves the others


def test_without_upstream_the_codec_is_compared_with_ours_alone(run, monkeypatch):
    absent = Mock(side_effect=BackendUnavailable("the upstream package qwen-tts is needed"))
    monkeypatch.setattr(command, "load_upstream", absent)
    status, document, found = run("random:tiny", "--parts", "prompt,codes,codec")
    assert status == 0
    assert [found[name]["status"] for name in ("prompt", "codes", "codec")] == ["skipped", "skipped", "passed"]
    assert "qwen-tts is needed" in found["prompt"]["reason"] and "qwen-tts is needed" in found["codec"]["upstream"]


def test_bad_input_is_refused_before_anything_is_measured(checkpoint_cache, tmp_path, capsys):
    tiny = "random:tiny"
    for words in ([tiny, "--parts", "prompt,sound"], [tiny, "--minutes", "0"], [str(tmp_path / "absent")]):
        assert main(["parity", *words, "--output", str(tmp_path / "parity.json")]) == 2
    assert "prompt, codes, codec, kernel" in capsys.readouterr().err


def test_time_that_is_short_makes_less_and_says_how_much(tiny, quick, monkeypatch):
    monkeypatch.setattr(command, "CODES_REQUESTS", 3)
    upstream = lru_cache(1)(lambda: command.load_upstream(tiny, torch.bfloat16))
    codes = command.codes_section(tiny, upstream, 0.0)
    assert codes["frames"] == 6 and codes["asked"] == 18 and "reason" not in codes  # one utterance greedy, one drawn
    assert codec.codec_section(tiny, upstream, "cpu", 0.0)["frames"] == 8


def test_a_checkpoint_is_named_without_its_place(tiny: Checkpoint, tmp_path, run):
    folder = tmp_path / "somebody" / "my voice"
    shutil.copytree(tiny.folder, folder)
    assert name_of(str(folder)) == "my voice"
    assert [name_of(source) for source in ("small", "random:tiny", "Qwen/X")] == ["small", "random:tiny", "Qwen/X"]
    _, document, _ = run(str(folder), "--parts", "prompt")
    assert list(document["checkpoints"]) == ["my voice"]
    assert str(tmp_path) not in json.dumps(document) and "somebody" not in json.dumps(document)


def test_paths_go_and_other_words_with_strokes_stay():
    cleaned = without_paths({"a": ["read /at/me/config.json: expected", "~/voices/a.bin", "C:\\Users\\me\\b.bin"]})
    assert cleaned == {"a": ["read config.json: expected", "a.bin", "b.bin"]}
    kept = "Qwen/Qwen3-TTS https://example.org/a/b and/or 16/32/64 speech_tokenizer/config.json"
    assert without_paths(kept) == kept


def test_errors_are_told_per_frame_and_as_signal_over_noise_in_decibels():
    pcm, reference = np.zeros((2, 3 * SAMPLES_PER_FRAME))
    pcm[SAMPLES_PER_FRAME - 1], pcm[SAMPLES_PER_FRAME] = 0.25, -0.5
    assert codec.frame_errors(pcm, reference).tolist() == [0.25, 0.5, 0.0]
    with pytest.raises(CodecError, match="equal lengths"):
        codec.frame_errors(pcm[:-1], reference)
    signal = np.ones(1000)
    assert codec.snr_db(signal * 0.9, signal) == pytest.approx(20.0)
    assert codec.snr_db(signal, signal) == float("inf")
