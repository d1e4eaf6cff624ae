"""Commands as a test calls them: what they raise reaches the test."""

from mktts.cli import parse


def run(command: str, *words: object) -> int:
    """The exit status of `python -m mktts COMMAND WORD...`."""
    arguments = parse([*command.split(), *map(str, words)])
    return arguments.run(arguments)
