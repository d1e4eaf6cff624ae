"""`python -m mktts voice`: reference audio to a voice file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mktts.checkpoint.arguments import add_checkpoint_arguments
from mktts.synth.say import check_output

EXAMPLES = """examples:
  python -m mktts voice me.wav -o me.safetensors --checkpoint path/to/base --ref-text "What I said."
  python -m mktts say "In my voice." -o mine.wav --checkpoint path/to/base --voice me.safetensors

Needs a base checkpoint. With the words of the recording the voice is cloned from the recording itself, without them
from its speaker embedding alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("audio", type=Path, metavar="AUDIO", help="a recording: any rate, mono or stereo")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the voice file to write")
    parser.add_argument("--ref-text", metavar="TEXT", help="what is said in the recording")
    add_checkpoint_arguments(parser, "random:tiny:base")


def main(arguments: argparse.Namespace) -> int:
    """Writes a voice file."""
    from mktts.checkpoint import open_checkpoint
    from mktts.synth.cloning import clone_voice

    check_output(arguments.output)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    clone_voice(checkpoint, arguments.audio, None, arguments.ref_text).save(Path(arguments.output))
    if checkpoint.is_random:
        print("random weights: this voice is of no one", file=sys.stderr)
    return 0
