"""Runs the agent in a child process of a notebook's kernel, so that a busy cell does not delay its audio.

    agent = live.start(checkpoint="path/to/checkpoint")
    agent.frame()  # the last line of a cell
    agent.stop()

The child exits on `stop()`, when the last reference to the agent is dropped, and when the kernel ends for any reason:
its standard input is a pipe from the kernel, and it exits when the pipe closes."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
import weakref
from typing import IO, Any

from mktts.common import python_path
from mktts.errors import AgentError

_START_WAIT_S = 300.0  # a large checkpoint may be read from a slow disk, and kernels compiled
_STOP_WAIT_S = 5.0
_ASK_WAIT_S = 10.0
_LOG_TAIL_CHARS = 2_000


class LiveAgent:
    """A running agent. url: of its page, including the key, which is unique to this agent."""

    def __init__(self, process: subprocess.Popen, log: IO[str], url: str) -> None:
        self.url = url
        self._process = process
        self._log = log
        self._end = weakref.finalize(self, _end, process)  # runs at the interpreter's exit, too

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def config(self) -> dict[str, Any]:
        """The page's configuration: stt, llm, voice, rates. Raises AgentError if the agent does not answer."""
        address = urllib.parse.urljoin(self.url, "agent/config?" + urllib.parse.urlsplit(self.url).query)
        try:
            with urllib.request.urlopen(address, timeout=_ASK_WAIT_S) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise AgentError(f"the agent does not answer ({error}); its log ends:\n{_tail(self._log)}") from None

    def frame(self, height: int = 640) -> Any:
        """The page as a cell's output. The frame is allowed the microphone, which browsers otherwise refuse it."""
        from IPython.display import IFrame

        return IFrame(self.url, width="100%", height=height, extras=['allow="microphone; autoplay"'])

    def stop(self) -> None:
        """Ends all conversations and the process; may be called repeatedly."""
        self._end()


def start(*, port: int = 0, **options: str | bool | None) -> LiveAgent:
    """Starts an agent on loopback and returns once it answers.

    port: 0 takes a free port; choose one to forward it from another machine. options: those of `python -m mktts agent`,
    such as `voice="vivian"` for `--voice vivian` and `tokens=True` for `--tokens`; "", None and False omit an option.
    Raises AgentError, with the end of the log, if the agent does not start."""
    words = ["--port", str(port), "--handshake"]
    for name, value in options.items():
        if value:
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [f"{flag}={value}"]
    key = secrets.token_urlsafe(16)  # other users of this machine can reach the port
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    process = subprocess.Popen(
        [sys.executable, "-m", "mktts", "agent", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, **python_path(), "MKTTS_API_KEY": key},
        start_new_session=True,  # interrupting a cell interrupts the kernel's process group
    )
    late = threading.Timer(_START_WAIT_S, process.kill)
    late.start()
    try:
        url = json.loads(process.stdout.readline())["url"]  # printed once the agent serves
    except BaseException as error:
        _end(process)
        if not isinstance(error, ValueError):
            raise
        message = f"the agent did not start (the limit is {_START_WAIT_S:g} s); its log ends:\n{_tail(log)}"
        raise AgentError(message) from None
    finally:
        late.cancel()
    return LiveAgent(process, log, f"{url}?key={key}")


def _end(process: subprocess.Popen) -> None:
    """Ends the process by closing its standard input, then by SIGTERM, then by SIGKILL."""
    for ask in (process.stdin.close, process.terminate, process.kill):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WAIT_S)
            break
    process.stdout.close()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-_LOG_TAIL_CHARS:]
