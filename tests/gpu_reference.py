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
NOTEBOOKS = " ".join(f"notebooks/{name}.ipynb" for name in ("03_parity", "04_streaming", "05_metrics", "08_megakernel"))
RECORDED_IN = "outputs/reference/h200"
RUNS = f"python -m mktts run {NOTEBOOKS} --out outputs/reference-runs/gpu --publish {RECORDED_IN}"


def main(words: Sequence[str]) -> int:
    """Raises SystemExit without FOLDER, and for a NAME that nothing makes."""
    if not words:
        raise SystemExit(__doc__)
    (folder, *names), known, failed = words, {**records.COMMANDS, "notebooks": RUNS}, []
    if unknown := set(names) - set(known):
        raise SystemExit(f"expected names of {', '.join(known)}, found {', '.join(sorted(unknown))}")
    for name in names or known:
        command = shlex.split(known[name].replace(RECORDED_IN, folder))
        if subprocess.run([sys.executable, *command[1:]], cwd=ROOT).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
