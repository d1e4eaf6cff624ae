"""`python -m mktts serve`: its settings, its signals, an engine in a process of its own, and missing packages."""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from absent import python_without
from served import TEXT, until

from mktts.cli import main
from mktts.server.command import runs_apart

PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "websockets", "prometheus_client")
PACKAGES += ("pipecat", "livekit", "pocketsphinx", "aiortc", "loguru")
ABSENT = "--checkpoint absent"
LONG = {"text": TEXT, "max_frames": 4_000}  # more than the buffers of a connection hold


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"--host={host} {ABSENT}", "there is no key") for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", "")),
        # As far as the model, where others do not reach it.
        *((f"--host={host} {ABSENT}", "absent") for host in ("127.0.0.1", "localhost", "127.8.8.8")),
        ("--api-key-file absent.txt", "absent.txt: expected a file that holds the key"),
        ("--api-key-file bytes.txt", "bytes.txt: expected a file that holds the key"),
        ("--api-key-file blank.txt", "expected keys of printable ASCII"),
        ("--api-key-file two.txt", "expected keys of printable ASCII"),
        ("--max-streams 0", "max_streams must be above 0"),
        ("--port TAKEN", "name another --port"),
        ("--port 99999", "port must be 0 to 65535, got 99999"),
        ("--host no.such.host.invalid --api-key-file key.txt", "cannot listen on no.such.host.invalid"),
        ("--max-duration inf", "max_duration_s must be finite, got inf"),
        ("--max-duration nan", "max_duration_s must be above 0, got nan"),
        ("--max-duration 1e9", "max_duration_s must be at most 86400"),
        ("--voice anna", "--voice must be NAME=FILE"),
        ("--voice anna=absent.safetensors", "absent.safetensors"),
        ("--voice-alias alloy", "--voice-alias must be ALIAS=NAME"),
        ("--voice-alias alloy=nobody --checkpoint random:tiny", "got 'nobody'"),
        ("--instruct-clones --checkpoint random:tiny", "expected a Base checkpoint, found custom_voice"),
        ("--instruct-clones --checkpoint random:tiny:base --backend upstream", "name another --backend"),
        ("--voice-folder blank.txt", "--voice-folder blank.txt: expected a folder to read and write"),
        ("--voice-folder blank.txt/in", "expected a folder to read and write"),
    ],
)
def test_bad_settings_are_one_line_and_status_2(tmp_path, monkeypatch, capsys, checkpoint_cache, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MKTTS_API_KEY", raising=False)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "two.txt").write_text("a-key\ntwo words\n")
    (tmp_path / "key.txt").write_text("a-key\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = words.replace("TAKEN", str(taken.getsockname()[1]))
        assert main(["serve", "--port", "0", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("mktts: ") and error.count("\n") == 1


# ---- while it serves, in this process


def serve(caplog: Any, client: Callable[[str], None], *words: str) -> tuple[int, list[BaseException]]:
    """The command's exit status, and what `client` raised, which is called with the address in another thread."""
    caplog.set_level("INFO", "mktts")
    errors: list[BaseException] = []

    def go() -> None:
        try:
            until(lambda: re.search(r"http://\S+", caplog.text), "the address in the log")
            client(re.search(r"http://\S+", caplog.text).group())
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    status = main(["serve", "--checkpoint", "random:tiny", "--device", "cpu", "--port", "0", *words])
    thread.join(60)
    return status, errors


def streamed(url: str, body: dict[str, Any], meanwhile: Callable[[], object]) -> int | None:
    """How many bytes come; None where they break off. meanwhile: is called behind the first ones."""
    with httpx.stream("POST", f"{url}/tts/stream", json=body, timeout=60) as answer:
        pieces = answer.iter_raw()
        first = next(pieces)
        meanwhile()
        try:
            return len(first + b"".join(pieces))
        except httpx.RemoteProtocolError:
            return None


def test_sigterm_lets_open_streams_finish_and_the_log_says_what_was_served(checkpoint_cache, caplog):
    def client(url: str) -> None:
        health = httpx.get(f"{url}/health").json()
        assert health["model"]["checkpoint"] == "random:tiny" and health["streams_max"] in (1, 2)
        stop = partial(os.kill, os.getpid(), signal.SIGTERM)
        assert streamed(url, {"text": TEXT, "max_frames": 60}, stop) == 60 * 3_840

    assert serve(caplog, client, "--max-streams", "2", "--grace", "20", "--engine", "single") == (0, [])
    assert "random weights" in caplog.text and TEXT[:20] not in caplog.text


def test_ctrl_c_cancels_what_is_open_after_the_grace_and_the_process_is_as_before(checkpoint_cache, caplog):
    before_s = sys.getswitchinterval()

    def client(url: str) -> None:
        assert streamed(url, LONG, partial(os.kill, os.getpid(), signal.SIGINT)) is None

    assert serve(caplog, client, "--grace", "0.1", "--engine", "batch") == (128 + signal.SIGINT, [])
    assert sys.getswitchinterval() == before_s


def test_a_server_whose_engine_dies_breaks_streams_off_and_ends_and_says_so(checkpoint_cache, caplog):
    def children() -> set[int]:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))

    before = children()

    def client(url: str) -> None:
        assert streamed(url, LONG, lambda: [os.kill(engine, signal.SIGKILL) for engine in children() - before]) is None

    assert serve(caplog, client, "--engine-process", "own") == (1, [])
    assert "engine's process has ended" in caplog.text


def test_a_gpu_that_serves_many_is_apart_unless_said_otherwise(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for where in (("auto", "auto", "cuda"), ("auto", "batch", "auto"), ("own", "auto", "cpu")):
        assert runs_apart(*where)
    for where in (("auto", "batch", "cpu"), ("auto", "single", "cuda"), ("same", "batch", "cuda")):
        assert not runs_apart(*where)


def test_without_the_packages_of_servers_and_agents_help_is_there_and_what_is_missing_is_named():
    code = """
from mktts.cli import main
from mktts.server.settings import Limits, listen
listen("localhost", 0, Limits()).close()
for name in ("mktts.pipecat", "mktts.livekit"):
    try: __import__(name)
    except ImportError as error: print(error)
for command in ("serve", "agent"):
    assert main([command, "--port", "0"]) == 2
    try: main([command, "--help"])
    except SystemExit: pass
"""
    done = python_without(PACKAGES, code)
    assert done.returncode == 0, done.stderr
    assert "needs the package pipecat-ai: pip install" in done.stdout and "pip install livekit-agents" in done.stdout
    missing = r"\Amktts: .*the package (fastapi|uvicorn|pydantic): .*\nmktts: .*the package pipecat: .*\n\Z"
    assert re.search(missing, done.stderr) and done.stderr.count("pip install -r requirements.txt") == 2
    assert done.stdout.count("examples:") == 2
