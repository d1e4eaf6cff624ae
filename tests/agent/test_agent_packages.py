"""The agent's commands where one of their packages is missing: help, and an error that names it."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("package", "command", "named"),
    [
        ("pipecat", "agent", "pipecat-ai"),
        ("pipecat", "agent --scripted talk.wav", "pipecat-ai"),
        ("pipecat", "agent bot", "pipecat"),
        ("pipecat", "agent evals", "pipecat"),
        ("pipecat", "agent measure", "pipecat"),
        ("fastapi", "agent", "fastapi"),
        ("pocketsphinx", "agent --port 0", "pocketsphinx"),
        ("pocketsphinx", "agent --scripted talk.wav", "pocketsphinx"),
        ("pocketsphinx", "agent bot", "pocketsphinx"),
        ("pocketsphinx", "agent evals", "pocketsphinx"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_loaded(tmp_path, monkeypatch, package, command, named):
    for variable in ("DEEPGRAM_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MKTTS_CHECKPOINT", "absent-folder")  # what would be loaded
    done = mktts_without([package], *command.split())
    (last,) = (line for line in done.stderr.splitlines() if line.startswith("mktts: "))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"needs the package {named}" in last and "pip install -r requirements.txt" in last
    assert package != "pocketsphinx" or "--ears deepgram" in last


@pytest.mark.parametrize("module", ["mktts.agent.conversation", "mktts.pipecat"])
def test_an_import_without_pipecat_names_the_package(module):
    code = f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)"
    done = python_without(["pipecat"], code)
    assert done.stdout.startswith(module.rpartition(".conversation")[0] or module)
    assert "needs the package pipecat-ai: pip install" in done.stdout
