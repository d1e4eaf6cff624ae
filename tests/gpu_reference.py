"""Measures a GPU anew: `python tests/gpu_reference.py FOLDER [NAME ...]`, as outputs/reference/h200 was made.

Runs the commands of `mktts.notebook.records` that write NAME.json into FOLDER (all of them without a NAME), and, as
`notebooks`, those notebooks that show the kernel. One that fails leaves its old file; the others are still made, the
last line names what failed, and the exit status is 1.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mktts.notebook import records

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("03_parity", "04_streaming", "05_metrics", "08_megakernel")
RECORDED_IN = "outputs/reference/h200"


def commands(folder: Path) -> dict[str, list[str]]:
    """What makes each document, and the notebooks, in `folder`."""
    notebooks = " ".join(f"notebooks/{name}.ipynb" for name in SHOWN)
    runs = f"python -m mktts run {notebooks} --out outputs/reference-runs/gpu --publish {RECORDED_IN}"
    return {
        name: [sys.executable, *shlex.split(command.replace(RECORDED_IN, str(folder)))[1:]]
        for name, command in {**records.COMMANDS, "notebooks": runs}.items()
    }


def main(words: Sequence[str]) -> int:
    """Raises SystemExit without FOLDER, and for a NAME that nothing makes."""
    if not words:
        raise SystemExit(__doc__)
    known = commands(Path(words[0]))
    names = words[1:] or list(known)
    if unknown := set(names) - set(known):
        raise SystemExit(f"expected names of {', '.join(known)}, found {', '.join(sorted(unknown))}")
    failed = []
    for name in names:
        begun_s = time.perf_counter()
        status = subprocess.run(known[name], cwd=ROOT).returncode
        print(f"{name}: exit status {status} after {time.perf_counter() - begun_s:.0f} s", flush=True)
        failed += [name] * (status != 0)
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
