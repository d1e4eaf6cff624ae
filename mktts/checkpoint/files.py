"""safetensors files, single or sharded: headers read without touching the weights, weights mapped without a copy.

Format: 8-byte little-endian header length, JSON header, data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mktts.checkpoint.tensors import DTYPE_BYTES, TensorSpec, TensorSpecs
from mktts.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MARKER = "mktts.json"  # in a folder: its weights are random (mktts.checkpoint.random wrote them)


@dataclass(frozen=True)
class WeightFiles:
    """The files that together hold one set of tensors, and what their headers say."""

    paths: tuple[Path, ...]
    tensors: TensorSpecs

    def map(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors whose name starts with `prefix`, prefix removed, as views of the memory-mapped files.

        A view keeps its mapping alive, so it outlives this object; the first use of a page reads it from disk.
        """
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
    """Reads the headers of `folder/model.safetensors`, or of the shards its index names.

    Raises CheckpointError for a missing, torn or foreign file and for a tensor that is not in the shard the index
    names for it.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return WeightFiles((single,), read_header(single))
    if not index.is_file():
        raise CheckpointError(
            f"{folder}: expected model.safetensors or model.safetensors.index.json, found neither. "
            "Pass the folder of a downloaded checkpoint."
        )
    weight_map = _read_index(index)
    headers: dict[str, TensorSpecs] = {}
    for name, shard in weight_map.items():
        path = folder / shard
        if shard not in headers:
            if not path.is_file():
                raise CheckpointError(
                    f"{index}: tensor {name}: expected it in the shard {shard}, found no such file. "
                    "The download is incomplete; fetch the missing shard."
                )
            headers[shard] = read_header(path)
        if name not in headers[shard]:
            raise CheckpointError(f"{path}: tensor {name}: the index expects it in this shard, found no such tensor")
    tensors: TensorSpecs = {}
    for shard, header in headers.items():
        twice = sorted(header.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{folder / shard}: tensor {twice[0]}: expected it in one shard, found it in two")
        tensors |= header
    return WeightFiles(tuple(folder / shard for shard in headers), tensors)


def is_random(folder: Path) -> bool:
    """Whether a marker says that `folder` holds random weights."""
    try:
        return json.loads((folder / MARKER).read_text(encoding="utf-8"))["random"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_header(path: Path) -> TensorSpecs:
    """What a safetensors file says it holds. Raises CheckpointError where the file is torn or not safetensors."""
    found_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES
        if header_bytes >= MAX_HEADER_BYTES or 8 + header_bytes > found_bytes:
            raise CheckpointError(
                f"{path}: expected a safetensors header, found {found_bytes} bytes that hold none. "
                "The file is torn or a Git LFS pointer; download it again."
            )
        text = file.read(header_bytes)
    try:
        raw = json.loads(text)
        entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
        tensors = {name: TensorSpec(tuple(entry["shape"]), (entry["dtype"],)) for name, entry in entries.items()}
        ends = {name: entry["data_offsets"] for name, entry in entries.items()}
        data_bytes = max((end for _, end in ends.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected a safetensors header, found JSON that is not one: {error!r}") from None
    expected_bytes = 8 + header_bytes + data_bytes
    if found_bytes != expected_bytes:
        cut = next((f"tensor {n}: " for n, (_, end) in ends.items() if 8 + header_bytes + end > found_bytes), "")
        raise CheckpointError(
            f"{path}: {cut}expected a file of {expected_bytes} bytes, found {found_bytes}. "
            "The file is torn; download it again."
        )
    for name, spec in tensors.items():
        start_byte, end_byte = ends[name]
        if spec.dtypes[0] in DTYPE_BYTES and end_byte - start_byte != spec.nbytes():
            raise CheckpointError(
                f"{path}: tensor {name}: expected {spec.nbytes()} bytes for {spec.shape} {spec.dtypes[0]}, "
                f"found {end_byte - start_byte}"
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: expected an object with a weight_map, found: {error!r}") from None
    if not shards or any(not isinstance(s, str) or Path(s).name != s for s in shards):
        raise CheckpointError(
            f"{index}: expected file names beside the index in weight_map, found {sorted(map(str, shards))}"
        )
    return weight_map
