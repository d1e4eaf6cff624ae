"""Runs the tests that need a GPU and writes what came of them: `python tests/gpu_record.py FILE [pytest's words]`.

FILE is JSON: where and when, the revision, and for each file of tests how many passed, failed and were skipped, and
their seconds. The exit status is pytest's. A run that was cut off, or that collected nothing, leaves FILE as it was.

Where a run may not last as long as all tests do: `python tests/gpu_record.py PART [pytest's words]` for some folders at
a time, then `python tests/gpu_record.py FILE --merge PART ...`. Parts are of one GPU, driver, torch and revision, and
no file of tests is in two of them; the exit status is 1 where a test failed."""

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
    whole = {word: sum(found[word] for found in files.values()) for word in OUTCOMES}
    return {**whole, "files": dict(sorted(files.items()))}


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """One record of several, dated as the first of them. Raises SystemExit where they do not belong together."""
    parts = sorted((json.loads(path.read_text(encoding="utf-8")) for path in paths), key=lambda part: part["date"])
    if not parts:
        raise SystemExit("--merge needs records to merge")
    for what in ("device", "driver", "torch", "revision"):
        if len(found := {part[what] for part in parts}) > 1:
            raise SystemExit(f"expected parts of one {what}, found {', '.join(sorted(map(str, found)))}")
    files = [(name, row) for part in parts for name, row in part["files"].items()]
    if twice := sorted({name for name, _ in files if sum(name == other for other, _ in files) > 1}):
        raise SystemExit(f"expected each file of tests in one part, found in several: {', '.join(twice)}")
    sums = {word: sum(part[word] for part in parts) for word in OUTCOMES}
    return {**parts[0], **sums, "files": dict(sorted(files))}


def main(words: Sequence[str]) -> int:
    """Raises SystemExit without FILE, and for parts that cannot be merged."""
    if not words:
        raise SystemExit(__doc__)
    if words[1:2] == ["--merge"]:
        found = merged([Path(word) for word in words[2:]])
        written(Path(words[0]), found)
        return int(found["failed"] > 0)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", *words[1:]]
        status = subprocess.run(command, cwd=ROOT).returncode
        if not junit.is_file():
            return status
        found = counts(junit)
    if not found["files"]:
        return status or 1
    written(Path(words[0]), {**head("cuda"), **found})
    return status


def written(path: Path, record: dict[str, Any]) -> None:
    """Writes a record, and prints its sums as the last line."""
    write_json(path, record)
    print(json.dumps({name: record[name] for name in OUTCOMES}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
