"""The agent beside a kernel: a child process that starts, answers, and ends with whoever started it."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import websockets
from absent import needs

from mktts.agent import live
from mktts.common import python_path
from mktts.errors import AgentError

pytestmark = needs("pocketsphinx")  # the speech to text that the agent has without a key
WAIT_S = 60.0


def until_gone(pid: int) -> None:
    end_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end_s, f"process {pid} still runs"
        time.sleep(0.05)


async def test_it_answers_with_its_key_until_it_is_stopped_in_the_middle_of_a_conversation(checkpoint_cache):
    agent = live.start(checkpoint="random:tiny", turn_end="timeout", voice="")
    config = agent.config()
    assert agent.running and config["random_weights"] and "random:tiny" in config["voice"]
    assert agent.url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError, match="401|403"):
        urllib.request.urlopen(agent.url.split("?")[0] + "agent/config")
    html = agent.frame(height=500)._repr_html_()
    assert agent.url in html.replace("&amp;", "&") and 'allow="microphone; autoplay"' in html and '"500"' in html
    address = agent.url.replace("http", "ws", 1).replace("/?", "/agent?")
    async with websockets.connect(address) as socket:
        await socket.send(json.dumps({"type": "hello"}))
        while not isinstance(await socket.recv(), bytes):
            pass  # the greeting sounds
        agent.stop()
        assert not agent.running
    agent.stop()
    with pytest.raises(AgentError, match="does not answer"):
        agent.config()


def test_it_ends_with_the_last_reference_to_it():
    """Any child that ends with its standard input, as the agent does in the tests around this one."""
    code = [sys.executable, "-Sc", "import sys; sys.stdin.read()"]
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    agent = live.LiveAgent(process, io.StringIO(), "http://127.0.0.1/")
    assert agent.running
    del agent
    gc.collect()
    assert process.poll() is not None


def test_it_ends_with_the_process_that_started_it_however_that_ends(checkpoint_cache):
    code = (
        "import sys; from mktts.agent import live; agent = live.start(checkpoint='random:tiny');"
        "print(agent._process.pid, flush=True); sys.stdin.read()"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **python_path()},
    )
    pid = int(kernel.stdout.readline())
    kernel.send_signal(signal.SIGKILL)
    kernel.stdin.close()
    kernel.wait(WAIT_S)
    kernel.stdout.close()
    until_gone(pid)


def test_an_unknown_option_is_refused_in_the_agents_own_words(checkpoint_cache):
    with pytest.raises(AgentError, match="--colour"):
        live.start(colour="red")
