"""Audio shards to codes: `python -m mktts train encode`.

One codes shard (.npz) per audio shard, of the same name: `codes` uint8 (frames, 16), all clips end to end; `frames`
int (clips,); `noise_books`, how many of the last books carry noise; `speaker` as it was; `text` in the words of the
text front end, and `front_end`, its name.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import torch

from mktts.audio import from_pcm16
from mktts.common import write_whole
from mktts.model.backend import device_named
from mktts.spec import SAMPLES_PER_FRAME
from mktts.training.codec.model import Codec
from mktts.training.codec.trainer import load_codec
from mktts.training.data.as_spoken import as_spoken
from mktts.training.data.codec_data import read_shard, shard_paths
from mktts.training.talker.sizes import LANGUAGE


def encode_clips(codec: Codec, clips: list[np.ndarray], batch_frames: int = 8_000) -> list[np.ndarray]:
    """int16 clips (n,) -> codes (ceil(n / samples per frame), 16) uint8 each, on the codec's device.

    Clips of similar length share a batch. A clip is followed by zeros, as the last window of a single clip is.
    """
    device = next(codec.parameters()).device
    frames = [-(-len(clip) // SAMPLES_PER_FRAME) for clip in clips]
    order = sorted(range(len(clips)), key=lambda i: frames[i])
    codes: list[np.ndarray] = [np.empty((0, 0), np.uint8)] * len(clips)
    while order:
        size = max(1, batch_frames // max(1, frames[order[-1]]))
        batch, order = order[-size:], order[:-size]
        pcm = torch.zeros(len(batch), frames[batch[-1]] * SAMPLES_PER_FRAME)
        for row, i in zip(pcm, batch, strict=True):
            row[: len(clips[i])] = torch.from_numpy(from_pcm16(clips[i]))
        found = codec.encode(pcm.to(device)).to("cpu", torch.uint8).numpy()
        for row, i in zip(found, batch, strict=True):
            codes[i] = row[: frames[i]].copy()
    return codes


def encode_shard(codec: Codec, source: Path, target: Path) -> int:
    """Writes the codes of one audio shard; the number of frames.

    Raises AudioError for a file of another shape, TextError for a text that the front end cannot read.
    """
    shard = read_shard(source)
    codes = encode_clips(codec, [shard.clip(i) for i in range(len(shard))])
    data = io.BytesIO()
    frames = np.array([len(c) for c in codes], np.int64)
    texts = [str(text) if shard.front_end else as_spoken(str(text)) for text in shard.texts]
    said = {"speaker": shard.speakers, "text": np.array(texts), "front_end": LANGUAGE}
    found = {"codes": np.concatenate(codes), "frames": frames, "noise_books": codec.sizes.noise_books}
    np.savez_compressed(data, **found, **said)
    write_whole(target, data.getvalue())
    return int(frames.sum())


EXAMPLES = """examples:
  python -m mktts train encode --codec codec.pt --data AUDIO --out CODES
  python -m mktts train encode --codec codec.pt --data AUDIO --out CODES --device cuda:1 --part 2/4

Codes shards that are there are kept, so that a run can be cut anywhere. The last line of standard output is JSON: the
shards and frames that this run encoded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", type=Path, required=True, metavar="FILE", help="of `train fit` or `train codec`")
    parser.add_argument("--data", type=Path, required=True, metavar="AUDIO", help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, metavar="CODES", help="folder for codes shards")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument(
        "--part", type=_part, default="1/1", metavar="I/N", help="every Nth shard from the Ith, for N devices at once"
    )


def main(arguments: argparse.Namespace) -> int:
    """Encodes what is not encoded yet. Raises CheckpointError for the codec, AudioError for the shards."""
    part, parts = arguments.part
    codec = load_codec(arguments.codec, device_named(arguments.device))
    frames: list[int] = []
    for path in shard_paths(arguments.data)[part - 1 :: parts]:
        target = arguments.out / path.name
        if not target.exists():
            frames.append(encode_shard(codec, path, target))
            print(f"{path.name}: {frames[-1]} frames", flush=True)
    print(json.dumps({"shards": len(frames), "frames": sum(frames)}))
    return 0


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text!r}")
    return int(part), int(parts)
