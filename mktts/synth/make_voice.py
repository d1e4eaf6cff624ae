"""`python -m mktts voice`: reference audio to a voice file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mktts.checkpoint.arguments import add_checkpoint_arguments
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import require_writable
from mktts.errors import VoiceError

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.model.voice import Voice

EXAMPLES = """examples:
  python -m mktts voice me.wav -o me.safetensors --checkpoint path/to/base --ref-text "What I said."
  python -m mktts say "In my voice." -o mine.wav --checkpoint path/to/base --voice me.safetensors

Needs a base checkpoint. With the words of the recording the voice is cloned from the recording itself, without them
from its speaker embedding alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("audio", type=Path, metavar="AUDIO", help="a recording: any rate, mono or stereo")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the voice file to write")
    parser.add_argument("--ref-text", metavar="TEXT", help="what is said in the recording")
    add_checkpoint_arguments(parser, None, required=True)


def main(arguments: argparse.Namespace) -> int:
    """Writes a voice file."""
    from mktts.checkpoint import open_checkpoint

    require_writable(arguments.output)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    recorded_voice(checkpoint, arguments.audio, arguments.ref_text).save(Path(arguments.output))
    if checkpoint.is_random:
        print(RANDOM_WEIGHTS, file=sys.stderr)
    return 0


def recorded_voice(checkpoint: Checkpoint, audio: Path, ref_text: str | None) -> Voice:
    """The voice of a recording, as the options --ref-audio and --ref-text name it. Raises as `clone_voice`."""
    from mktts.synth.cloning import clone_voice

    if ref_text is not None and not ref_text.strip():
        raise VoiceError("--ref-text must be what the recording says, found nothing but blanks: or leave it out")
    return clone_voice(checkpoint, audio, None, ref_text)
