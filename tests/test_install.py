"""It installs where users are: the requirements, the extras, the Makefile's set-up and the Dockerfile agree."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
ROOM_EXTRAS = {"audio": ["server"], "synth": ["upstream", "play"], "measure": ["upstream", "train", "agent"]}
ROOM_EXTRAS |= {"notebook": ["notebooks", "upstream"], "server": ["server"], "pipecat": ["agent"], "agent": ["agent"]}
ROOM_EXTRAS |= {"livekit.py": ["livekit"], "training": ["train"]}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SOURCE_ONLY = "docopt"  # pure Python that its authors never made a wheel of: needs no compiler
SYSTEMS = {  # what uv calls each, and what its Python calls platform and machine
    "Linux x86-64": ("x86_64-manylinux_2_28", "linux", "x86_64"),
    "Linux arm64": ("aarch64-manylinux_2_28", "linux", "aarch64"),
    "macOS 14, Apple silicon": ("aarch64-apple-darwin", "darwin", "arm64"),
    "Windows x86-64": ("x86_64-pc-windows-msvc", "win32", "AMD64"),
}


def requirements() -> list[Requirement]:
    """The packages of requirements.txt, in its order; the last line, this repository, is none."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    entries = (line.partition("#")[0].strip() for line in lines)
    return [Requirement(entry) for entry in entries if entry and not entry.startswith("-e")]


def with_inner(extra: str) -> list[Requirement]:
    """What an extra installs, with that of the extras it names."""
    inner = [more for entry in EXTRAS[extra] if entry.name == "mktts" for name in entry.extras for more in EXTRAS[name]]
    return EXTRAS[extra] + inner


def names(entries: list[Requirement]) -> set[str]:
    return {canonicalize_name(entry.name) for entry in entries if entry.name != "mktts"}


def test_core_and_extras_are_the_requirements_with_the_same_markers():
    pinned = {canonicalize_name(entry.name): entry for entry in requirements()}
    loose = [entry for entries in (CORE, *EXTRAS.values()) for entry in entries if entry.name != "mktts"]
    assert names(loose) == set(pinned)
    for entry in loose:
        pin = pinned[canonicalize_name(entry.name)]
        (version,) = (specifier.version for specifier in pin.specifier)
        assert entry.specifier.contains(version), f"{entry} does not allow {pin}"
        assert entry.marker == pin.marker, f"{entry} and {pin} are for different systems"
    (everything,) = EXTRAS["all"]
    assert everything.extras == set(EXTRAS) - {"all"}


def test_a_file_imports_nothing_but_what_is_installed_for_it_and_no_message_installs_the_package_from_an_index():
    """Of a room: the core and the room's extras. Of the tests: requirements.txt. No index has the package."""
    modules = {  # of distributions
        "ipython": "IPython", "livekit-agents": "livekit", "pillow": "PIL", "pipecat-ai": "pipecat", "pyzmq": "zmq",
    }  # fmt: skip

    @cache
    def known(of_tests: bool, room: str) -> set[str]:
        extras = [entry for extra in ROOM_EXTRAS.get(room, ()) for entry in with_inner(extra)]
        installed = names(requirements() if of_tests else CORE + extras)
        beside = {path.stem for path in (ROOT / "tests").rglob("*.py") if of_tests}
        return {modules.get(name, name.replace("-", "_")) for name in installed} | {"mktts", "triton"} | beside

    for path in (path for folder in ("mktts", "tests") for path in (ROOT / folder).rglob("*.py")):
        folder, room = path.relative_to(ROOT).parts[:2]
        text = path.read_text(encoding="utf-8")
        assert folder == "tests" or not re.search(r"pip install[^\n]{0,4}mktts", text), path
        nodes = list(ast.walk(ast.parse(text)))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
        found = {name.split(".")[0] for name in found} - sys.stdlib_module_names - known(folder == "tests", room)
        assert found == set(), path


