"""Commands as a test calls them: what they raise reaches the test."""

import shlex

from mktts.cli import parse


def run(command: str, *words: object) -> int:
    """The exit status of `python -m mktts COMMAND WORD...`."""
    arguments = parse([*command.split(), *map(str, words)])
    return arguments.run(arguments)


def examples(help_text: str) -> list[str]:
    """What the help of a command shows, less `python -m mktts`; the parser has accepted each."""
    lines = [line.partition("-m mktts ")[2] for line in help_text.splitlines() if line.startswith("  ")]
    shown = [line.split("|")[0].split(">")[0] for line in lines if line]
    for line in shown:
        parse(shlex.split(line, comments=True))
    return shown
