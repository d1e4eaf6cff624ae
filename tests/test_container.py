"""The Dockerfile, without a container engine: its lines run in a bare Debian of their own, and the server answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def test_only_what_is_asked_for_is_installed(tmp_path):
    command = ["make", "-n", "setup", f"VENV={tmp_path / 'venv'}", "EXTRAS=server"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()  # within `make test` make also says which folder it is in
    at = next((i for i, line in enumerate(lines) if " install -c " in line), -1)
    pins, install = lines[at - 1], lines[at]
    assert install.endswith(f'install -c {tmp_path / "venv"}/pins.txt -e ".[server]"'), done.stderr
    (tmp_path / "venv").mkdir()
    subprocess.run(["sh", "-c", pins], cwd=ROOT, check=True)
    pinned = (tmp_path / "venv" / "pins.txt").read_text(encoding="utf-8")
    assert "\nfastapi==" in pinned and "-e ." not in pinned


class Bare(NamedTuple):
    """A bare Debian. pip: variables with this machine's settings; host: the folders that they name, under /host."""

    root: Path
    pip: dict[str, str]
    host: set[str]

    def run(self, command: str, env: dict[str, str], folder: str, user: str) -> subprocess.Popen[bytes]:
        """Starts a shell's command in it, as a container engine would; its mounts end with it."""
        mounts = ["mount -t proc proc $0/proc"]
        for top in self.host:
            mounts.append(f"mkdir -p $0/host{top} && mount --bind -o ro {top} $0/host{top}")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        words = [f"{name}={value}" for name, value in {"PATH": path, **self.pip, **env}.items()]
        inner = shlex.join(["env", "-i", *words, "sh", "-c", f"cd {folder} && {command}"])
        script = f"{' && '.join(mounts)} && exec chroot --userspec={user} $0 {inner}"
        return subprocess.Popen(["unshare", "--mount", "sh", "-c", script, self.root])


@pytest.fixture
def bare(tmp_path) -> Iterator[Bare]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("debootstrap") is None:
        pytest.skip("needs debootstrap (Debian: apt install debootstrap)")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"port {PORT} of this machine is taken")
    base, release = re.fullmatch(r"(debian):(\w+)-slim", of("FROM")[0]).groups()
    root = tmp_path / base
    done = subprocess.run(["debootstrap", "--variant=minbase", release, root], capture_output=True, timeout=STEP_S)
    if done.returncode:
        pytest.skip(f"debootstrap found no mirror of Debian: {done.stdout[-200:]!r}")
    shutil.copy("/etc/resolv.conf", root / "etc")
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout
    pip, host = {}, set()
    for name, value in re.findall(r"(?m)^\S+?\.([\w-]+)='(.*)'$", listed):
        paths = {word for word in re.findall(r"(?<!\w)/\w[\w./-]+", value) if Path(word).exists()}
        host |= {f"/{Path(path).parts[1]}" for path in paths}
        moved = re.sub(r"(?<!\w)/\w[\w./-]+", lambda m, paths=paths: f"/host{m[0]}" if m[0] in paths else m[0], value)
        pip[f"PIP_{name.replace('-', '_').upper()}"] = moved
    try:
        yield Bare(root, pip, host)
    finally:
        shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_S)
def test_every_line_runs_in_a_bare_debian_and_the_server_speaks(bare):
    env = {"CPU": "1"}  # of ARG
    folder, user = "/", "root"
    for name, rest in STEPS:
        if name == "RUN":
            assert bare.run(rest, env, folder, user).wait(STEP_S) == 0, rest
        elif name == "WORKDIR":
            folder = rest
            (bare.root / folder[1:]).mkdir(exist_ok=True)
        elif name == "USER":
            user = rest
            env |= {"HOME": folder}
        elif name == "ENV":
            env |= dict([rest.split("=", 1)])
        elif name == "COPY":
            *sources, into = rest.split()[1:]
            target = bare.root / folder[1:] / into
            target.mkdir(exist_ok=True)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, target, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, target)
            subprocess.run(["chroot", bare.root, "chown", "-R", f"{user}:", folder], check=True)
    serve = "exec " + shlex.join(json.loads(of("ENTRYPOINT")[0]))
    (check,) = (json.loads(rest.partition("CMD ")[2]) for rest in of("HEALTHCHECK"))
    server = bare.run(serve, {**env, "MKTTS_API_KEY": KEY}, folder, user)
    try:
        end_s = time.monotonic() + START_S
        while bare.run(shlex.join(check), env, folder, user).wait(STEP_S):
            assert server.poll() is None and time.monotonic() < end_s
            time.sleep(1)
        answers = [
            httpx.post(
                f"http://127.0.0.1:{PORT}/v1/audio/speech",
                json={"input": "Good morning.", "response_format": "wav"},
                headers={"Authorization": f"Bearer {key}"},
            )
            for key in ("wrong", KEY)
        ]
        assert [answer.status_code for answer in answers] == [401, 200] and len(answers[1].content) > 24_000
        assert os.stat(f"/proc/{server.pid}").st_uid != 0
        assert (bare.root / folder[1:] / ".cache" / "mktts").is_dir()  # in the volume
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
