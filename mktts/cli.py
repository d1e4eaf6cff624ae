"""The command line: `python -m mktts COMMAND`. A command is a module with EXAMPLES, add_arguments and main.

Only the module of the command that was asked for is imported. Exit status: 0 done; 1 what was asked for failed
(a run, a stream, a comparison, the machine); 2 bad input, said in one line; 130 interrupted; 141 the reader of standard
output went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from mktts.errors import BackendUnavailable, MkttsError

# What is typed after `python -m mktts` -> (its module, what it does).
COMMANDS = {
    "say": ("mktts.synth.say", "speak a text: into a file, through the loudspeaker, or to standard output"),
    "voice": ("mktts.synth.make_voice", "make a voice file from reference audio"),
    "serve": ("mktts.server.command", "serve one model over HTTP and WebSocket"),
    "agent": ("mktts.agent.command", "hold a conversation: on a page, a sound card, or a script"),
    "run": ("mktts.notebook.runs", "run notebooks headless over a grid of parameters"),
    "inspect": ("mktts.measure.inspection", "show what is in a checkpoint"),
    "parity": ("mktts.measure.parity.command", "prove a checkpoint on this machine: prompt, codes, codec, kernel"),
    "bench": ("mktts.measure.bench.command", "measure: a table, then one line of JSON"),
    "text": ("mktts.llm.command", "continue a text with a Qwen3 text model"),
    "agent bot": ("mktts.agent.bot", "the agent under Pipecat's development runner"),
    "agent evals": ("mktts.agent.evals", "Pipecat's evals against a running bot"),
    "agent measure": ("mktts.agent.measure", "how long the voice takes inside Pipecat"),
    "agent record": ("mktts.agent.user_speech.record", "make the recorded user's speech again"),
    "train texts": ("mktts.training.data.texts", "write sentences to learn from"),
    "train teacher": ("mktts.training.data.teacher", "have the teacher speak them"),
    "train fit": ("mktts.training.codec.fit", "fit the codec's analysis and codebooks"),
    "train encode": ("mktts.training.data.encode", "turn audio into codes"),
    "train codec": ("mktts.training.codec.train", "train the codec's decoder"),
    "train talker": ("mktts.training.talker.train", "train talker and code predictor"),
    "train evaluate": ("mktts.training.judge.evaluate", "judge the voice beside its teacher"),
    "train ship": ("mktts.training.ship", "put the voice into the package"),
}
DESCRIPTION = "Qwen3-TTS speech, streamed frame by frame."
EXAMPLES = """examples:
  python -m mktts say "Hello there." -o hello.wav
  python -m mktts inspect small
  python -m mktts run notebooks/*.ipynb

`python -m mktts COMMAND --help` says more about each."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; errors of this package and of files print one line."""
    try:
        arguments = parse(sys.argv[1:] if words is None else words)
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head`, or a player that was closed: end quietly, as a process killed by SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails too
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (MkttsError, OSError) as error:
        print(f"mktts: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, MkttsError) else 2


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command that `words` name, its `main` among them as `run`. Exits as argparse does."""
    words = list(words)
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None)
    if name is None:
        _parser_of_all().parse_args(words)
        raise AssertionError("the parser of all commands ends the program")
    return parser_of(name).parse_args(words[len(name.split()) :])


def parser_of(name: str) -> argparse.ArgumentParser:
    """One command's parser; its namespace carries the command's `main` as `run`.

    Raises BackendUnavailable where the command's packages are not installed.
    """
    path, summary = COMMANDS[name]
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if (error.name or "mktts").split(".")[0] == "mktts":
            raise
        raise BackendUnavailable(f"`{name}` needs the package {error.name}: pip install -r requirements.txt") from None
    parser = _parser(f"python -m mktts {name}", f"{summary[0].upper()}{summary[1:]}.", module.EXAMPLES)
    module.add_arguments(parser)
    parser.set_defaults(run=module.main)
    return parser


def _parser_of_all() -> argparse.ArgumentParser:
    from mktts import __version__

    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{summary}" for name, (_, summary) in COMMANDS.items()]
    parser = _parser("python -m mktts", DESCRIPTION, "\n".join(["commands:", *lines, "", EXAMPLES]))
    parser.add_argument("--version", action="version", version=f"mktts {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=tuple(COMMANDS), help="one of the commands below")
    return parser


def _parser(program: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=program, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
