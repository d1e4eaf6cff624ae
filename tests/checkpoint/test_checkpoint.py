"""The shape contract against upstream's classes and the released file sizes; the loader against broken folders. Made
checkpoints: the Hub's files, loaded by upstream itself, the same for the same seed, wide margins on request."""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from upstream_models import loaded

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint import open as checkpoint_module
from mktts.checkpoint.random import make as random_checkpoint
from mktts.checkpoint.random.make import SPECIAL_START, small_files, vocabulary
from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import TensorSpec, TensorSpecs, expected_codec_tensors, expected_tensors
from mktts.engine import upstream
from mktts.errors import CheckpointError
from mktts.llm import checkpoint as text
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.spec import ModelConfig
from mktts.text.split import SEGMENT_CHARS, segment_chars

PT = {"format": "pt"}
HEAD = "talker.codec_head.weight"
_SMALL = ("config.json", "configuration.json", "preprocessor_config.json", "model.safetensors")
HUB_FILES = {"generation_config.json", "merges.txt", "tokenizer_config.json", "vocab.json", *_SMALL}
HUB_FILES |= {f"speech_tokenizer/{name}" for name in _SMALL}
TEXT = "Hello world, this is speech."
WORDS_ALLOWED = "tiny, tiny-projected, 0.6b, 1.7b.*base, custom_voice, voice_design"


def speech(size: str, model_type: str) -> Callable[[Path], TensorSpecs]:
    def layout(folder: Path) -> TensorSpecs:
        (folder / "config.json").write_text(json.dumps(small_files(size, model_type, True)["config.json"]))
        return expected_tensors(ModelConfig.load(folder))

    return layout


def speech_codec(_: Path) -> TensorSpecs:
    return expected_codec_tensors(small_files("0.6b", "base", True)["speech_tokenizer/config.json"])


def text_model(folder: Path) -> TensorSpecs:
    """Qwen/Qwen3-0.6B: tied, and the head stored all the same."""
    (folder / "config.json").write_text(json.dumps(text.config_json("0.6b")))
    layout = text.expected_text_tensors(text.TextConfig.load(folder))
    return layout | {text.HEAD: layout[text.EMBEDDING]}


