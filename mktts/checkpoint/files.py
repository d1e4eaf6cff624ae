"""safetensors files, single or sharded: reads headers without the weights, and maps the weights without copying."""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mktts.checkpoint.tensors import TensorSpec, TensorSpecs
from mktts.errors import CheckpointError

MARKER = "mktts.json"  # a file that marks a checkpoint of random weights, written by mktts.checkpoint.random


@dataclass(frozen=True)
class WeightFiles:
    """The files that together hold one set of tensors, and the content of their headers."""

    paths: tuple[Path, ...]
    tensors: TensorSpecs

    def map(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, which is removed, as views of the memory-mapped files. A view
        keeps its mapping alive, so it may outlive this object; the first use of a page reads it from disk."""
        from safetensors import SafetensorError, safe_open

        views: dict[str, Tensor] = {}
        for path in self.paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    views |= {k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: expected a readable safetensors file, found: {error}") from None
        return views


def find(folder: Path) -> WeightFiles:
    """Reads the headers of `folder/model.safetensors`, or of the shards its index names. Raises CheckpointError."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return WeightFiles((single,), read_header(single))
    if not index.is_file():
        lacks = "expected model.safetensors or model.safetensors.index.json, found neither"
        raise CheckpointError(f"{folder}: {lacks}. Pass the folder of a downloaded checkpoint.")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = list(dict.fromkeys(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: expected an object with a weight_map, found: {error!r}") from None
    if not shards or any(not isinstance(shard, str) or Path(shard).name != shard for shard in shards):
        found = sorted(map(str, shards))
        raise CheckpointError(f"{index}: expected file names beside the index in weight_map, found {found}")
    tensors = {}
    for shard in shards:
        path, names = folder / shard, [name for name, its in weight_map.items() if its == shard]
        if not path.is_file():
            lacks = f"tensor {names[0]}: expected it in the shard {shard}, found no such file"
            raise CheckpointError(f"{index}: {lacks}. The download is incomplete; fetch the missing shard.")
        header = read_header(path)
        if missing := [name for name in names if name not in header]:
            raise CheckpointError(f"{path}: tensor {missing[0]}: the index expects it in this shard, found no such")
        tensors |= header
    return WeightFiles(tuple(folder / shard for shard in shards), tensors)


def read_header(path: Path) -> TensorSpecs:
    """Reads a safetensors file's header. Raises CheckpointError if the file is truncated or not safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}
            return {name: TensorSpec(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        found = f"expected a safetensors file, found {path.stat().st_size} bytes that are none: {error}"
        hint = "The file is torn or a Git LFS pointer; download it again."
        raise CheckpointError(f"{path}: {found}. {hint}") from None
