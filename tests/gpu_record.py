"""Runs the tests that need a GPU and writes what came of them: `python tests/gpu_record.py FILE [pytest's words]`.

FILE is JSON: where and when, the revision, and for each file of tests how many passed, failed and were skipped, and
their seconds. The exit status is pytest's. A run that was cut off, or that collected nothing, leaves FILE as it was.
Rows of other files stay, if they are of the same GPU, driver, torch and revision: run some folders at a time."""

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
OUTCOMES = ("passed", "failed", "skipped")


def counts(junit: Path) -> dict[str, dict[str, Any]]:
    """`passed`, `failed`, `skipped` and `seconds` of each file of tests in a JUnit file."""
    files: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        # a class's name would follow its module's; what cannot be collected has its file as its name
        module = [part for part in (case.get("classname") or case.get("name", "")).split(".") if not part[:1].isupper()]
        found = files.setdefault("/".join(module) + ".py", {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        words = {child.tag for child in case}
        found["failed" if words & {"failure", "error"} else "skipped" if "skipped" in words else "passed"] += 1
        found["seconds"] = round(found["seconds"] + float(case.get("time", 0)), 3)
    return files


def main(words: Sequence[str]) -> int:
    """Raises SystemExit without FILE."""
    if not words:
        raise SystemExit(__doc__)
    path = Path(words[0])
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", *words[1:]]
        status = subprocess.run(command, cwd=ROOT).returncode
        files = counts(junit) if junit.is_file() else {}
    if not files:
        return status or 1
    about = head("cuda")
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if all(before.get(name) == about[name] for name in ("device", "driver", "torch", "revision")):
        files = before["files"] | files
    sums = {word: sum(row[word] for row in files.values()) for word in OUTCOMES}
    write_json(path, {**about, **sums, "files": dict(sorted(files.items()))})
    print(json.dumps(sums))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
