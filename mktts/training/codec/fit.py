"""Fits the codec's analysis and codebooks: `python -m mktts train fit`.

Principal components of the frames' features, then k-means book after book, then all books together: three minutes on
two cores. The file also holds a decoder that has learnt nothing (`mktts.training.codec.train`);
`mktts.training.data.encode` can make codes at once.
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mktts.audio import from_pcm16
from mktts.checkpoint import open_checkpoint
from mktts.common import write_whole
from mktts.model.backend import device_named
from mktts.spec import SAMPLES_PER_FRAME
from mktts.training.codec.analysis import features
from mktts.training.codec.model import Codec
from mktts.training.codec.sizes import VOICE, WIDE, CodecSizes
from mktts.training.codec.trainer import load_codec
from mktts.training.codec.warm import adopted, grown, recovered, sizes_of, spoken
from mktts.training.data.codec_data import padded, read_shard, shard_paths

_CHUNK_FRAMES = 500


@torch.inference_mode()
def frame_rows(folder: Path, most: int, device: torch.device | str) -> Tensor:
    """Features (N, 648) of the first shards' frames, until there are `most`."""
    found, count = [], 0
    for path in shard_paths(folder):
        shard = read_shard(path)
        whole = torch.from_numpy(from_pcm16(np.concatenate([padded(shard.clip(i)) for i in range(len(shard))])))
        for part in whole.split(_CHUNK_FRAMES * SAMPLES_PER_FRAME):
            found.append(features(part[None].to(device))[0])
            count += len(found[-1])
        if count >= most:
            break
    return torch.cat(found)[:most]


def fit(rows: Tensor, sizes: CodecSizes, seed: int) -> tuple[Codec, dict[str, list[float] | float]]:
    """The codec, and what was lost: variance outside the components, and the share left after each book."""
    torch.manual_seed(seed)
    codec = Codec(sizes).to(rows.device)
    kept = codec.analysis.fit(rows)
    *shares, last = codec.quantizer.fit(codec.analysis.components(rows), torch.Generator().manual_seed(seed))
    left = {"left_after_each_book": [round(share, 4) for share in shares], "left": round(last, 4)}
    return codec, {"variance_kept": round(kept, 4), **left}


def save(codec: Codec, path: Path) -> None:
    """As `mktts.training.codec.trainer.load_codec` reads it."""
    data = io.BytesIO()
    torch.save({"codec": codec.state_dict(), "sizes": asdict(codec.sizes)}, data)
    write_whole(path, data.getvalue())


def taken(name: str, data: Path, seconds: float) -> Codec:
    """A codec that was trained before, in its own sizes: of a file, or of a checkpoint, which speaks the shards' texts.

    Raises CheckpointError for a codec that was not trained here, AudioError for the shards.
    """
    if name.endswith(".pt"):
        return load_codec(Path(name))
    checkpoint = open_checkpoint(name)
    old = sizes_of(checkpoint)
    shards = (read_shard(path) for path in shard_paths(data))
    ours = list(checkpoint.config.speakers)
    said = ((str(text), str(who)) for s in shards for text, who in zip(s.texts, s.speakers, strict=True))
    lines = ((text, who if who in ours else ours[i % len(ours)]) for i, (text, who) in enumerate(said))
    return recovered(checkpoint, old, *spoken(checkpoint, lines, seconds))


EXAMPLES = """examples:
  python -m mktts train fit --data AUDIO --out codec.pt
  python -m mktts train fit --data AUDIO --out codec.pt --begin small

With --begin nothing is fitted: analysis, books and decoder are those of a voice that was trained before, and a wide
one stays wide. With --refit too, its decoder begins with an analysis and books that are fitted to AUDIO.
AUDIO is what `train teacher` wrote. The last line of standard output is JSON: the frames that were fitted to, the
share of variance that the principal components keep, and the share that is left after each codebook."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="AUDIO", help="folder of audio shards")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file for the codec")
    parser.add_argument("--frames", type=int, default=200_000, help="to fit to (default: %(default)s)")
    parser.add_argument("--begin", metavar="CODEC", help="a codec's file, or a checkpoint trained here, to go on from")
    parser.add_argument("--refit", action="store_true", help="with --begin: take its decoder only, and fit the rest")
    parser.add_argument("--seconds", type=float, default=300.0, help="a checkpoint speaks (default: %(default)s)")
    parser.add_argument("--wide", action="store_true", help="a wider and deeper transformer before the up-sampling")
    parser.add_argument("--seed", type=int, default=0, help="of k-means (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Fits or takes the codec and writes it. Raises AudioError for the shards, CheckpointError as `taken`."""
    old = taken(arguments.begin, arguments.data, arguments.seconds) if arguments.begin else None
    wide = arguments.wide or (old is not None and old.sizes.latent > VOICE.latent)  # no decoder is made narrower
    sizes = WIDE if wide else VOICE
    if old and not arguments.refit:
        save(grown(old, sizes, arguments.seed), arguments.out)
        print(json.dumps({"begun_with": arguments.begin}))
        return 0
    rows = frame_rows(arguments.data, arguments.frames, device_named(arguments.device))
    codec, lost = fit(rows, sizes, arguments.seed)
    save(adopted(old, codec.cpu(), rows.cpu()) if old else codec.cpu(), arguments.out)
    begun = {"begun_with": arguments.begin} if old else {}
    print(json.dumps({"frames": len(rows), **lost, **begun}))
    return 0
