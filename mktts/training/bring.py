"""What a training run has reached so far, in few small files: `python -m mktts train bring`.

voice.tar.NN: checkpoints of the talker with every decoder, and the codecs' weights to go on from, cut into parts
(`cat voice.tar.* | tar x`). run.tar.xz: curves, the status and the ends of the logs. Works while a run goes on.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mktts.errors import CheckpointError, MkttsError
from mktts.training.codec.fit import save
from mktts.training.codec.model import write_codec
from mktts.training.codec.trainer import load_codec
from mktts.training.talker.train import CURVES, STATE, write_voice
from mktts.training.voice import STATUS

_LOG_LINES = 60
_PART_BYTES = 15 * 2**20


def bring(run: Path, to: Path, part_bytes: int = _PART_BYTES) -> dict[str, str]:
    """Packs `run` into the folder `to`; what could not be packed, by name, and why.

    Raises CheckpointError where `run` is no folder of `train voice`.
    """
    if not (run / STATUS).is_file():
        raise CheckpointError(f"{run}: expected a folder of `train voice`, found no {STATUS} in it")
    to.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    with TemporaryDirectory() as work:
        folder = Path(work)
        for codec in sorted(path for path in run.glob("codec*") if path.is_dir()):
            try:
                _pack_codec(run, codec, folder)
            except (MkttsError, OSError, RuntimeError, KeyError) as error:
                missing[codec.name] = str(error)
        _cut(folder, to, part_bytes)
        for old, new in _reports(run, folder / "reports").items():
            new.write_text(old, encoding="utf-8")
        with tarfile.open(to / "run.tar.xz", "w:xz") as archive:
            archive.add(folder / "reports", "run")
    return missing


def _pack_codec(run: Path, codec: Path, folder: Path) -> None:
    trained = load_codec(codec / "state.pt")
    save(trained, folder / f"{codec.name}.pt")
    write_codec(folder / "tokenizer", trained)
    if (run / "talker" / STATE).is_file():
        write_voice(run / "talker", folder / "tokenizer", folder / f"voice_{codec.name}")
    (folder / "tokenizer").rename(folder / f"speech_tokenizer_{codec.name}")


def _cut(folder: Path, to: Path, part_bytes: int) -> None:
    for old in to.glob("voice.tar.*"):
        old.unlink()
    whole = folder.with_suffix(".tar")
    with tarfile.open(whole, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    with whole.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(part_bytes), b"")):
            (to / f"voice.tar.{number:02}").write_bytes(part)
    whole.unlink()


def _reports(run: Path, folder: Path) -> dict[str, Path]:
    """Text -> file that it goes to."""
    folder.mkdir()
    found = {(run / STATUS).read_text(encoding="utf-8"): folder / STATUS}
    for path in (*run.glob("codec*/curves.json"), *run.glob(f"talker/{CURVES}")):
        found[path.read_text(encoding="utf-8")] = folder / f"{path.parent.name}_{path.name}"
    for path in run.glob("logs/*.log"):
        with path.open(encoding="utf-8", errors="replace") as file:
            found[f"{path.name}\n" + "".join(deque(file, _LOG_LINES))] = folder / path.name
    return found


EXAMPLES = """examples:
  python -m mktts train bring --run RUN --to "$OUT"

Any time while `train voice` goes on, or after it. The last line of standard output is JSON: the files and their bytes,
and what could not be packed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="folder of `train voice`", dest="folder")
    parser.add_argument("--to", type=Path, required=True, help="folder for the files")


def main(arguments: argparse.Namespace) -> int:
    """Packs. Raises CheckpointError for a folder that holds no run."""
    torch.set_num_threads(4)
    missing = bring(arguments.folder, arguments.to)
    sizes = {path.name: path.stat().st_size for path in sorted(arguments.to.iterdir()) if path.is_file()}
    print(json.dumps({"files": sizes, "missing": missing}))
    return 0
