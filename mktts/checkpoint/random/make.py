"""Generates random checkpoints in exactly the Hub layout, for timing and parity without the released weights.
`released/` holds the small files of Qwen3-TTS-12Hz-0.6B-CustomVoice (Apache-2.0), with the speaker encoder's
configuration from Base; `sizes.json` holds the changes for other sizes."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mktts.checkpoint.files import MARKER
from mktts.checkpoint.random.weights import random_tensors, widen_margins
from mktts.checkpoint.tensors import expected_codec_tensors, expected_tensors
from mktts.common import cache_folder, one_of, read_object, write_json
from mktts.errors import CheckpointError
from mktts.model.tokenizer import byte_symbols
from mktts.spec import MODEL_TYPES, ModelConfig

RECIPE = 4  # increase it whenever the same arguments give different bytes, so that cached checkpoints are regenerated
FLAGS = ("full-codec", "margin")
SIZES = ("tiny", "tiny-projected", "0.6b", "1.7b")
_FOLDER = Path(__file__).resolve().parent
_RELEASED = _FOLDER / "released"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MERGES = _FOLDER / "merges.bpe"
SPECIAL_START = 151_643  # first special id = number of entries in the released vocab.json
# Tokens that upstream's prompt layout depends on, in byte symbols: roles and a blank line, one token each.
FIXED_IDS = {"user": 872, "assistant": 77_091, "ĊĊ": 271}

Json = dict[str, Any]


def small_files(size: str, model_type: str, full_codec: bool) -> dict[str, Json]:
    """Relative path -> content of every JSON file but the tokenizer's. Raises CheckpointError for unknown words."""
    one_of("size", size, SIZES, CheckpointError)
    one_of("type", model_type, MODEL_TYPES, CheckpointError)
    names = sorted(path.relative_to(_RELEASED).as_posix() for path in _RELEASED.rglob("*.json"))
    files = {name: read_object(_RELEASED / name) for name in names if name != _TOKENIZER_CONFIG}
    changes, kind = read_object(_FOLDER / "sizes.json"), MODEL_TYPES[model_type]
    config = _changed(files["config.json"], changes[size])
    config["tts_model_type"] = model_type
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    predictor["layer_types"] = predictor["layer_types"][: predictor["num_hidden_layers"]]
    if kind.clones:
        config["speaker_encoder_config"]["enc_dim"] = talker["hidden_size"]
    else:
        del config["speaker_encoder_config"]
    if not kind.speakers:
        languages = {name: id_ for name, id_ in talker["codec_language_id"].items() if "dialect" not in name}
        talker |= {"codec_language_id": languages, "spk_id": {}, "spk_is_dialect": {}}
    codec = "speech_tokenizer/config.json"
    if not full_codec:
        files[codec] = _changed(files[codec], changes["tiny-codec"])
    return files | {"config.json": config}


def _changed(content: Json, changes: Json) -> Json:
    """A copy of `content`, recursively updated with `changes`."""
    nested = {key: _changed(content[key], value) for key, value in changes.items() if isinstance(value, dict)}
    return {**content, **changes, **nested}


def make(
    folder: Path,
    size: str = "tiny",
    model_type: str = "custom_voice",
    *,
    margin: bool = False,
    eos_after: int | None = None,
    full_codec: bool = False,
) -> Path:
    """Writes a random checkpoint, bfloat16 with a float32 codec, to `folder` (completely or not at all); returns it.

    size: one of SIZES; in "tiny-projected" the talker is wider than the predictor.
    margin: separate the logits widely, so that greedy runs agree code for code between backends.
    eos_after: with `margin`, the number of frames before end-of-speech; None leaves end-of-speech to chance.
    full_codec: use the released codec's size for a tiny model too. Raises CheckpointError, also as `whole_folder`."""
    if eos_after is not None and not margin:
        raise CheckpointError("eos_after needs margin=True: plain random weights leave the end of speech to chance")
    files = small_files(size, model_type, full_codec or not size.startswith("tiny"))
    marker = {"random": True, "recipe": RECIPE, "size": size, "type": model_type, "margin": margin}
    files[MARKER] = marker | {"eos_after": eos_after}
    with whole_folder(folder) as work:
        write_files(work, files)
        config = ModelConfig.load(work)
        tensors = random_tensors(expected_tensors(config), 0, torch.bfloat16)
        if margin:
            widen_margins(tensors, config, eos_after)
        write_weights(work, tensors)
        codec = expected_codec_tensors(files["speech_tokenizer/config.json"])
        write_weights(work / "speech_tokenizer", random_tensors(codec, 0, torch.float32))
    return folder


