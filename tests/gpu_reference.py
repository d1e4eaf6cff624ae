"""Measures a GPU anew: `python tests/gpu_reference.py FOLDER [NAME ...]`, as outputs/reference/h200 was made.

Runs the commands of `mktts.notebook.records` that write NAME.json into FOLDER (all of them without a NAME), and, as
`notebooks`, those notebooks that show the kernel. One that fails leaves its old file; the others are still made, the
last line names what failed, and the exit status is 1."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mktts.notebook import records

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("03_parity", "04_streaming", "05_metrics", "08_megakernel")
RECORDED_IN = "outputs/reference/h200"


def commands(folder: str) -> dict[str, list[str]]:
    """What makes each document, and the notebooks, in `folder`."""
    notebooks = " ".join(f"notebooks/{name}.ipynb" for name in SHOWN)
    runs = f"python -m mktts run {notebooks} --out outputs/reference-runs/gpu --publish {RECORDED_IN}"
    made = {**records.COMMANDS, "notebooks": runs}
    return {name: shlex.split(command.replace(RECORDED_IN, folder)) for name, command in made.items()}


def main(words: Sequence[str]) -> int:
    """Raises SystemExit without FOLDER, and for a NAME that nothing makes."""
    if not words:
        raise SystemExit(__doc__)
    known, names = commands(words[0]), words[1:]
    if unknown := set(names) - set(known):
        raise SystemExit(f"expected names of {', '.join(known)}, found {', '.join(sorted(unknown))}")
    done = {name: subprocess.run([sys.executable, *known[name][1:]], cwd=ROOT) for name in names or known}
    failed = [name for name, ran in done.items() if ran.returncode]
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
