"""Opens a checkpoint: the packaged voice, a folder in the Hub layout, a Hub id, or a random one generated on demand.
Headers and configuration are validated first; the weights are memory-mapped on request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mktts.checkpoint import files as weight_files
from mktts.checkpoint.files import MARKER, WeightFiles
from mktts.checkpoint.tensors import check, expected_codec_tensors, expected_tensors
from mktts.common import one_of, read_object
from mktts.errors import CheckpointError, SamplingError
from mktts.model.sampling import Sampling
from mktts.spec import CodecConfig, ModelConfig

if TYPE_CHECKING:
    from mktts.model.tokenizer import TextTokenizer

SMALL = "small"  # the trained voice that comes with the package
SMALL_FOLDER = Path(__file__).resolve().parent / "small"
DEFAULT_CHECKPOINT = SMALL  # the default of every command, notebook and service
SOURCES = "small, a folder, a Hub id, or random:SIZE[:TYPE]"

CODEC_FOLDER = "speech_tokenizer"
FRONT_ENDS = ("english",)  # the text front ends in mktts.text that a checkpoint can require
MIN_TEXT_CHARS = 50  # with a lower limit, texts would be cut in the middle of sentences
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# The commit of each released checkpoint against which the shape contract and the tests were written.
PINNED = {
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base": "5d83992436eae1d760afd27aff78a71d676296fc",
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice": "85e237c12c027371202489a0ec509ded67b5e4b5",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base": "fd4b254389122332181a7c3db7f27e918eec64e3",
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice": "0c0e3051f131929182e2c023b9537f8b1c68adfe",
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign": "5ecdb67327fd37bb2e042aab12ff7391903235d3",
    "Qwen/Qwen3-0.6B": "c1899de289a04d12100db370d81485cdf75e47ca",
}
FILES = ("*.json", "merges.txt", "model*.safetensors", "speech_tokenizer/model*.safetensors")  # patterns to download


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint on disk. It holds no weights; `tensors()` and `codec_tensors()` map them."""

    folder: Path
    config: ModelConfig
    codec_config: CodecConfig
    revision: str | None
    is_random: bool
    files: WeightFiles = field(repr=False)
    codec_files: WeightFiles = field(repr=False)

    def sampling(self) -> Sampling:
        """Its sampling settings, completed by upstream's defaults. Raises CheckpointError for a value out of range."""
        path = self.folder / "generation_config.json"
        raw = read_object(path)
        try:
            return Sampling().with_upstream(raw)
        except (SamplingError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None

    def with_instructions(self) -> Checkpoint:
        """Experimental: returns a copy whose cloned voices accept `instruct`, although Base was not trained with it.
        Raises CheckpointError for a checkpoint that does not clone voices."""
        if not self.config.type.clones:
            kind = self.config.type.name
            raise CheckpointError(f"{self.folder.name}: expected a Base checkpoint, found {kind}: leave the option out")
        kind = replace(self.config.type, instruct_sizes=(self.config.model_size,))
        return replace(self, config=replace(self.config, type=kind))

    def longest_text_chars(self) -> int | None:
        """Length of the longest text in training: `max_chars_per_segment` in generation_config.json, or None if absent,
        as in released checkpoints. Raises CheckpointError for less than MIN_TEXT_CHARS."""
        path = self.folder / "generation_config.json"
        longest = read_object(path).get("max_chars_per_segment")
        if longest is not None and (type(longest) is not int or longest < MIN_TEXT_CHARS):
            raise CheckpointError(f"{path}: max_chars_per_segment: expected at least {MIN_TEXT_CHARS}, got {longest!r}")
        return longest

    def text_front_end(self) -> str | None:
        """The text front end that the checkpoint requires: `text_front_end` in generation_config.json, or None if
        absent, as in released checkpoints, which take text unchanged. Raises CheckpointError for an unknown one."""
        path = self.folder / "generation_config.json"
        name = read_object(path).get("text_front_end")
        if name is not None:
            one_of(f"{path}: text_front_end", name, FRONT_ENDS, CheckpointError)
        return name

    def tensors(self) -> dict[str, Tensor]:
        """Talker, code predictor and speaker encoder by Hub name: CPU views of the mapped files, in their dtype.
        Nothing is copied; pages are read on first use. Treat the views as read-only."""
        return self.files.map()

    def codec_tensors(self) -> dict[str, Tensor]:
        """The codec decoder's tensors by Hub name without the leading `decoder.`: CPU views, normally float32."""
        return self.codec_files.map("decoder.")

    def tokenizer(self) -> TextTokenizer:
        """Loads the text tokenizer. Raises CheckpointError if its files are unusable or belong to another model."""
        from mktts.model.tokenizer import TextTokenizer

        tokenizer, role = TextTokenizer.load(self.folder), self.config.text_ids.assistant
        found = tokenizer.encode("assistant")
        if found != [role] or tokenizer.vocab_size > self.config.text_vocab_size:
            sizes = f"of at most {self.config.text_vocab_size}, found {found} of {tokenizer.vocab_size}"
            wrong = f"{self.folder / 'vocab.json'}: expected 'assistant' to be the one token {role} {sizes}"
            raise CheckpointError(f"{wrong}. Take vocab.json and merges.txt from the checkpoint's own repository.")
        return tokenizer


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Opens and validates a checkpoint. Raises CheckpointError.

    source: "small" (the trained voice that comes with the package), a folder, a Hub id such as
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice", or "random:SIZE[:TYPE][:full-codec][:margin]", generated in the cache on
    first use. revision: a commit, branch or tag of a Hub id; released checkpoints are pinned to a commit by default."""
    if str(source) == SMALL:
        if not (SMALL_FOLDER / "config.json").is_file():
            hint = "found none: name a folder or a Hub id, or take random:tiny (noise, not speech)"
            raise CheckpointError(f"checkpoint {SMALL!r}: expected the trained voice in {SMALL_FOLDER}, {hint}")
        folder, revision = SMALL_FOLDER, None
    else:
        from mktts.checkpoint.random.make import ensure_named

        expected = "small, a folder, a Hub id like Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice, or random:tiny"
        refusal = f"checkpoint {str(source)!r}: expected {expected}"
        folder, revision = resolve(source, revision, ensure_named, refusal)
    config, codec_config = ModelConfig.load(folder), CodecConfig.load(folder)
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: expected this file of the Hub layout, found nothing")
    codec_folder = folder / CODEC_FOLDER
    files, codec_files = weight_files.find(folder), weight_files.find(codec_folder)
    check(files.tensors, expected_tensors(config), str(folder))
    # Only cloning encodes reference audio: a checkpoint of another type may omit the codec's encoder entirely.
    encoder = config.type.clones or any(name.startswith("encoder.") for name in codec_files.tensors)
    codec_layout = expected_codec_tensors(read_object(codec_folder / "config.json"), encoder=encoder)
    check(codec_files.tensors, codec_layout, str(codec_folder))
    is_random = (folder / MARKER).is_file()
    checkpoint = Checkpoint(folder, config, codec_config, revision, is_random, files, codec_files)
    checkpoint.sampling()  # detects a broken generation_config.json now instead of at the first sentence
    checkpoint.longest_text_chars()
    checkpoint.text_front_end()
    return checkpoint


def resolve(
    source: str | Path, revision: str | None, make_random: Callable[[str], Path], refusal: str
) -> tuple[Path, str | None]:
    """Folder and revision of `source`. make_random: generates "random:...". refusal: start of the CheckpointError."""
    text = str(source)
    if text.startswith("random:"):
        return make_random(text), None
    folder = Path(source).expanduser()
    if text and folder.is_dir():
        return folder, revision
    if isinstance(source, str) and _HUB_ID.fullmatch(text):
        return download(text, revision)
    raise CheckpointError(f"{refusal}; found no such folder")


def download(repo_id: str, revision: str | None = None) -> tuple[Path, str]:
    """Folder and revision of `repo_id`, from the local Hub cache or the Hub. Raises CheckpointError without either."""
    revision = revision or PINNED.get(repo_id, "main")
    from huggingface_hub import errors, snapshot_download

    command = f"hf download {repo_id} --revision {revision} --local-dir FOLDER"
    by_folder = f"download it where there is a network ({command}) and pass that folder instead of the id"
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=list(FILES))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        found = f"expected a checkpoint on the Hub, found none ({type(error).__name__}). Check the id, or {by_folder}."
        raise CheckpointError(f"{repo_id} at revision {revision}: {found}") from None
    except Exception as error:  # huggingface_hub lets its HTTP client's own exceptions through
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        found = f"the Hub is offline, unreachable from here or answered with an error ({reason})"
        found += f", and the local cache does not hold it; {by_folder}."
        raise CheckpointError(f"{repo_id} at revision {revision}: {found}") from None
    return Path(folder), revision
