"""Does requirements.txt resolve to wheels on systems that we do not have? `uv pip compile` says so without installing.

Run as a program, this file writes outputs/reference/install.json: a row for each system and Python, `packages` counted
on the day of the table, `missing` those of requirements.txt that a marker leaves out there."""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements.txt"
TABLE = ROOT / "outputs" / "reference" / "install.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SOURCE_ONLY = "docopt"  # pure Python that its authors never made a wheel of: needs no compiler


class System(NamedTuple):
    """A system as people, uv and the markers of requirements.txt call it."""

    name: str
    uv_platform: str
    markers: dict[str, str]


SYSTEMS = (
    System("Linux x86-64", "x86_64-manylinux_2_28", {"sys_platform": "linux", "platform_machine": "x86_64"}),
    System("Linux arm64", "aarch64-manylinux_2_28", {"sys_platform": "linux", "platform_machine": "aarch64"}),
    System("macOS 14, Apple silicon", "aarch64-apple-darwin", {"sys_platform": "darwin", "platform_machine": "arm64"}),
    System("Windows x86-64", "x86_64-pc-windows-msvc", {"sys_platform": "win32", "platform_machine": "AMD64"}),
)


def requirements() -> list[Requirement]:
    """The packages of requirements.txt, in its order; the last line, this repository, is none."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-e")]


def left_out(system: System, python: str) -> list[str]:
    """Names that a marker of requirements.txt leaves out there."""
    here = {**system.markers, "python_version": python}
    return [entry.name for entry in requirements() if entry.marker and not entry.marker.evaluate(here)]


def resolve(system: System, python: str, folder: Path) -> dict[str, object]:
    """One row of the table; `error` has uv's words where there is no solution.

    folder: where the list without this repository is written."""
    import uv

    listed = folder / "requirements.txt"
    listed.write_text("\n".join(map(str, requirements())), encoding="utf-8")
    command = [
        uv.find_uv_bin(), "pip", "compile", listed, "--no-config", "--quiet", "--no-annotate", "--no-header",
        "--python-platform", system.uv_platform, "--python-version", python, "--only-binary", ":all:",
        "--no-binary", SOURCE_ONLY,
    ]  # fmt: skip
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that PyTorch has wheels for
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    found = {canonicalize_name(line.partition("==")[0]) for line in done.stdout.splitlines() if "==" in line}
    missing = left_out(system, python)
    expected = {canonicalize_name(entry.name) for entry in requirements() if entry.name not in missing}
    ok = done.returncode == 0 and expected <= found
    row = {"platform": system.name, "python": python, "packages": len(found), "ok": ok, "missing": missing}
    return row if ok else {**row, "error": done.stderr.strip()}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        rows = [resolve(system, python, Path(scratch)) for system in SYSTEMS for python in PYTHONS]
    print(*rows, sep="\n")
    if not all(row["ok"] for row in rows):
        raise SystemExit(f"{TABLE.name} stays as it is: not everything resolves, or the index did not answer")
    table = {"date": datetime.date.today().isoformat(), "rows": rows}
    TABLE.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