def test_the_makefile_takes_the_pythons_that_the_package_takes():
    fits = re.search(r"^FITS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    takes = SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 20):
        with pytest.raises(SystemExit) as ended:
            exec(fits.replace("sys.version_info", f"(3, {minor}, 1)"), {})
        assert (not ended.value.code) is takes.contains(f"3.{minor}.1") is (f"3.{minor}" in PYTHONS)


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="no make, and no shell for its recipes")
@pytest.mark.parametrize("version", ["3.10.9", "3.15.0"])
def test_another_python_is_refused_by_its_version(version, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit\nexit 1\n')
    python.chmod(0o755)
    done = make("setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0 and "needs Python 3.11 to 3.14" in done.stderr and version in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no make, and no shell for its recipes")
def test_without_a_gpu_pytorch_comes_from_its_own_cpu_index_and_of_extras_only_what_is_asked_for(tmp_path):
    def lines(*settings: str) -> list[str]:
        done = make("-n", "setup", f"VENV={tmp_path}", *settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def installs(*settings: str) -> list[str]:
        return [line.partition(" -m pip ")[2] for line in lines(*settings) if " -m pip install" in line]

    (torch,) = (str(entry) for entry in requirements() if entry.name == "torch")
    everything, own_index = "install -r requirements.txt", 'install --no-deps --index-url "{}" "{}"'.format
    assert installs() == installs("CPU=0") == [everything]
    assert installs("TORCH_INDEX=https://host.example/cu") == [own_index("https://host.example/cu", torch), everything]
    first, second = installs("CPU=1")
    assert re.fullmatch(own_index(r"https://\S+/whl/cpu", re.escape(torch)), first) and second == everything
    pins = tmp_path / "pins.txt"
    assert installs("EXTRAS=server") == [f'install -c {pins} -e ".[server]"']
    (write,) = (line for line in lines("EXTRAS=server") if line.endswith(f"> {pins}"))
    subprocess.run(["sh", "-c", write], cwd=ROOT, check=True)
    assert "\nfastapi==" in pins.read_text(encoding="utf-8") and "-e ." not in pins.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("uv") is None, reason="needs the package uv")
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_requirements_resolve_to_wheels(system, python, tmp_path):
    """Nothing is installed."""
    import uv

    uv_name, platform, machine = SYSTEMS[system]
    here = {"sys_platform": platform, "platform_machine": machine, "python_version": python}
    wanted = [entry for entry in requirements() if entry.marker is None or entry.marker.evaluate(here)]
    (tmp_path / "requirements.txt").write_text("\n".join(map(str, requirements())), encoding="utf-8")
    command = [
        uv.find_uv_bin(), "pip", "compile", "requirements.txt", "--no-config", "--quiet", "--no-annotate",
        "--no-header", "--python-platform", uv_name, "--python-version", python,
        "--only-binary", ":all:", "--no-binary", SOURCE_ONLY,
    ]  # fmt: skip
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that PyTorch has wheels for
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found = {canonicalize_name(line.partition("==")[0]) for line in done.stdout.splitlines() if "==" in line}
    assert names(wanted) <= found


# ---- the container: what its file says, and, where there is an engine, that the server of its image answers

LINES = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")))
STEPS = [tuple(line.split(" ", 1)) for line in LINES.splitlines() if line]
KEY = "a-key-of-the-tests"
PORT = 8000
START_S, STEP_S = 120.0, 900.0


def of(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def test_the_image_runs_as_a_user_of_its_own_and_takes_in_what_is_committed():
    names = [name for name, _ in STEPS]
    (user,) = of("USER")
    assert f"useradd --create-home --home-dir /srv/mktts {user}" in of("RUN")
    assert names.index("USER") < names.index("COPY") and all(f"--chown={user} " in copied for copied in of("COPY"))
    assert all((ROOT / name).exists() for copied in of("COPY") for name in copied.split()[1:-1])
    (check,) = of("HEALTHCHECK")
    assert f"http://127.0.0.1:{PORT}/health" in check and of("EXPOSE") == [str(PORT)]
    composed = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    assert f"127.0.0.1:{PORT}:{PORT}" in composed and "MKTTS_API_KEY" in composed
    (home,) = of("WORKDIR")
    assert f"cache:{home}/.cache" in composed and "mkdir .cache" in of("RUN")[-1]


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_S)
def test_the_image_is_built_and_speaks_as_a_user_of_its_own_until_it_is_stopped():
    def docker(*words: str) -> str:
        done = subprocess.run(["docker", *words], cwd=ROOT, capture_output=True, text=True, timeout=STEP_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs a container engine: docker")
    image = docker("build", "--quiet", ".")
    container = docker("run", "--detach", "--env", f"MKTTS_API_KEY={KEY}", "--publish", f"127.0.0.1::{PORT}", image)
    try:
        end_s = time.monotonic() + START_S
        while docker("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < end_s, docker("logs", container)
            time.sleep(1)
        url = f"http://{docker('port', container, str(PORT))}/v1/audio/speech"
        asked = {"input": "Good morning.", "response_format": "wav"}
        headers = [{"Authorization": f"Bearer {key}"} for key in ("wrong", KEY)]
        refused, spoken = (httpx.post(url, json=asked, headers=one) for one in headers)
        assert (refused.status_code, spoken.status_code) == (401, 200) and len(spoken.content) > 24_000
        assert docker("exec", container, "id", "-un") == of("USER")[0]
        docker("exec", container, "test", "-d", ".cache/mktts")  # in the volume
        docker("stop", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
    finally:
        docker("rm", "--force", container)
