"""Runs the tests that need a GPU and writes what came of them: `python tests/gpu_record.py FILE [pytest's words]`.

FILE is JSON: where and when, the revision, and for each file of tests how many passed, failed and were skipped, and
their seconds. The exit status is pytest's. A run that was cut off, or that collected nothing, leaves FILE as it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mktts.common import write_json
from mktts.measure.environment import head

ROOT = Path(__file__).resolve().parents[1]


def counts(junit: Path) -> dict[str, Any]:
    """Of a JUnit file: `passed`, `failed`, `skipped`, and the same by file of tests with their `seconds`."""
    files: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        # a class's name would follow its module's; what cannot be collected has its file as its name
        module = [part for part in (case.get("classname") or case.get("name", "")).split(".") if not part[:1].isupper()]
        found = files.setdefault("/".join(module) + ".py", {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        words = {child.tag for child in case}
        found["failed" if words & {"failure", "error"} else "skipped" if "skipped" in words else "passed"] += 1
        found["seconds"] = round(found["seconds"] + float(case.get("time", 0)), 3)
    whole = {word: sum(found[word] for found in files.values()) for word in ("passed", "failed", "skipped")}
    return {**whole, "files": dict(sorted(files.items()))}


def main(words: Sequence[str]) -> int:
    """Raises SystemExit without FILE."""
    if not words:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", *words[1:]]
        status = subprocess.run(command, cwd=ROOT).returncode
        if not junit.is_file():
            return status
        found = counts(junit)
    if not found["files"]:
        return status or 1
    write_json(Path(words[0]), {**head("cuda"), **found})
    print(json.dumps({name: found[name] for name in ("passed", "failed", "skipped")}))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
