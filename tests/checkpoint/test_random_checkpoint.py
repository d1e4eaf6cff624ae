"""Made checkpoints: the Hub's files, loaded by upstream itself, the same for the same seed, wide margins on request."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from upstream_models import loaded

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.random import make as random_checkpoint
from mktts.checkpoint.random.make import SPECIAL_START, vocabulary
from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import TensorSpec
from mktts.engine import upstream
from mktts.errors import CheckpointError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling

_SMALL = ("config.json", "configuration.json", "preprocessor_config.json", "model.safetensors")
HUB_FILES = {"generation_config.json", "merges.txt", "tokenizer_config.json", "vocab.json", *_SMALL}
HUB_FILES |= {f"speech_tokenizer/{name}" for name in _SMALL}
TEXT = "Hello world, this is speech."


def test_the_files_are_the_hubs_and_a_marker_that_says_they_are_random(tiny, tmp_path):
    files = {str(path.relative_to(tiny.folder)) for path in tiny.folder.rglob("*") if path.is_file()}
    assert files == HUB_FILES | {"mktts.json"}
    assert tiny.is_random and tiny.revision is None
    shutil.copytree(tiny.folder, tmp_path / "unmarked", ignore=shutil.ignore_patterns("mktts.json"))
    assert not open_checkpoint(tmp_path / "unmarked").is_random


@pytest.mark.parametrize("words", ["tiny", "tiny:base", "tiny:voice_design", "tiny-projected"])
def test_upstream_loads_every_type_and_holds_these_weights(words, checkpoint_cache):
    checkpoint, upstreams = loaded("random:" + words)
    model = upstreams.model
    held, held_codec = model.state_dict(), model.speech_tokenizer.model.state_dict()
    ours = checkpoint.tensors()
    assert held.keys() == ours.keys()
    assert all(torch.equal(held[name], ours[name]) for name in ours)
    codec = checkpoint.codec_tensors()
    assert all(torch.equal(held_codec["decoder." + name], codec[name]) for name in codec)
    assert model.tts_model_type == checkpoint.config.type.name


def test_a_random_waveform_is_neither_silent_nor_clipped(tiny):
    codec = loaded("random:tiny")[1].model.speech_tokenizer.model
    codes = torch.randint(0, 2048, (1, 16, 25), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pcm = codec.decoder(codes)
    assert 0.02 < pcm.square().mean().sqrt() < 0.2
    assert pcm.abs().max() < 0.9


def test_a_checkpoint_that_is_made_again_is_the_same(tmp_path, tiny):
    again = random_checkpoint.make(tmp_path / "again")
    for name in HUB_FILES:
        assert (again / name).read_bytes() == (tiny.folder / name).read_bytes()


def test_name_and_seed_alone_decide_a_tensor():
    specs = {name: TensorSpec((4, 8)) for name in ("a.weight", "b.weight")}
    first, again, other = (random_tensors(specs, seed, torch.float32) for seed in (0, 0, 1))
    assert torch.equal(first["a.weight"], again["a.weight"])
    assert not torch.equal(first["a.weight"], other["a.weight"])
    assert not torch.equal(first["a.weight"], first["b.weight"])


def test_the_vocabulary_has_the_released_ids_and_one_token_per_word(tiny):
    assert sorted(vocabulary().values()) == list(range(SPECIAL_START))
    tokenizer = tiny.tokenizer()
    known = {text: tokenizer.encode(text) for text in ("\n", "\n\n", "user", "assistant")}
    assert known == {"\n": [198], "\n\n": [271], "user": [872], "assistant": [77_091]}
    words = "iPhone JavaScript the would people speech weather please".split()
    assert all(len(tokenizer.encode(form)) == 1 for word in words for form in (word, " " + word))


@pytest.mark.parametrize("name", ["random:tiny:margin", "random:tiny-projected:margin"])
def test_with_margins_bf16_and_fp32_choose_the_same_codes_and_other_text_gives_other_ones(name):
    def codes(text: str, dtype: torch.dtype) -> torch.Tensor:
        request = Request(text, language="english", speaker="ryan", layout="streaming")
        return upstream.generate_codes(loaded(name, dtype)[1], request, Sampling().greedy(), 0, 6)

    fine = codes(TEXT, torch.float32)
    assert fine.shape == (6, 16)
    assert torch.equal(fine, codes(TEXT, torch.bfloat16))
    assert not torch.equal(fine, codes("Good morning, what a day.", torch.float32))
    assert len(set(fine[:, 0].tolist())) == 6


def test_losing_the_race_takes_the_winners_checkpoint(tmp_path, monkeypatch):
    make = random_checkpoint.make

    def late(folder: Path, *args: object, **options: object) -> Path:
        make(folder, *args, **options)
        return make(folder, *args, **options)  # what the slower of two processes sees

    monkeypatch.setattr(random_checkpoint, "make", late)
    assert open_checkpoint(random_checkpoint.ensure_named("random:tiny", tmp_path)).is_random


def test_the_cache_is_at_home_or_a_private_temporary_folder_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delenv("MKTTS_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))  # which cannot be made
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = tmp_path / f"mktts-{os.getuid()}"
    ours.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="folder of user.*MKTTS_CACHE"):
        random_checkpoint.cache_folder()
    ours.unlink()
    ours.touch()
    with pytest.raises(CheckpointError, match="to make this folder.*MKTTS_CACHE"):
        random_checkpoint.cache_folder()
    ours.unlink()
    for _ in range(2):
        assert random_checkpoint.cache_folder() == ours and ours.stat().st_mode & 0o777 == 0o700
    assert random_checkpoint.ensure_named("random:tiny").parent == ours
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert random_checkpoint.cache_folder() == tmp_path / "home" / ".cache" / "mktts"
    monkeypatch.setenv("MKTTS_CACHE", str(tmp_path / "named"))
    assert random_checkpoint.cache_folder() == tmp_path / "named"


def test_a_failed_make_leaves_nothing_and_a_folder_with_content_as_it_is(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(CheckpointError, match="disk full.*MKTTS_CACHE"):
            random_checkpoint.ensure_named("random:tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="found content"):
        random_checkpoint.make(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


WORDS_ALLOWED = "tiny, tiny-projected, 0.6b, 1.7b.*base, custom_voice, voice_design"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((words, WORDS_ALLOWED) for words in ("", "huge", "tiny:bass", "tiny:base:base", "tiny:base:voice_design")),
        *((words, WORDS_ALLOWED) for words in ("tiny:margin:eos0", "tiny:full_codec")),
        ("tiny:eos5", "eos_after needs margin"),
        ("tiny:margin:eos1", "at least 2"),
    ],
)
def test_unknown_or_impossible_words_are_refused_and_leave_nothing(words, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        random_checkpoint.ensure_named(f"random:{words}", tmp_path)
    assert list(tmp_path.iterdir()) == []
