"""The command line: `python -m mktts say | voice | text | inspect | bench | run | serve | agent`.

Exit status: 0 done; 1 a run or a stream failed; 2 bad input, said in one line; 130 interrupted; 141 the reader of
standard output went away.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from mktts.agent import command as agent_command
from mktts.checkpoint import DEFAULT_CHECKPOINT, SOURCES
from mktts.checkpoint.arguments import add_model_arguments
from mktts.errors import MkttsError
from mktts.llm import command as text_command
from mktts.measure.bench import here as bench
from mktts.notebook import runs as batch
from mktts.server import command as serve
from mktts.synth import say

DESCRIPTION = f"Qwen3-TTS speech, streamed frame by frame. A checkpoint is {SOURCES}."
EXAMPLES = f"""examples:
  python -m mktts say "Hello there." -o hello.wav
  python -m mktts inspect {DEFAULT_CHECKPOINT}
  python -m mktts bench
  python -m mktts run notebooks/*.ipynb

`python -m mktts COMMAND --help` says more about each."""


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar; each command's namespace carries its function as `run`."""
    parser = _parser(argparse.ArgumentParser, prog="python -m mktts", description=DESCRIPTION, epilog=EXAMPLES)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, text: str, run: object, *, examples: str) -> argparse.ArgumentParser:
        added = _parser(commands.add_parser, name, help=text, description=text, epilog=examples)
        added.set_defaults(run=run)
        return added

    speak = command(
        "say", "speak a text into a WAV file or, as it is made, to standard output", say.main, examples=say.EXAMPLES
    )
    say.add_arguments(speak)
    add_model_arguments(speak)
    write = command(
        "text", "continue a text with a Qwen3 text model", text_command.main, examples=text_command.EXAMPLES
    )
    text_command.add_arguments(write)
    voice = command("voice", "make a voice file from reference audio", say.make_voice, examples=say.VOICE_EXAMPLES)
    say.add_voice_arguments(voice)
    inspect = command("inspect", "show what is in a checkpoint", _inspect, examples=INSPECT_EXAMPLES)
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", help=SOURCES)
    inspect.add_argument("--revision", help="of a Hub id")
    inspect.add_argument(
        "--bandwidth", type=float, metavar="GB/s", help="memory bandwidth for the time floor per frame"
    )
    measure = command("bench", "measure: a table, then one line of JSON", bench.main, examples=bench.EXAMPLES)
    add_model_arguments(measure, checkpoint=None)
    bench.add_arguments(measure)
    run = command("run", "run notebooks headless over a grid of parameters", batch.main, examples=batch.EXAMPLES)
    batch.add_arguments(run)
    server = command("serve", "serve one model over HTTP and WebSocket", serve.main, examples=serve.EXAMPLES)
    add_model_arguments(server)
    serve.add_arguments(server)
    talk = command(
        "agent", "hold a conversation: on a page, a sound card, or a script", agent_command.main,
        examples=agent_command.EXAMPLES,
    )  # fmt: skip
    add_model_arguments(talk, checkpoint=None)
    agent_command.add_arguments(talk)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; errors of this package and of files print one line."""
    arguments = build_parser().parse_args(words)
    try:
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
        return 2


INSPECT_EXAMPLES = f"""examples:
  python -m mktts inspect {DEFAULT_CHECKPOINT}
  python -m mktts inspect path/to/checkpoint --bandwidth 4200"""


def _inspect(arguments: argparse.Namespace) -> int:
    from mktts.checkpoint import open_checkpoint
    from mktts.measure import inspection

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    print(inspection.describe(checkpoint, bandwidth_gb_s=arguments.bandwidth))
    return 0


def _parser(make: object, *names: str, **options: str) -> argparse.ArgumentParser:
    return make(*names, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