@pytest.mark.parametrize(
    ("layout_of", "dtype", "metadata", "tensors", "params", "file_bytes"),
    [
        (speech("0.6b", "base"), "BF16", None, 478, 914_643_008, 1_829_344_272),
        (speech("0.6b", "custom_voice"), "BF16", PT, 402, 905_788_672, 1_811_626_576),
        (speech("1.7b", "base"), "BF16", None, 480, 1_928_677_440, 3_857_413_744),
        (speech("1.7b", "custom_voice"), "BF16", PT, 404, 1_916_676_352, 3_833_402_552),
        (speech("1.7b", "voice_design"), "BF16", PT, 404, 1_916_676_352, 3_833_402_552),
        (speech_codec, "F32", None, 496, 170_557_441, 682_293_092),
        (text_model, "BF16", PT, 311, 596_049_920 + 151_936 * 1_024, 1_503_300_328),
    ],
)
def test_a_layout_gives_the_released_file_to_a_byte(layout_of, dtype, metadata, tensors, params, file_bytes, tmp_path):
    layout = layout_of(tmp_path)
    assert (len(layout), sum(spec.params for spec in layout.values())) == (tensors, params)
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, spec in sorted(layout.items()):
        start, end = end, end + spec.params * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    header_bytes = len(json.dumps(header, separators=(",", ":")))
    assert 8 + -(-header_bytes // 8) * 8 + end == file_bytes  # its length first; padded to 8


@pytest.fixture
def broken(tiny: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to break."""
    return Path(shutil.copytree(tiny.folder, tmp_path / "broken"))


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def talker(**values: int) -> Callable[[Path], object]:
    return lambda f: edit_json(f / "config.json", lambda c: c["talker_config"].update(values))


def generation(**values: object) -> Callable[[Path], object]:
    return lambda f: edit_json(f / "generation_config.json", lambda c: c.update(values))


def weights(change: Callable[[dict[str, torch.Tensor]], object], folder: str = ".") -> Callable[[Path], object]:
    def edited(f: Path) -> None:
        path = f / folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return edited


def codec(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda f: edit_json(f / "speech_tokenizer/config.json", change)


def written(content: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """The weights' file with other bytes."""
    return lambda f: (f / "model.safetensors").write_bytes(content((f / "model.safetensors").read_bytes()))


def removed(name: str) -> Callable[[Path], object]:
    return lambda f: (f / name).unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (talker(num_hidden_layers=4), "talker.model.layers.3. | expected shape | found no such tensor | 10 more"),
        (talker(num_hidden_layers=2), "talker.model.layers.2. | expected no such tensor | found shape"),
        (talker(head_dim=64), "talker.model.layers.0.self_attn.q_proj.weight | shape (256, 64) | found (128, 64)"),
        (talker(vocab_size=3073), "talker.model.codec_embedding.weight | shape (3073, 64) | found (3072, 64)"),
        (weights(lambda t: t.update({HEAD: t[HEAD].half()})), f"{HEAD} | expected dtype BF16 or F32 | found F16"),
        (weights(lambda t: t.pop(HEAD)), f"{HEAD} | expected shape (3072, 64) | found no"),
        (weights(lambda t: t.update(lora=torch.zeros(3))), "lora | expected no such tensor | found shape (3,)"),
        (weights(lambda t: t.pop("decoder.pre_conv.conv.bias"), "speech_tokenizer"), "pre_conv.conv.bias | no such"),
        (codec(lambda c: c["encoder_config"].update(intermediate_size=65)), "fc1.weight | (65, 64) | found (64, 64)"),
        (codec(lambda c: c.pop("encoder_config")), "speech_tokenizer | encoder_config"),
        (written(lambda old: old[:-100]), "model.safetensors | expected a safetensors file | torn"),
        (written(lambda old: old[:500]), "model.safetensors | expected a safetensors file | found 500 bytes"),
        (
            written(lambda old: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "model.safetensors | Git LFS pointer",
        ),
        (written(lambda old: struct.pack("<Q", 8) + b"[1, 2]  "), "model.safetensors | expected a safetensors file"),
        (removed("model.safetensors"), "expected model.safetensors | found neither"),
        *((removed(name), f"{name} | found nothing") for name in ("vocab.json", "config.json")),
        (removed("generation_config.json"), "generation_config.json"),
        (generation(temperature=-1), "generation_config.json | temperature | -1"),
        (generation(max_chars_per_segment=49), "generation_config.json | max_chars_per_segment | at least 50 | 49"),
        (generation(text_front_end="klingon"), "generation_config.json | text_front_end | english | klingon"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_checkpoint_is_refused_by_name(broken, change, said):
    change(broken)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(broken)
    assert [word for word in said.split(" | ") if word not in str(caught.value)] == []


def test_a_checkpoint_may_name_the_longest_text_it_takes_at_once_and_the_front_end_that_reads_it(broken):
    def chars(**settings: object) -> tuple[int, int]:
        generation(**settings)(broken)
        longest = open_checkpoint(broken).longest_text_chars()
        return segment_chars(longest, fed=False), segment_chars(longest, fed=True)

    assert chars() == (SEGMENT_CHARS, SEGMENT_CHARS)
    assert chars(max_chars_per_segment=100) == (100, 40)  # fed text is cut at 2.5 times that at the latest
    assert chars(max_chars_per_segment=10_000) == (SEGMENT_CHARS, SEGMENT_CHARS)
    assert open_checkpoint(broken).text_front_end() is None
    generation(text_front_end="english")(broken)
    assert open_checkpoint(broken).text_front_end() == "english"


def test_shards_hold_the_tensors_of_one_file_and_a_missing_or_wrong_one_is_named(tiny, broken):
    """Divided as the Hub's own library does it."""
    tensors = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    save_torch_state_dict(tensors, broken, max_shard_size=sum(t.nbytes for t in tensors.values()) // 3)
    assert len(list(broken.glob("model-*.safetensors"))) == 3
    one, three = tiny.tensors(), open_checkpoint(broken).tensors()
    assert one.keys() == three.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)
    index, last = broken / "model.safetensors.index.json", "model-00003-of-00003.safetensors"
    name = next(n for n, shard in json.loads(index.read_text())["weight_map"].items() if shard == last)
    edit_json(index, lambda c: c["weight_map"].update({name: "model-00001-of-00003.safetensors"}))
    with pytest.raises(CheckpointError, match=f"model-00001-of-00003.safetensors: tensor {name}"):
        open_checkpoint(broken)
    edit_json(index, lambda c: c["weight_map"].update({name: last}))
    (broken / last).unlink()
    with pytest.raises(CheckpointError, match=f"tensor {name}.*{last}.*no such file"):
        open_checkpoint(broken)
    edit_json(index, lambda c: c["weight_map"].update({name: "../" + last}))
    with pytest.raises(CheckpointError, match="file names beside the index"):
        open_checkpoint(broken)


def test_tensors_are_the_files_bytes_and_outlive_everything_else(broken):
    want = load_file(broken / "model.safetensors")
    want_codec = load_file(broken / "speech_tokenizer" / "model.safetensors")
    opened = open_checkpoint(broken)
    tensors, codec = opened.tensors(), opened.codec_tensors()
    del opened
    shutil.rmtree(broken)
    assert tensors.keys() == want.keys()
    assert all(torch.equal(tensors[name], want[name]) and tensors[name].dtype == torch.bfloat16 for name in want)
    decoder = {name: tensor for name, tensor in want_codec.items() if name.startswith("decoder.")}
    assert {"decoder." + name for name in codec} == decoder.keys()
    assert all(torch.equal(codec[name.removeprefix("decoder.")], tensor) for name, tensor in decoder.items())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_lie_in_the_mapped_file(tiny):
    path = str((tiny.folder / "model.safetensors").resolve())
    tensors = tiny.tensors().values()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    mapped = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    assert all(any(tensor.data_ptr() in part for part in mapped) for tensor in tensors)


def test_sampling_comes_from_the_file_then_from_upstreams_defaults(tiny, broken):
    assert tiny.sampling() == Sampling()
    changed = {"temperature": 0.7, "subtalker_dosample": False, "subtalker_top_k": 7, "repetition_penalty": 1.2}
    (broken / "generation_config.json").write_text(json.dumps(changed))
    got = open_checkpoint(broken).sampling()
    assert (got.talker.temperature, got.talker.top_k, got.talker.do_sample) == (0.7, 50, True)
    assert (got.predictor.do_sample, got.predictor.top_k, got.predictor.temperature) == (False, 7, 0.9)
    assert got.repetition_penalty == 1.2


def test_a_hub_id_is_fetched_at_its_pinned_commit(tiny, monkeypatch):
    download = Mock(return_value=str(tiny.folder))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    name = "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"
    opened = open_checkpoint(name)
    (repo_id,), asked = download.call_args
    assert repo_id == name and asked["revision"] == opened.revision == checkpoint_module.PINNED[name]
    assert len(opened.revision) == 40
    files = [path.relative_to(tiny.folder).as_posix() for path in tiny.folder.rglob("*") if path.is_file()]
    assert list(filter_repo_objects(files, allow_patterns=asked["allow_patterns"])) == files
    assert not list(filter_repo_objects(["README.md", "images/a.png"], allow_patterns=asked["allow_patterns"]))
    assert open_checkpoint(name, revision="abc").revision == "abc"
    assert open_checkpoint("someone/finetune").revision == "main"


def test_offline_a_network_failure_and_a_source_that_is_nothing_are_said_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in ("", "nowhere", "/no/such/folder", "a/b/c", "./missing"):
        with pytest.raises(CheckpointError, match="expected"):
            open_checkpoint(source)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointError, match=r"Qwen/Qwen3-TTS-12Hz-1.7B-Base.*offline.*pass that folder"):
            open_checkpoint("Qwen/Qwen3-TTS-12Hz-1.7B-Base")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=RuntimeError("name resolution failed")))
    with pytest.raises(CheckpointError, match="offline.*RuntimeError: name resolution failed.*pass that folder"):
        open_checkpoint("Qwen/Qwen3-TTS-12Hz-0.6B-Base")


# ---- made checkpoints


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


def test_a_checkpoint_that_is_made_again_is_the_same_and_a_tensor_of_another_name_or_seed_is_not(tmp_path, tiny):
    again = random_checkpoint.make(tmp_path / "again")
    for name in HUB_FILES:
        assert (again / name).read_bytes() == (tiny.folder / name).read_bytes()
    specs = {name: TensorSpec((4, 8)) for name in ("a.weight", "b.weight")}
    first, other = (random_tensors(specs, seed, torch.float32) for seed in (0, 1))
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
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", Mock(side_effect=OSError("disk full")))
        with pytest.raises(CheckpointError, match="disk full.*MKTTS_CACHE"):
            random_checkpoint.ensure_named("random:tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="found content"):
        random_checkpoint.make(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


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
