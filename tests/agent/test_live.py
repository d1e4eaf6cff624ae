"""The agent beside a kernel: a child process that starts, answers, and ends with the process that started it."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import websockets
from absent import needs
from served import until

from mktts.agent import live
from mktts.common import python_path
from mktts.errors import AgentError

pytestmark = needs("pocketsphinx")  # the speech to text that the agent has without a key
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
KERNEL = """
import sys
from mktts.agent import live
agent = live.start(checkpoint="random:tiny", turn_end="timeout", voice="")
assert agent.config()["random_weights"]
print(agent.url, agent._process.pid, agent.running, flush=True)
sys.stdin.read()
"""


def a_child() -> live.LiveAgent:
    """Any child that ends with its standard input, as the agent does."""
    code = [sys.executable, "-Sc", "import sys; sys.stdin.read()"]
    process = subprocess.Popen(code, **PIPES)
    return live.LiveAgent(process, io.StringIO("its last words"), "http://127.0.0.1:1/?key=a")


async def test_it_converses_until_the_process_that_started_it_is_killed(checkpoint_cache):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], env={**os.environ, **python_path()}, **PIPES)
    url, pid, running = kernel.stdout.readline().split()
    assert running == "True" and url.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError, match="401|403"):
        urllib.request.urlopen(url.split("?")[0] + "agent/config")
    config = json.load(urllib.request.urlopen(url.replace("/?", "/agent/config?")))
    assert config["random_weights"] and "random:tiny" in config["voice"]
    async with websockets.connect(url.replace("http", "ws", 1).replace("/?", "/agent?")) as socket:
        await socket.send(json.dumps({"type": "hello"}))
        while not isinstance(await socket.recv(), bytes):
            pass  # the greeting sounds
        kernel.send_signal(signal.SIGKILL)
        state = Path(f"/proc/{pid}/stat")
        until(lambda: not state.exists() or " Z " in state.read_text(), "the agent's process to end")


def test_stop_and_the_last_reference_to_it_end_it_and_stop_again_is_harmless():
    agent = a_child()
    html = agent.frame(height=500)._repr_html_()
    assert agent.url in html.replace("&amp;", "&") and 'allow="microphone; autoplay"' in html and '"500"' in html
    assert agent.running
    agent.stop()
    agent.stop()
    assert not agent.running
    with pytest.raises(AgentError, match="(?s)does not answer.*its last words"):
        agent.config()
    agent = a_child()
    process = agent._process
    del agent
    gc.collect()
    assert process.poll() is not None


def test_an_unknown_option_is_refused_in_the_agents_own_words(checkpoint_cache):
    with pytest.raises(AgentError, match="--colour"):
        live.start(colour="red")
