"""Audio shards to codes: `python -m mktts.training.data.encode --codec FILE --data FOLDER --out FOLDER`.

One codes shard (.npz) per audio shard, of the same name: `codes` uint8 (frames, 16), all clips end to end; `frames`
int (clips,); `speaker` and `text` as they were.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch

from mktts.common import write_whole
from mktts.spec import SAMPLES_PER_FRAME
from mktts.training.codec.model import Codec
from mktts.training.codec.trainer import load_codec
from mktts.training.data.codec_data import read_shard, shard_paths

_SPAN = 32_768  # of int16


def encode_clips(codec: Codec, clips: list[np.ndarray], batch_frames: int = 8_000) -> list[np.ndarray]:
    """int16 clips (n,) -> codes (ceil(n / samples per frame), 16) uint8 each, on the codec's device.

    Clips of like length share a batch. Behind a clip there are zeros, as behind the last window of a clip alone.
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
            row[: len(clips[i])] = torch.from_numpy(clips[i].astype(np.float32) / _SPAN)
        found = codec.encode(pcm.to(device)).to("cpu", torch.uint8).numpy()
        for row, i in zip(found, batch, strict=True):
            codes[i] = row[: frames[i]].copy()
    return codes


def encode_shard(codec: Codec, source: Path, target: Path) -> int:
    """Writes the codes of one audio shard; the number of frames. Raises AudioError for a file of another shape."""
    shard = read_shard(source)
    codes = encode_clips(codec, [shard.clip(i) for i in range(len(shard))])
    data = io.BytesIO()
    frames = np.array([len(c) for c in codes], np.int64)
    np.savez_compressed(data, codes=np.concatenate(codes), frames=frames, speaker=shard.speakers, text=shard.texts)
    write_whole(target, data.getvalue())
    return int(frames.sum())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mktts.training.data.encode", description=__doc__)
    parser.add_argument("--codec", type=Path, required=True, help="file of the codec, fitted or trained")
    parser.add_argument("--data", type=Path, required=True, help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, help="folder for codes shards; those there are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth shard from the Ith, for N devices at once")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    codec = load_codec(options.codec, options.device)
    for path in shard_paths(options.data)[part - 1 :: parts]:
        target = options.out / path.name
        if not target.exists():
            print(f"{path.name}: {encode_shard(codec, path, target)} frames", flush=True)


if __name__ == "__main__":
    main()
