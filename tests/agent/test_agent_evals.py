"""Pipecat's own evals against Pipecat's own runner with the agent's bot file, offline."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import httpx
import pytest
from absent import needs

from mktts.agent import evals

pytestmark = needs("pocketsphinx")  # the ears that the agent has without a key
START_LIMIT_S = 60.0


@pytest.fixture
def running_bot(tmp_path, checkpoint_cache):
    """Its address: the runner takes a free port itself, and its server's log tells which."""
    command = [sys.executable, "-m", "mktts", "agent", "bot", "--", "--host", "127.0.0.1", "--port", "0"]
    path = tmp_path / "log"
    with open(path, "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            end_s = time.monotonic() + START_LIMIT_S
            while not (found := re.search(r"Uvicorn running on http://(\S+) ", path.read_text())):
                assert process.poll() is None and time.monotonic() < end_s, path.read_text()[-4000:]
                time.sleep(0.1)
            assert httpx.get(f"http://{found[1]}/status").json()["status"] == "ready"
            yield f"ws://{found[1]}/ws"
        finally:
            process.kill()


async def test_a_question_and_an_interruption_pass_pipecats_evals(running_bot):
    assert await evals.run(running_bot) == {"agent/question": [], "agent/barge_in": []}
