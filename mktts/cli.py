"""The command line: `python -m mktts COMMAND`. A command is a module with EXAMPLES, add_arguments and main.

Only the module of the requested command is imported. Exit status: 0 success; 1 the work itself failed (a run, a
stream, a comparison, the machine, a full disk); 2 bad input, reported in one line; 130 interrupted (SIGINT); 141 the
reader of standard output closed it (SIGPIPE); 143 terminated by SIGTERM."""

import argparse
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from mktts.errors import MkttsError

# Heading -> words after `python -m mktts` -> (module of the command, summary for the help).
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "speak": {
        "say": ("mktts.synth.say", "speak a text: into a file, through the loudspeaker, or to standard output"),
        "speak-all": ("mktts.synth.speak_all", "speak a table of sentences into a folder of audio files"),
        "voice": ("mktts.synth.cloning", "make a voice file from a recording"),
        "serve": ("mktts.server.command", "serve one model over HTTP and WebSocket"),
        "agent": ("mktts.agent.command", "hold a conversation on a page"),
    },
    "look and measure": {
        "inspect": ("mktts.measure.inspection", "show what is in a checkpoint"),
        "parity": ("mktts.measure.parity.command", "prove a checkpoint on this machine: prompt, codes, codec, kernel"),
        "bench": ("mktts.measure.bench.command", "measure speed, and how many listeners are served in time"),
        "run": ("mktts.notebook.runs", "run notebooks headless over a grid of parameters"),
    },
    "for developers": {
        "lab trace": ("mktts.measure.trace", "record what happens inside one launch of the frame kernel"),
        "lab site": ("mktts.notebook.site", "make a static site of executed notebooks"),
        "train texts": ("mktts.training.data.texts", "write sentences to learn from"),
        "train teacher": ("mktts.training.data.teacher", "have a teacher speak them: Kokoro, or any program"),
        "train codec": ("mktts.training.codec.train", "train encoder, codebooks and decoder"),
        "train talker": ("mktts.training.talker.train", "train talker and code predictor"),
        "train evaluate": ("mktts.training.judge.evaluate", "judge the voice beside its teacher"),
        "train ship": ("mktts.training.voice_report", "put the voice into the package"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
DESCRIPTION = "Qwen3-TTS speech, streamed frame by frame."
EXAMPLES = """examples:
  python -m mktts say "Hello there." -o hello.wav
  python -m mktts inspect small
  python -m mktts run notebooks/*.ipynb

`python -m mktts COMMAND --help` says more about each."""

_PROGRAM = "python -m mktts"
_NO_SUCH_PLACE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; MkttsError and OSError are reported in one line."""
    for name in "stdin", "stdout", "stderr":  # None if the caller closed it, as `>&-` does
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
    signals = []
    try:
        with _ended_by_sigterm(signals):
            arguments = parse(sys.argv[1:] if words is None else words)
            status = arguments.run(arguments)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # `| head`, or a player that was closed: end quietly, as a process killed by SIGPIPE
        _forget_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except MkttsError as error:
        print(f"mktts: {error}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:  # a package of an optional extra
        if (error.name or "mktts").split(".")[0] == "mktts":
            raise
        print(f"mktts: this needs the package {error.name}: pip install -r requirements.txt", file=sys.stderr)
        return 2
    except OSError as error:
        _forget_output()  # standard output may be what failed
        where = f"{error.filename}: " if error.filename else ""
        print(f"mktts: {where}{error.strerror or error}", file=sys.stderr)
        return 2 if isinstance(error, _NO_SUCH_PLACE) else 1
    except Exception:
        if not signals:
            raise
        return 128 + signals[0]  # C code, such as torch's import, may replace the SystemExit by another exception


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses `words` into the command's arguments; `run` holds its `main`. Exits on bad input, as argparse does."""
    for count in (2, 1):
        if (name := " ".join(words[:count])) in COMMANDS:
            path, summary = COMMANDS[name]
            module = importlib.import_module(path)
            parser = _parser(f"{_PROGRAM} {name}", f"{summary[0].upper()}{summary[1:]}.", module.EXAMPLES)
            module.add_arguments(parser)
            parser.set_defaults(run=module.main)
            return parser.parse_args(words[count:])
    _refuse(words)


def _refuse(words: Sequence[str]) -> NoReturn:
    """Exits with the list of all commands, or with a suggestion, when `words` name no command."""
    from mktts import __version__

    width, lines = max(map(len, COMMANDS)) + 2, []
    for heading, commands in GROUPS.items():
        lines += [f"{heading}:", *(f"  {name:{width}}{summary}" for name, (_, summary) in commands.items()), ""]
    parser = _parser(_PROGRAM, DESCRIPTION, "\n".join([*lines, EXAMPLES]), usage=f"{_PROGRAM} COMMAND ...")
    parser.add_argument("--version", action="version", version=f"mktts {__version__}", help="print the version")
    if words and not words[0].startswith("-"):
        near = [name for count in (2, 1) for name in difflib.get_close_matches(" ".join(words[:count]), COMMANDS, 1)]
        meant = f"did you mean {near[0]}?" if near else f"`{_PROGRAM} --help` lists all"
        parser.error(f"unknown command {words[0]!r}: {meant}")
    parser.parse_args(words)
    parser.exit(2, parser.format_help())


def _parser(program: str, description: str, epilog: str, usage: str | None = None) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program, usage, description, epilog, formatter_class=formatter)


@contextmanager
def _ended_by_sigterm(signals: list[int]) -> Iterator[None]:
    """Lets SIGTERM, recorded in `signals`, unwind the stack: models are closed, partial files removed; status 143."""

    def end(number: int, *_: object) -> NoReturn:
        signals.append(number)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _forget_output() -> None:
    """Discards buffered output that cannot be written; otherwise the interpreter's final flush would fail too."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
