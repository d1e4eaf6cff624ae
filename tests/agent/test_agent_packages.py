"""The agent's commands where one of their packages is missing: help, and an error that names it."""

from __future__ import annotations

import json

import pytest
from absent import mktts_without, python_without
from commands import examples

PACKAGES = ("pipecat", "fastapi", "uvicorn", "pocketsphinx", "aiortc", "loguru")
COMMANDS = ("agent", "agent bot", "agent evals", "agent measure", "agent record")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_that_parse(name):
    assert any(example.startswith(name) for example in examples(name))


@pytest.mark.parametrize("name", ["agent", "agent record"])
def test_help_needs_none_of_the_packages(name):
    done = mktts_without(PACKAGES, *name.split(), "--help")
    assert done.returncode == 0 and "examples:" in done.stdout


WITHOUT = {  # a package that is not there: commands that need it
    "pipecat": ("agent", "agent --scripted talk.wav", "agent bot", "agent evals", "agent measure"),
    "fastapi": ("agent",),
    "pocketsphinx": ("agent --port 0", "agent --scripted talk.wav", "agent bot", "agent evals"),
}
EACH = """
import contextlib, io, json
from mktts.cli import main
found = []
for command in {commands!r}:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        found.append([main(command.split()), error])
print(json.dumps([[status, error.getvalue()] for status, error in found]))
"""


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("pipecat", ["pipecat-ai", "pipecat-ai", "pipecat", "pipecat", "pipecat"]),
        ("fastapi", ["fastapi"]),
        ("pocketsphinx", ["pocketsphinx"] * 4),
    ],
)
def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch, package, names):
    """Commands one after another in one process, which takes seconds to import what is there."""
    for variable in ("DEEPGRAM_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MKTTS_CHECKPOINT", "absent-folder")  # what would be loaded
    done = python_without([package], EACH.format(commands=WITHOUT[package]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for command, named, (status, error) in zip(WITHOUT[package], names, found, strict=True):
        (last,) = (line for line in error.splitlines() if line.startswith("mktts: "))
        assert status == 2 and "Traceback" not in error, command
        assert f"needs the package {named}" in last and "pip install -r requirements.txt" in last, command
        assert package != "pocketsphinx" or "--ears deepgram" in last, command


@pytest.mark.parametrize("module", ["mktts.agent.conversation", "mktts.pipecat"])
def test_an_import_without_pipecat_names_the_package(module):
    code = f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)"
    done = python_without(["pipecat"], code)
    assert done.stdout.startswith(module.rpartition(".conversation")[0] or module)
    assert "needs the package pipecat-ai: pip install" in done.stdout
