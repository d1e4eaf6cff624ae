"""Makes random checkpoints in exactly the Hub layout, so that everything can run where no weights are.

Random weights: for timing and parity only. `released/` holds the small files of Qwen3-TTS-12Hz-0.6B-CustomVoice
(Apache-2.0), with Base's speaker encoder; `sizes.json` what the other sizes change in them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mktts.checkpoint.files import MARKER
from mktts.checkpoint.random.tokenizer import TOKENIZER_CONFIG, merges, tokenizer_config, vocabulary
from mktts.checkpoint.random.weights import random_tensors, widen_margins
from mktts.checkpoint.tensors import expected_codec_tensors, expected_tensors
from mktts.common import cache_folder, read_object, write_json
from mktts.errors import CheckpointError
from mktts.spec import MODEL_TYPES, ModelConfig

RECIPE = 4  # raise it whenever the same arguments give other bytes: cached checkpoints are then made again
FLAGS = ("full-codec", "margin")
SIZES = ("tiny", "tiny-projected", "0.6b", "1.7b")
_FOLDER = Path(__file__).resolve().parent
_RELEASED = _FOLDER / "released"

Json = dict[str, Any]


def small_files(size: str, model_type: str, full_codec: bool) -> dict[str, Json]:
    """Relative path -> content of every JSON file but the tokenizer's.

    Raises CheckpointError listing the allowed words for an unknown `size` or `model_type`.
    """
    if size not in SIZES:
        raise CheckpointError(f"size must be one of {', '.join(SIZES)}, found {size!r}")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(f"type must be one of {', '.join(MODEL_TYPES)}, found {model_type!r}")
    names = sorted(path.relative_to(_RELEASED).as_posix() for path in _RELEASED.rglob("*.json"))
    files = {name: read_object(_RELEASED / name) for name in names if name != TOKENIZER_CONFIG}
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
    codec = files["speech_tokenizer/config.json"]
    codec = codec if full_codec else _changed(codec, changes["tiny-codec"])
    return {**files, "config.json": config, "speech_tokenizer/config.json": codec}


def _changed(content: Json, changes: Json) -> Json:
    """`content` with the values of `changes` in their place, in the objects inside it too."""
    nested = {key: _changed(content[key], value) for key, value in changes.items() if isinstance(value, dict)}
    return {**content, **changes, **nested}


def make(
    folder: str | Path,
    size: str = "tiny",
    model_type: str = "custom_voice",
    *,
    seed: int = 0,
    margin: bool = False,
    eos_after: int | None = None,
    full_codec: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
) -> Path:
    """Writes a random checkpoint to `folder` (all of it or nothing) and returns the folder.

    size: "tiny", "tiny-projected" (talker wider than predictor), "0.6b", "1.7b".
    margin: widely separated logits, so that greedy runs agree code for code between backends.
    eos_after: with `margin`, end-of-speech after that many frames; otherwise end-of-speech is left to chance.
    full_codec: the released codec's size; default: full for 0.6b and 1.7b, tiny otherwise. Always float32.
    dtype: of the model, bfloat16 or float32. shards: files the model is spread over.

    Raises CheckpointError for unknown words, where `folder` exists and is not empty, or where it cannot be written.
    """
    full_codec = not size.startswith("tiny") if full_codec is None else full_codec
    if dtype not in (torch.bfloat16, torch.float32):
        raise CheckpointError(f"dtype must be torch.bfloat16 or torch.float32, found {dtype}")
    if eos_after is not None and not margin:
        raise CheckpointError(
            "eos_after needs margin=True: with plain random weights the end of speech is left to chance"
        )
    files = small_files(size, model_type, full_codec)
    marker = {"random": True, "recipe": RECIPE, "size": size, "type": model_type, "seed": seed}
    files[MARKER] = marker | {"margin": margin, "eos_after": eos_after}
    with whole_folder(Path(folder)) as work:
        (work / "speech_tokenizer").mkdir()
        for name, content in files.items():
            write_json(work / name, content, sort_keys=False)
        write_tokenizer(work)
        write_weights(work, _model_tensors(ModelConfig.load(work), seed, dtype, margin, eos_after), shards)
        codec = expected_codec_tensors(files["speech_tokenizer/config.json"])
        write_weights(work / "speech_tokenizer", random_tensors(codec, seed, torch.float32), 1)
    return Path(folder)


def ensure(
    size: str = "tiny",
    model_type: str = "custom_voice",
    *,
    seed: int = 0,
    margin: bool = False,
    eos_after: int | None = None,
    full_codec: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache: str | Path | None = None,
) -> Path:
    """Like `make`, into the cache ($MKTTS_CACHE, else ~/.cache/mktts); made once, by whichever process is first.

    Raises CheckpointError for unknown words, or where the cache cannot be written.
    """
    full = not size.startswith("tiny") if full_codec is None else full_codec
    words = [size, model_type, f"seed{seed}", str(dtype).removeprefix("torch."), f"{'full' if full else 'tiny'}-codec"]
    words += ["margin"] if margin else []
    words += [f"eos{eos_after}"] if eos_after is not None else []
    folder = cache_folder(cache) / f"random-r{RECIPE}-{'-'.join(words)}"
    if not (folder / MARKER).is_file():
        try:
            make(folder, size, model_type, seed=seed, margin=margin, eos_after=eos_after, full_codec=full, dtype=dtype)
        except CheckpointError:
            if not (folder / MARKER).is_file():  # otherwise another process made the same one first
                raise
    return folder


def ensure_named(name: str, cache: str | Path | None = None) -> Path:
    """The folder of "random:SIZE[:TYPE][:full-codec][:margin[:eosN]]", made on first use.

    Raises CheckpointError listing the allowed words.
    """
    size, *rest = name.split(":")[1:] or [""]
    types = [word for word in rest if word in MODEL_TYPES]
    ends = [word for word in rest if re.fullmatch(r"eos[1-9]\d*", word)]
    unknown = [word for word in rest if word not in (*types, *ends, *FLAGS)]
    if size not in SIZES or unknown or len(types) > 1 or len(ends) > 1 or len(set(rest)) < len(rest):
        raise CheckpointError(
            f"checkpoint {name!r}: expected random:SIZE[:TYPE][:full-codec][:margin[:eosN]] "
            f"with SIZE one of {', '.join(SIZES)}; TYPE one of {', '.join(MODEL_TYPES)}; N frames until the end"
        )
    return ensure(
        size,
        types[0] if types else "custom_voice",
        margin="margin" in rest,
        eos_after=int(ends[0].removeprefix("eos")) if ends else None,
        full_codec=True if "full-codec" in rest else None,
        cache=cache,
    )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A work folder that becomes `folder` when the block ends, and leaves nothing behind when it fails.

    Raises CheckpointError where `folder` exists and is not empty, or where it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: expected no folder or an empty one to write a checkpoint to, found content")
    work: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield work
        work.chmod(0o755)  # mkdtemp makes it private
        os.rename(work, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: expected to write a random checkpoint there, but: {error}. "
            "Free some space, or choose another place with $MKTTS_CACHE."
        ) from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)  # gone already where the rename succeeded


def _model_tensors(
    config: ModelConfig, seed: int, dtype: torch.dtype, margin: bool, eos_after: int | None
) -> dict[str, Tensor]:
    tensors = random_tensors(expected_tensors(config), seed, dtype)
    if margin:
        widen_margins(tensors, config, seed, eos_after)
    return tensors


def write_tokenizer(folder: Path) -> None:
    """The small tokenizer's vocab.json, merges.txt and tokenizer_config.json."""
    write_json(folder / "tokenizer_config.json", tokenizer_config(), sort_keys=False)
    (folder / "vocab.json").write_text(json.dumps(vocabulary(), ensure_ascii=False), encoding="utf-8")
    lines = "".join(f"{left} {right}\n" for left, right in merges())
    (folder / "merges.txt").write_text("#version: 0.2\n" + lines, encoding="utf-8")


def write_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """One `model.safetensors`, or `shards` files of about equal size and their index."""
    from safetensors.torch import save_file

    def save(group: dict[str, Tensor], name: str) -> None:
        save_file(group, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes its files private

    if shards == 1:
        save(tensors, "model.safetensors")
        return
    if not 1 < shards <= len(tensors):
        raise CheckpointError(f"shards must be between 1 and {len(tensors)}, found {shards}")
    total_bytes, done_bytes = sum(t.nbytes for t in tensors.values()), 0
    groups: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, tensor in tensors.items():
        groups[done_bytes * shards // total_bytes][name] = tensor
        done_bytes += tensor.nbytes
    groups = [group for group in groups if group]
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, start=1):
        file_name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        save(group, file_name)
        weight_map |= dict.fromkeys(group, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index, sort_keys=False)
