"""Opens a Qwen3 text checkpoint (such as Qwen/Qwen3-0.6B): a folder in the Hub layout, a Hub id, or a random one.

As for speech checkpoints, everything a file header can tell is checked before `open_text_checkpoint` returns, and
weights are memory-mapped when asked for. What the decoder does not compute is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mktts.checkpoint import files as weight_files
from mktts.checkpoint.files import WeightFiles
from mktts.checkpoint.open import resolve
from mktts.checkpoint.tensors import check
from mktts.common import read_object
from mktts.errors import CheckpointError, SamplingError
from mktts.llm.config import EMBEDDING, HEAD, TextConfig, expected_text_tensors
from mktts.model.sampling import Choice

if TYPE_CHECKING:
    from mktts.llm.tokens import TextVocabulary

# Of generation_config.json: settings that change the distribution and that Choice does not have.
_NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None, "typical_p": 1.0, "num_beams": 1}


@dataclass(frozen=True)
class TextCheckpoint:
    """A validated text checkpoint on disk. Holds no weights; `tensors()` maps them."""

    folder: Path
    config: TextConfig
    revision: str | None
    is_random: bool
    files: WeightFiles = field(repr=False)

    def choice(self) -> Choice:
        """How this checkpoint wants its tokens chosen: generation_config.json, then transformers' defaults.

        Raises CheckpointError for a value out of range, or a setting that Choice does not have.
        """
        path = self.folder / "generation_config.json"
        raw: Mapping[str, Any] = read_object(path) if path.is_file() else {}
        for key, neutral in _NEUTRAL.items():
            if raw.get(key, neutral) not in (neutral, None):
                raise CheckpointError(f"{path}: {key} must be {neutral!r}, found {raw[key]!r}: not supported")
        default = Choice(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)  # transformers' GenerationConfig
        values = {f.name: raw[f.name] for f in fields(Choice) if raw.get(f.name) is not None}
        try:
            return Choice(**{**vars(default), **values})
        except (SamplingError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None

    def tensors(self) -> dict[str, Tensor]:
        """The weights by Hub name: CPU views of the mapped files, in their dtype. Treat them as read-only.

        A tied checkpoint's own copy of the head (the released 0.6B stores one) is left out.
        """
        return {name: t for name, t in self.files.map().items() if name != HEAD or not self.config.tied}

    def tokenizer(self) -> TextVocabulary:
        """The tokenizer of this checkpoint. Raises CheckpointError where its files are unusable or too large."""
        from mktts.llm.tokens import TextVocabulary

        return TextVocabulary.load(self.folder, self.config.stack.vocab_size)


def open_text_checkpoint(source: str | Path | TextCheckpoint, revision: str | None = None) -> TextCheckpoint:
    """Opens and validates a text checkpoint.

    `source` is a folder, a Hub id such as "Qwen/Qwen3-0.6B" (`revision`: a commit, branch or tag; 0.6B is pinned),
    or "random:SIZE[:margin]" (see mktts.llm.random), made in the cache on first use.

    Raises CheckpointError naming what was expected, what was found and what to do; tensors are named.
    """
    if isinstance(source, TextCheckpoint):
        return source

    def make_random(name: str) -> Path:
        from mktts.llm.random import ensure_named

        return ensure_named(name)

    expected = "a folder, a Hub id like Qwen/Qwen3-0.6B, or random:tiny"
    refusal = f"text checkpoint {str(source)!r}: expected {expected}"
    return _open_folder(*resolve(source, revision, make_random, refusal))


def _open_folder(folder: Path, revision: str | None = None) -> TextCheckpoint:
    config = TextConfig.load(folder)
    files = weight_files.find(folder)
    expected = expected_text_tensors(config)
    if config.tied and HEAD in files.tensors:
        expected[HEAD] = expected[EMBEDDING]
    check(files.tensors, expected, str(folder))
    checkpoint = TextCheckpoint(folder, config, revision, weight_files.is_random(folder), files)
    checkpoint.choice()  # a broken generation_config.json is found now, not at the first text
    return checkpoint