def ensure_named(name: str, cache: str | Path | None = None) -> Path:
    """The folder of "random:SIZE[:TYPE][:full-codec][:margin[:eosN]]", generated in the cache on first use. Raises
    CheckpointError listing the allowed words, or if the cache cannot be written."""
    size, *rest = name.split(":")[1:] or [""]
    types = [word for word in rest if word in MODEL_TYPES]
    ends = [word for word in rest if re.fullmatch(r"eos[1-9]\d*", word)]
    unknown = [word for word in rest if word not in (*types, *ends, *FLAGS)]
    if size not in SIZES or unknown or len(types) > 1 or len(ends) > 1 or len(set(rest)) < len(rest):
        raise CheckpointError(
            f"checkpoint {name!r}: expected random:SIZE[:TYPE][:full-codec][:margin[:eosN]] with "
            f"SIZE one of {', '.join(SIZES)}; TYPE one of {', '.join(MODEL_TYPES)}; N frames until the end"
        )
    model_type = types[0] if types else "custom_voice"
    eos_after = int(ends[0].removeprefix("eos")) if ends else None
    words = [size, model_type, *(flag for flag in FLAGS if flag in rest), *ends]
    folder = cache_folder(cache) / f"random-r{RECIPE}-{'-'.join(words)}"
    how = {"margin": "margin" in rest, "eos_after": eos_after, "full_codec": "full-codec" in rest}
    return made_once(folder, lambda: make(folder, size, model_type, **how))


def made_once(folder: Path, make_it: Callable[[], object]) -> Path:
    """Returns `folder`, made by whichever process finishes first. Raises CheckpointError as `make_it`."""
    if not (folder / MARKER).is_file():
        try:
            make_it()
        except CheckpointError:
            if not (folder / MARKER).is_file():  # otherwise another process has made it in the meantime
                raise
    return folder


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `folder` when the block ends, and is removed if the block fails. Raises
    CheckpointError if `folder` has content or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: expected no folder or an empty one to write a checkpoint to, found content")
    work: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield work
        work.chmod(0o755)  # mkdtemp creates private folders
        os.rename(work, folder)
    except (OSError, SafetensorError) as error:
        hint = "Free some space, or choose another place with $MKTTS_CACHE."
        raise CheckpointError(f"{folder}: expected to write a random checkpoint there, but: {error}. {hint}") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)  # no longer there if the rename succeeded


@cache
def vocabulary() -> dict[str, int]:
    """Token -> id, without gaps below SPECIAL_START: the byte symbols, the pairs of merges.bpe, unreachable fillers.
    The pairs give some two hundred words a token of their own, among them iPhone, JavaScript and Thai words, which
    distinguish the Qwen pre-tokenizer from the Mistral one that upstream uses for local folders."""
    vocab = {symbol: i for i, symbol in enumerate(byte_symbols().values())}
    free = (i for i in range(len(vocab), SPECIAL_START) if i not in FIXED_IDS.values())
    for line in _MERGES.read_text(encoding="utf-8").splitlines()[1:]:
        token = line.replace(" ", "")
        if token not in vocab:
            vocab[token] = FIXED_IDS[token] if token in FIXED_IDS else next(free)
    vocab |= {f"<|unused_{i}|>": i for i in free}
    return dict(sorted(vocab.items(), key=lambda item: item[1]))


def write_files(folder: Path, files: dict[str, Json]) -> None:
    """Writes JSON files by their paths, and vocab.json, merges.txt and tokenizer_config.json of the small tokenizer."""
    for name, content in {**files, _TOKENIZER_CONFIG: read_object(_RELEASED / _TOKENIZER_CONFIG)}.items():
        write_json(folder / name, content, sort_keys=False)
    (folder / "vocab.json").write_text(json.dumps(vocabulary(), ensure_ascii=False), encoding="utf-8")
    shutil.copyfile(_MERGES, folder / "merges.txt")


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes `folder/model.safetensors`."""
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates private files
