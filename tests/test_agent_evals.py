"""Pipecat's own evals against Pipecat's own runner with the agent's bot file, offline."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import httpx
import pytest

from mktts.agent import bot, evals

START_LIMIT_S = 60.0


@pytest.fixture
def running_bot(tmp_path, checkpoint_cache):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", bot.__name__, "--host", "127.0.0.1", "--port", str(port)]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            end_s = time.monotonic() + START_LIMIT_S
            while True:
                try:
                    assert httpx.get(f"http://127.0.0.1:{port}/status").json()["status"] == "ready"
                    break
                except httpx.TransportError:
                    assert process.poll() is None and time.monotonic() < end_s, (tmp_path / "log").read_text()[-4000:]
                    time.sleep(0.1)
            yield f"ws://127.0.0.1:{port}/ws"
        finally:
            process.kill()


async def test_a_question_and_an_interruption_pass_pipecats_evals(running_bot):
    assert await evals.run(running_bot) == {"agent/question": [], "agent/barge_in": []}
