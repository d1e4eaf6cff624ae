"""The voice that comes with the package: where it is found, how large it is, and that upstream gives its codes."""

import shutil
from importlib.resources import files
from itertools import cycle, product

import pytest
import torch
from desk import fed
from safetensors.torch import load_file, save_file
from upstream_models import loaded

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint import open as checkpoint_module
from mktts.checkpoint.open import SMALL
from mktts.errors import CheckpointError
from mktts.measure.parity.kernel import Scope, parity_of
from mktts.measure.parity.upstream import compare_codes
from mktts.model.prompt import Request
from mktts.spec import SAMPLE_RATE_HZ

SPEAKERS = ("michael", "heart")  # programs take the first where none is named
SENTENCES = files("mktts.training.data").joinpath("held_out.txt").read_text(encoding="utf-8").splitlines()[:20]


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return open_checkpoint(SMALL)


def test_it_is_a_small_custom_voice_of_two_speakers_and_one_language(small):
    assert small.config.type.name == "custom_voice" and not small.is_random
    assert tuple(small.config.speakers) == SPEAKERS
    assert tuple(small.config.languages) == ("english",)
    assert all(name.startswith("decoder.") for name in small.codec_files.tensors)  # it has no reference encoder
    assert sum(path.stat().st_size for path in small.folder.rglob("*") if path.is_file()) <= 32 * 10**6


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("sentences", "max_frames"), [(4, 12), pytest.param(20, 160, marks=pytest.mark.slow)])
def test_codes_are_upstreams(small, sampled, sentences, max_frames):
    """Of both speakers, in both layouts, with and without the language."""
    sampling = small.sampling() if sampled else small.sampling().greedy()
    kinds = cycle(product(("whole", "streaming"), zip(SPEAKERS, ("auto", "english"), strict=True)))
    asked = [
        Request(text, language=language, speaker=speaker, layout=layout)
        for text, (layout, (speaker, language)) in zip(SENTENCES[:sentences], kinds, strict=False)
    ]
    rows = compare_codes(small, asked, sampling, 7, max_frames, torch.float32, loaded(SMALL, torch.float32)[1])
    assert [row for row in rows if not row["equal"]] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_megakernel_is_as_near_to_fp32_as_bf16_is(small):
    """Of a trained voice single frames weigh much: on one H100 the kernel's error over bf16 PyTorch's was 0.94 to 1.18
    for code 0 and 1.02 to 1.11 for the others in five runs of 24 to 480 frames, 1.00 to 1.04 for hidden states. Rows in
    the wrong place give more than 1.5 (tests/kernel/test_build.py)."""
    found = parity_of(str(small.folder), Scope((16, 200), 60, 0), "megakernel", "cuda")
    ratios = {name: value["ratio"] for name, value in found["forced"]["pooled"].items()}
    assert ratios["hidden"] <= 1.1 and max(ratios.values()) <= 1.3, ratios
    assert found["divergence"]["passed"], found["divergence"]


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_a_text_longer_than_those_it_learnt_from_takes_no_longer_than_its_words(speaking, speaker):
    """In one piece 200 characters took 37 s."""
    text = " ".join(SENTENCES[:4])
    assert len(text) > 150
    stream, session = speaking.stream(text, speaker=speaker, seed=0), speaking.open(speaker=speaker, seed=0)
    for said, pcm in ((stream, stream.read()), (session, fed(session, [text]))):
        assert said.finish_reason == "eos" and 0.04 < len(pcm) / SAMPLE_RATE_HZ / len(text) < 0.09
        assert abs(pcm).max() > 0


def test_where_it_is_absent_the_error_says_what_else_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_module, "SMALL_FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)'small'.*trained voice.*random:tiny"):
        open_checkpoint(SMALL)


def test_an_encoder_is_left_out_whole_or_not_at_all_and_never_of_a_base_checkpoint(tmp_path, tiny, tiny_base):
    for checkpoint, name, dropped, accepted in (
        (tiny, "none", "encoder.", True),
        (tiny, "part", "encoder.quantizer.", False),
        (tiny_base, "base", "encoder.", False),
    ):
        folder = tmp_path / name
        shutil.copytree(checkpoint.folder, folder)
        file = folder / "speech_tokenizer" / "model.safetensors"
        save_file({n: t for n, t in load_file(file).items() if not n.startswith(dropped)}, file)
        if accepted:
            assert open_checkpoint(folder).codec_tensors().keys() == checkpoint.codec_tensors().keys()
        else:
            with pytest.raises(CheckpointError, match="encoder"):
                open_checkpoint(folder)
