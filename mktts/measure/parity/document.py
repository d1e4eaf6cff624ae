"""The file that `python -m mktts parity` writes: which checkpoint on which machine, without anybody's paths."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from mktts.checkpoint import Checkpoint
from mktts.checkpoint.random import RANDOM_WEIGHTS

_CONFIGS = ("config.json", "generation_config.json", "speech_tokenizer/config.json")
_HUB_CACHE = re.compile(r"models--([^/\\]+)--([^/\\]+)")  # of a folder in the Hub's own cache
# A path from the root: its folders, as far as the last separator. Addresses (https://...) are none.
_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/:'\",()\[\]]+[\\/])+")


def name_of(source: str) -> str:
    """What a checkpoint is called in the file: a Hub id, small or random:... as it is; of a folder its last name, or
    the Hub id that a folder of the Hub's cache belongs to."""
    folder = Path(source).expanduser()
    if source.startswith("random:") or not folder.is_dir():
        return source
    if found := _HUB_CACHE.search(str(folder.resolve())):
        return f"{found[1]}/{found[2]}"
    return folder.resolve().name


def describe(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Name, revision, model, weights, bytes of weights, and a SHA-256 of each file of settings."""
    config = checkpoint.config
    return {
        "source": name,
        "revision": checkpoint.revision,
        "model": f"{config.model_size} {config.type.name}",
        "weights": RANDOM_WEIGHTS if checkpoint.is_random else str(checkpoint.revision or "of a folder"),
        "sha256": {file: _digest(checkpoint.folder / file) for file in _CONFIGS},
    }


def without_paths(value: Any) -> Any:
    """`value` with every path from the root cut to its last name, in all texts of a JSON document."""
    if isinstance(value, dict):
        return {without_paths(name): without_paths(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return _FOLDERS.sub("", value)


def table(document: dict[str, Any]) -> str:
    """The document as people read it."""
    lines = [f"{document['device']}, torch {document['torch']}, kernel: {document['kernel']}"]
    for source, result in document["checkpoints"].items():
        states = {found["status"] for found in result["sections"].values()}
        said = "FAILED" if "failed" in states else "passed" if result["passed"] else "nothing could run"
        lines.append(f"\n{source}: {said}")
        for name, found in result["sections"].items():
            said = found.get("reason") or _in_words(name, found)
            lines.append(f"  {name:8}{found['status']:9}{found['seconds']:6.1f} s  {said}")
        lines += [*_of_the_kernel(result), *_of_the_batch(result.get("batch", {}))]
    if document["text"]:
        lines.append(f"\ntext: {json.dumps(document['text'])}")
    return "\n".join(lines)


def _in_words(name: str, found: dict[str, Any]) -> str:
    if name == "prompt":
        return f"{found['equal']} of {found['prompts']} prompts are upstream's, bit for bit"
    if name == "codes":
        frames = ", ".join(f"{count} in {dtype}" for dtype, count in found["frames"].items() if count)
        left_out = "".join(f"; {dtype} left out ({why})" for dtype, why in found["left_out"].items())
        return f"frames equal to upstream's: {frames}{left_out}"
    if name == "codec":
        distances = ("streamed_to_whole", "streamed_to_upstream", "whole_to_upstream")
        words = [
            f"{distance.replace('_', ' ')} "
            + ("equal" if found[distance]["equal"] else f"{found[distance]['snr_db']:.0f} dB")
            for distance in distances
            if distance in found
        ]
        return ", ".join([f"{found['frames']} frames", *words, *filter(None, [found.get("upstream")])])
    return f"{found['frames']} frames, error to fp32 over bf16 PyTorch's: {max(found['ratio'].values()):.3f} at most"


def _of_the_kernel(result: dict[str, Any]) -> list[str]:
    lines = []
    if "forced" in result:
        found = result["forced"]
        lines += _forced(found, "", found["by_context"])
    lines += [f"  {name}: {json.dumps(result[name])}" for name in ("divergence", "exact") if name in result]
    return lines + [f"  error in {name}: {reason}" for name, reason in result.get("errors", {}).items()]


def _of_the_batch(batch: dict[str, Any]) -> list[str]:
    lines = []
    for mode, found in batch.items():
        if not isinstance(found, dict) or "forced" not in found:
            continue
        lines += _forced(found["forced"], f"batch, {mode}, ", found["forced"]["by_label"])
        free = found["free"]
        explained = sum(difference["explained"] for difference in free["differences"])
        lines.append(
            f"  batch, {mode}, greedy: {free['equal']} of {free['frames']} frames fp32's before a stream differs; "
            f"{explained} of {len(free['differences'])} differences explained by rounding"
        )
        if exact := found.get("exact"):
            lines.append(f"  batch, {mode}, wide margins: {exact['equal']} of {exact['frames']} frames fp32's")
    lines += [f"  batch, codec: {json.dumps(batch['codec'])}"] if "codec" in batch else []
    return lines + [f"  error in batch, {name}: {reason}" for name, reason in batch.get("errors", {}).items()]


def _forced(found: dict[str, Any], of: str, by_label: dict[str, Any]) -> list[str]:
    frames = sum(found["frames"].values())
    lines = [f"  {of}teacher-forced, {frames} frames; relative rms error to fp32"]
    for name, value in {**found["pooled"], **by_label}.items():
        lines.append(f"  {name:24} kernel {value['kernel']:.3e}  bf16 {value['bf16']:.3e}  x {value['ratio']:.3f}")
    lines.append(f"  largest ratio of a head or layer: {found['largest_ratio_of_a_head_or_layer']:.3f}")
    for name, value in found["total_variation"].items():
        means = "  ".join(f"{side} {v['mean']:.4f} (max {v['max']:.4f})" for side, v in value.items())
        lines.append(f"  total variation, {name}: {means}")
    return lines


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
