"""The Dockerfile: what it says, and, where there is a container engine, that the image's server answers."""

import re
import shutil
import subprocess
import time
from pathlib import Path

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
